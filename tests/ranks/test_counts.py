"""Counts of all ranks in their steps: each view is held to what everybody's schedule says, in every kind of step."""

import collections
import random
from typing import Any, Final

import attrs
import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, EagerRunner, copied, standard
from slotgraph.ranks import Ranks
from tests.ranks import stepping
from tests.ranks.processes import Processes, all_gather, raised
from tests.ranks.stepping import runner_on, soon
from tests.runners.prefilled import poison

ROOM: Final = 64
"""More tokens than any rank brings."""


class Shared(stepping.Counted, standard.DataParallelAgreed, standard.ExpertParallelSharded):
    """Decode: a row of logits a token."""


class Extended(stepping.Counted, standard.ExpertParallelSharded, standard.DataParallelAgreedExtend):
    """Draft-extend: a row of logits a request."""


DP: Final = standard.DP
COUNTS: Final[tuple[str, ...]] = ("global_num_tokens", "global_num_tokens_for_logprob", "num_token_non_padded")


@attrs.frozen
class World:
    """Ranks, of which each `shards` in a row share a batch, and the runner that they step with."""

    size: int
    shards: int = 1
    kind: str = "decode"
    backend: str = "cpu"
    lowering: str = "in_graph"
    equal: bool = False

    @property
    def width(self) -> int:
        """Tokens of each request."""
        return 3 if self.kind == "extend" else 1

    @property
    def buckets(self) -> tuple[int, ...]:
        """Of requests; their tokens divide among shards."""
        return tuple(rows * self.shards for rows in (1, 2, 3))

    def runner(self, inputs: type[Any], step: Any) -> Any:
        """One that is ready to step."""
        of_ranks, sizes = soon(shards=self.shards, equal=self.equal), {DP: self.size // self.shards}
        given: dict[str, Any] = {"sizes": sizes, "backend": self.backend}
        if self.kind == "eager":
            return EagerRunner(inputs, step, ranks=of_ranks, **given)
        options = {"buckets": self.buckets, "width": self.width, "lowering": self.lowering, "output_rows": None}
        return runner_on(of_ranks, step, inputs, **options, **given)

    def drawn(self, draw: random.Random) -> list[int]:
        """Requests of each batch in one step: idle ones among them, and now and then one too large for a graph."""
        batches, most = self.size // self.shards, self.buckets[-1]
        if self.kind == "eager" or draw.random() < 0.25:  # nothing is padded: tokens themselves divide among shards
            found = [self.shards * draw.randint(0, 5) for _ in range(batches)]
            found[draw.randrange(batches)] = draw.choice([0, most + self.shards])
        else:
            found = [draw.choice([0, draw.randint(1, most), draw.randint(1, most)]) for _ in range(batches)]
        return [found[0]] * batches if self.equal else found

    def bucket(self, rows: list[int]) -> int | None:
        """The one that all run; None where they run eagerly."""
        fitting = [] if self.kind == "eager" else [size for size in self.buckets if size >= max(rows)]
        return fitting[0] if fitting else None

    def batch(self, number: int, rows: int, seed: int) -> dict[str, Any]:
        """What all ranks that share a batch bring."""
        draw = torch.Generator().manual_seed(seed * 16 + number)
        ids = torch.randint(1, 99, (rows * self.width,), generator=draw)
        return {"ids": ids, "weights": torch.randint(1, 9, (rows,), generator=draw).float()}

    def wanted(self, rank: int, rows: list[int], seed: int) -> dict[str, list[Any]]:
        """A rank's view, and what its step gives, in plain Python."""
        own, place = rows[rank // self.shards], rank % self.shards
        bucket = self.bucket(rows)
        padded = own if bucket is None else bucket
        tokens, chunk = [count * self.width for count in rows], padded * self.width // self.shards
        part = range(chunk * place, chunk * (place + 1))
        batch = self.batch(rank // self.shards, own, seed)
        everyone = [self.batch(number, count, seed)["ids"].sum().item() for number, count in enumerate(rows)]
        return {
            "ids": batch["ids"].tolist() + [-5] * ((padded - own) * self.width),
            "weights": batch["weights"].tolist() + [-3] * (padded - own),
            "global_num_tokens": tokens,
            "global_num_tokens_for_logprob": rows if self.kind == "extend" else tokens,
            "num_token_non_padded": [sum(row < own * self.width for row in part)],
            "gathered": [sum(everyone)],
        }


def gathering(shards: int) -> Any:
    """A step that gathers the padded rows of all ranks, and adds up those that counts say are live, each batch once."""

    def step(view: Any) -> tuple[torch.Tensor, ...]:
        own = torch.full((ROOM,), 1000)
        own[: view.ids.shape[0]] = view.ids
        everyone = torch.empty(dist.get_world_size() * ROOM, dtype=torch.int64)
        all_gather(everyone, own)
        live = torch.arange(ROOM) < view.global_num_tokens[:, None]
        gathered = (everyone.view(-1, shards, ROOM)[:, 0] * live).sum()
        return (*(getattr(view, name) + 0 for name in COUNTS), gathered.reshape(1))

    return step


@attrs.frozen
class Rank:
    """One rank's part in a schedule. wrong: what differed from plain Python. steps: how many there were, by kind."""

    world: World
    rank: int
    runner: Any
    wrong: list[Any] = attrs.field(factory=list)
    steps: collections.Counter[str] = attrs.field(factory=collections.Counter)

    def play(self, rows: list[int], seed: int, *, ahead: bool) -> None:
        """One step of so many requests by batch; without any, a rank is idle, or brings an empty batch, in turn."""
        right, number = self.world.wanted(self.rank, rows, seed), self.rank // self.world.shards
        batch = self.world.batch(number, rows[number], seed)
        poison(self.runner)
        if not rows[number] and seed % 2:
            self.steps["idle"] += 1
            outputs = self.runner.idle()
        else:
            if ahead:
                self.runner.agree_ahead(batch)
            view = self.runner.fill(batch)
            self.compare("view", right, {name: getattr(view, name).tolist() for name in right if name != "gathered"})
            self.steps["eager" if self.world.bucket(rows) is None else "graph"] += 1
            outputs = self.runner.replay(view)
        if outputs is None:  # nobody had a request, and all said so
            self.compare("rows", {"all": sum(rows)}, {"all": 0})
        else:
            named = zip((*COUNTS, "gathered"), (one.tolist() for one in outputs), strict=True)
            self.compare("outputs", right, dict(named))

    def compare(self, what: str, right: dict[str, Any], found: dict[str, Any]) -> None:
        """Note what differs."""
        self.wrong.extend((what, name, got, right[name]) for name, got in found.items() if got != right[name])


def scheduled(rank: int, world: World, steps: int) -> tuple[list[Any], dict[str, int]]:
    """So many steps of random sizes, the same for all who draw them: what was wrong here, and what there was."""
    one = Rank(world, rank, world.runner(Extended if world.kind == "extend" else Shared, gathering(world.shards)))
    ranks: Ranks = one.runner.stage.declaration.ranks
    draw, before = random.Random(5), ranks.exchanges
    for seed in range(steps):
        one.play(world.drawn(draw), seed, ahead=draw.random() < 0.3)
    return one.wrong, {**one.steps, "exchanged": ranks.exchanges - before}


WAYS: Final = [
    ("decode", "cpu", "in_graph"),
    ("decode", "cpu-capture", "in_graph"),
    ("decode", "cpu-capture", "foreach"),
    ("decode", "cpu", "slot_by_slot"),
    ("extend", "cpu-capture", "fused"),
    ("eager", "cpu", "foreach"),
]


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_a_slot_has_the_counts_of_all_ranks(two: Processes, four: Processes, way: tuple[str, str, str]) -> None:
    """A computed slot that asks for ranks has each one's live sizes, of this very step, without another exchange.

    Ranks have a batch each, share one, or both at once; those that bring the same exchange nothing.
    """
    ways = ((two, 1, False), (two, 2, False), (four, 1, False), (four, 2, False), (four, 4, False), (two, 2, True))
    for processes, shards, equal in ways:
        world = World(len(processes.pipes), shards, *way, equal=equal)
        found = processes.run(scheduled, world, 90)
        assert [wrong for wrong, _ in found] == [[]] * world.size
        for _, told in found:
            assert told["exchanged"] == (0 if world.equal else 90)
            assert told["eager"] > 5
            assert told["idle"] > 0
            assert (told.get("graph", 0) > 30) == (world.kind != "eager")


def run_torn(rank: int, one: Rank, how: str) -> None:
    """A step of two batches of two ranks each, where rank 3 brings another size than rank 2."""
    batch = one.world.batch(rank // 2, 4 if rank == 3 else 2, 5)
    if how == "idle" and rank == 3:
        one.runner.idle()
        return
    if how == "ahead":
        one.runner.agree_ahead(batch)
    one.runner(batch)


def torn(rank: int, kind: str, how: str) -> tuple[str, bool, list[Any]]:
    """What is raised of it, whether nothing was written, and what was wrong in the steps before and after."""
    world = World(4, 2, kind)
    one = Rank(world, rank, world.runner(Shared, gathering(2)))
    one.play([4, 2], 1, ahead=False)
    view = one.runner.fill(world.batch(rank // 2, 4, 1))
    one.runner.replay(view)
    slots = [getattr(view, name) for name in ("ids", "weights", *COUNTS)]
    before = [slot.clone() for slot in slots]
    told = raised(run_torn, rank, one, how)
    same = all(torch.equal(old, slot) for old, slot in zip(before, slots, strict=True))
    for seed in range(2, 6):
        one.play([2, 4], seed, ahead=how == "ahead")
    return told, same, one.wrong


@pytest.mark.parametrize("kind", ["decode", "eager"])
@pytest.mark.parametrize("how", ["plain", "ahead", "idle"])
def test_ranks_that_share_a_batch_bring_the_same_sizes(four: Processes, kind: str, how: str) -> None:
    """Where they do not, no rank runs the step, whoever's batch it is; all are told who brings what."""
    sizes = "0 BATCH, 0 TOKENS" if how == "idle" else "4 BATCH, 4 TOKENS"
    said = "RankError: each 2 ranks in a row share a batch, so that no rank runs the step: "
    told = f"{said}rank 2 brings 2 BATCH, 2 TOKENS; rank 3 brings {sizes}"
    assert four.run(torn, kind, how) == [(told, True, [])] * 4


class Bare(standard.DataParallelAgreed):
    """Nothing of the batch has tokens."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)


def refused(rank: int, case: str) -> str:
    """What a first step raises where ranks and declarations do not fit."""
    shards, batches = {"undivided": (3, 1), "sizes": (2, 4), "axis": (1, 4), "part": (4, 1)}[case]
    halves: list[Any] = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    of_ranks = soon(group=halves[rank % 2] if case == "part" else None, shards=shards)
    if case == "axis":  # where a decode runner knows the tokens of a request
        runner = EagerRunner(Bare, lambda view: view.ids + 1, sizes={DP: batches}, ranks=of_ranks, backend="cpu")
    else:
        runner = runner_on(of_ranks, lambda view: view.ids + 1, Shared, buckets=[12], sizes={DP: batches})
    return raised(runner, stepping.batch_of(1 + rank // 2, rank))


def follows(rank: int, width: int) -> list[list[int]]:
    """Tokens of each rank's batch, where every slot is over requests: in a graph, and beyond the largest."""
    given: dict[str, Any] = {"sizes": {DP: 4}, "width": width, "output_rows": BATCH, "buckets": [4]}
    runner = runner_on(soon(), lambda view: view.ids + 1, Bare, **given)
    fills = (runner.fill({"ids": torch.arange(rows + rank) + 1}) for rows in (1, 3))
    return [view.global_num_tokens.tolist() for view in fills]


def test_tokens_that_follow_from_requests_are_told(four: Processes) -> None:
    """A decode runner's ranks tell each other tokens that no slot has: as many for each request."""
    told = [[3 * (rows + rank) for rank in range(4)] for rows in (1, 3)]
    assert four.run(follows, 3) == [told] * 4


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("undivided", "4 ranks do not divide into groups of 3 that share a batch"),
        ("part", "2 ranks do not divide into groups of 4 that share a batch"),
        (
            "sizes",
            "sizes has DP = 4, and 4 ranks, of which each 2 in a row share a batch, have 2 batches: give DP the size 2",
        ),
        ("axis", "ranks do not exchange their live rows on TOKENS"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(four: Processes, case: str, said: str) -> None:
    """All are told alike, with the numbers."""
    assert all(told.startswith(f"ConfigError: {said}") for told in four.run(refused, case))
