"""Stages of several ranks each: whatever one of them meets before its runner's step, all of its stage are told.

Four ranks, two of them a stage, each of which has half of every layer's weights. All numbers are whole and below a
prime, in float64: no order of additions changes a bit.
"""

import functools
import os
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch
import torch.distributed as dist

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph import standard as std
from slotgraph.dataflow.errors import BatchError, ConfigError, RankError, ReplayError
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.pipeline import PipelineStage
from tests.ranks.processes import Processes, ranks

HIDDEN, VOCAB, ROOM, PRIME = 8, 32, 64, 97
STAGES, SHARDS, LAYERS = 2, 2, 4
SIZES: Final = {std.HIDDEN: HIDDEN}
KINDS: Final = ("RankError", "BatchError", "ConfigError", "ReplayError", "ValueError")
Flow = dict[str, torch.Tensor]
Reduce = Callable[[torch.Tensor], object]


class First(Inputs):
    """What the first stage reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


@std.model_dtype(torch.float64)
class Later(First, std.PipelineProxies):
    """What the second reads beside."""


@functools.cache
def weights(place: int, *shape: int) -> torch.Tensor:
    """Whole numbers, the same in each process, none of them zero."""
    return torch.randint(1, PRIME, shape, generator=torch.Generator().manual_seed(place)).double()


def layer(place: int, view: First, flow: Flow, mine: slice, reduce: Reduce) -> Flow:
    """One layer, of which `mine` are the rows of weights that one rank has; `reduce` adds up what all of them have."""
    mixed = flow["hidden_states"] + weights(100 + place, ROOM, HIDDEN)[view.positions] * view.seq_lens.double()[:, None]
    part = mixed[:, mine] @ weights(place, HIDDEN, HIDDEN)[mine]
    reduce(part)
    out = torch.remainder(part + flow["residual"] * 3, PRIME)
    return {"hidden_states": out, "residual": torch.remainder(flow["residual"] + mixed, PRIME)}


def begin(view: First) -> Flow:
    """Embeddings."""
    hidden = weights(200, VOCAB, HIDDEN)[view.input_ids]
    return {"hidden_states": hidden, "residual": hidden.flip(1) + 1}


def end(flow: Flow) -> torch.Tensor:
    """Logits."""
    return flow["hidden_states"] @ weights(300, HIDDEN, VOCAB)


def whole(view: First) -> torch.Tensor:
    """The model in one process."""
    every = slice(0, HIDDEN)
    return end(functools.reduce(lambda flow, place: layer(place, view, flow, every, len), range(LAYERS), begin(view)))


CHANGES: Final[Mapping[str, Callable[[Flow], Flow]]] = {
    "keys": lambda flow: {**flow, "extra": torch.ones(3, 2)},
    "shape": lambda flow: {**flow, "hidden_states": flow["hidden_states"][:, :5]},
    "dtype": lambda flow: {**flow, "residual": flow["residual"].float()},
}


@attrs.define(eq=False)
class Part:
    """One rank's part of a stage's layers. fault: what it does wrong in the steps to come, when all is reduced."""

    rank: int
    group: Any
    fault: str = ""

    def __call__(self, view: Any) -> Any:
        """Proxies, or logits of the last stage."""
        stage, shard = divmod(self.rank, SHARDS)
        width, each = HIDDEN // SHARDS, LAYERS // STAGES
        flow = {key: getattr(view, f"pp_{key}") for key in ("hidden_states", "residual")} if stage else begin(view)
        for place in range(stage * each, (stage + 1) * each):
            flow = layer(place, view, flow, slice(shard * width, (shard + 1) * width), self._reduced)
        if self.fault == "raises":
            message = f"rank {self.rank} lost a page"
            raise ValueError(message)
        if stage == STAGES - 1:
            return end(flow)
        return CHANGES.get(self.fault, dict)(flow)

    def _reduced(self, part: torch.Tensor) -> None:
        dist.all_reduce(part, group=self.group)


@attrs.define(eq=False)
class Place:
    """One rank's stage, and its part of the model."""

    rank: int
    part: Part
    ranks: Ranks
    stage: PipelineStage

    @classmethod
    def of(cls, rank: int, **options: Any) -> "Place":
        """Captured. timeout: of all waits. equal: whether ranks of a stage are known to get the same batches."""
        shards: list[Any] = [
            dist.new_group([stage * SHARDS + place for place in range(SHARDS)]) for stage in range(STAGES)
        ]
        stages: list[Any] = [
            dist.new_group([place + stage * SHARDS for stage in range(STAGES)]) for place in range(SHARDS)
        ]
        stage, shard = divmod(rank, SHARDS)
        seconds, quiet = options.pop("timeout", 20.0), options.pop("equal", False)
        of_stage = Ranks(shards[stage], timeout=seconds, capture_timeout=20.0, equal=quiet)
        part, inputs = Part(rank, shards[stage]), Later if stage else First
        given: dict[str, Any] = {"buckets": [2, 4, 8], "backend": "cpu", **options}
        runner: DecodeRunner[Any] = DecodeRunner(
            inputs, part, sizes=SIZES if stage else {}, ranks=of_stage, progress=False, **given
        )
        runner.capture()
        return cls(rank, part, of_stage, PipelineStage(runner, stages[shard], timeout=seconds))

    def step(self, number: int, rows: int, fault: str = "") -> str:
        """One step, which this rank does wrong in one of several ways: what is raised, or nothing where it is right."""
        batch, side = batch_of(rows, number), dict[str, Any]()
        if fault == "batch":
            batch = {**batch, "positions": batch["positions"].to(torch.complex64)}
        if fault == "argument":
            side = {"pp_proxy_tensors": {}}
        self.part.fault = fault
        try:
            outputs = self.stage(batch, **side)
        except (BatchError, ConfigError, RankError, ReplayError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.part.fault = ""
        right = torch.equal(outputs, expected(batch)) if self.stage.last else outputs is None
        return "" if right else "wrong numbers"

    def flush(self) -> str:
        """What the next stage has to say of the last step."""
        try:
            self.stage.flush()
        except RankError as error:
            return str(error)
        return ""


def batch_of(rows: int, seed: int) -> dict[str, Any]:
    """Random tokens, never 0; the same on all ranks."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, VOCAB, (rows,), generator=draw),
        "positions": torch.randint(1, ROOM, (rows,), generator=draw),
        "seq_lens": torch.randint(1, 9, (rows,), generator=draw, dtype=torch.int32),
    }


def expected(batch: Mapping[str, Any]) -> torch.Tensor:
    """Of the whole model, in one process."""
    out: torch.Tensor = EagerRunner(First, whole, backend="cpu")(batch)
    return out


def decodes(rank: int, options: dict[str, Any]) -> tuple[list[str], int]:
    """Random steps, of buckets and none; exchanges that they took."""
    place, draw = Place.of(rank, **options), random.Random(5)  # noqa: S311 - sizes, no secrets
    before = place.ranks.exchanges
    found = [place.step(number, draw.randint(0, 10)) for number in range(60)]
    return [*found, place.flush()], place.ranks.exchanges - before


@pytest.mark.parametrize("options", [{}, {"backend": "cpu-capture"}, {"equal": True}], ids=str)
def test_right_numbers(four: Processes, options: dict[str, Any]) -> None:
    """Those of one process, whether or not the ranks of a stage exchange sizes: once a step, or never."""
    assert four.run(decodes, options) == [([""] * 61, 0 if "equal" in options else 60)] * 4


def one_fails(rank: int, where: int, fault: str) -> list[str]:
    """Five steps, of which one rank does the second wrong; after each what the next stage says is asked for."""
    place = Place.of(rank)
    return [place.step(number, 3, fault * (number == 1 and rank == where)) or place.flush() for number in range(5)]


def told_of(found: list[list[str]], number: int = 1) -> list[str]:
    """What each rank has to say of one step, where all others were right."""
    assert all(not text for one in found for i, text in enumerate(one) if i != number)
    return [one[number] for one in found]


@pytest.mark.parametrize(("fault", "sent"), [("keys", "extra"), ("shape", "hidden_states"), ("dtype", "residual")])
def test_one_gets_other_proxies(four: Processes, fault: str, sent: str) -> None:
    """It refuses them, its stage runs nothing, who sent them is told, and the next step is as good as any."""
    sender, other, receiver, fellow = told_of(four.run(one_fails, 0, fault))
    assert receiver.startswith("RankError: step 2: rank 0 sends ")
    assert f"{sent!r} is " in receiver
    assert sender.startswith("rank 2 refused what rank 0 sent in step 2: ")
    assert other == ""
    assert fellow.startswith(
        "RankError: rank 0 refused its batch, so that no rank runs the step: step 2: rank 0 sends "
    )
    assert "; rank 2 expects " in fellow


def test_one_raises_in_its_step(four: Processes) -> None:
    """The next stage runs nothing, on both of its ranks, and both are told who it was."""
    where = 1
    other, own, fellow, behind = told_of(four.run(one_fails, where, "raises"))
    assert other == ""
    assert own == "ReplayError: the step raised ValueError: rank 1 lost a page"
    assert behind == f"RankError: step 2: rank 1 has nothing for rank 3: {own}"
    assert fellow == behind.replace(
        "RankError: ", "RankError: rank 1 refused its batch, so that no rank runs the step: "
    )


@pytest.mark.parametrize("where", range(4))
def test_one_refuses_its_batch(four: Processes, where: int) -> None:
    """Its stage is told by its runner, the next one in letters, and no rank is asked twice."""
    told = told_of(four.run(one_fails, where, "batch"))
    stage, shard = divmod(where, SHARDS)
    for rank, text in enumerate(told):
        if rank // SHARDS < stage:
            assert text == ""
        elif rank == where:
            assert text.startswith("BatchError: slot 'positions': expected int64 ")
        else:
            assert text.startswith("RankError: ")
            assert f"rank {shard} refused its batch, so that no rank runs the step: slot 'positions'" in text or (
                rank == where + SHARDS and f"rank {where} has nothing for rank {rank}: BatchError: slot" in text
            )


FAULTS: Final = (("batch", "argument", "raises", *CHANGES), ("batch", "argument", "raises"))
"""What ranks of the first stage, and of the last, may do wrong in a step."""


@attrs.frozen
class Plan:
    """One step of all ranks. faults: by rank. flushed: whether each asks at once what the next stage has to say."""

    number: int
    rows: int
    faults: tuple[str, ...]
    flushed: bool


def plans(seed: int, steps: int) -> list[Plan]:
    """Random ones, the same for all who draw them: half of them without a fault, some with several."""
    draw = random.Random(seed)  # noqa: S311 - faults, no secrets

    def faults() -> tuple[str, ...]:
        often = draw.choice([0.0, 0.0, 0.3, 0.6])
        return tuple(draw.choice(FAULTS[rank // SHARDS]) if draw.random() < often else "" for rank in range(4))

    return [Plan(number, draw.randint(0, 9), faults(), draw.random() < 0.5) for number in range(steps)]


def failing(every: list[Plan]) -> list[list[bool]]:
    """Which ranks fail in which steps, as the rules have it; by step, by rank."""
    unread, found = [False] * SHARDS, list[list[bool]]()
    for plan in every:
        first, last = plan.faults[:SHARDS], plan.faults[SHARDS:]
        stopped = any(unread) or any(fault in ("batch", "argument") for fault in first)
        failed = [stopped or fault == "raises" for fault in first]
        unread = [not failed[i] and (first[i] in CHANGES or last[i] == "argument") for i in range(SHARDS)]
        behind = any(failed) or any(unread) or any(fault in ("batch", "argument") for fault in last)
        found.append([*failed, *(behind or fault == "raises" for fault in last)])
        unread = [there and not plan.flushed for there in unread]
    return found


def storm(rank: int, seed: int, steps: int, options: dict[str, Any]) -> list[str]:
    """All steps of a plan; what each says."""
    place, found = Place.of(rank, **options), list[str]()
    for plan in plans(seed, steps):
        found.append(place.step(plan.number, plan.rows, plan.faults[rank]))
        if plan.flushed:
            place.flush()
    place.flush()
    return found


def test_random_faults(four: Processes) -> None:
    """Nobody waits for what does not come, ranks of a stage fail together, and the step after is as good as any."""
    every = plans(3, 400)
    wanted = failing(every)
    for step, (plan, *said) in enumerate(zip(every, *four.run(storm, 3, 400, {}), strict=True)):
        assert [bool(one) for one in said] == wanted[step], (plan, said)
        assert all(one.partition(":")[0] in ("", *KINDS) for one in said)
    together = [any(one) for one in wanted]
    assert 100 < sum(together) < 300
    assert sum(all(one) for one in wanted) > 50


@pytest.mark.parametrize("fault", ["batch", "raises"])
@pytest.mark.parametrize("options", [{}, {"equal": True}], ids=str)
def test_a_stage_fails_as_a_whole(four: Processes, options: dict[str, Any], fault: str) -> None:
    """All of the next one are told by letters, and tell each other, or not: none waits, and the next step is right."""
    said = four.run(stages_fail, options, fault)
    texts = told_of(said)
    assert [text.partition(":")[0] for text in texts[:2]] == [
        {"batch": "BatchError", "raises": "ReplayError"}[fault]
    ] * 2
    assert [f"rank {rank} has nothing for rank {rank + 2}: " in texts[rank + 2] for rank in range(2)] == [True, True]


def stages_fail(rank: int, options: dict[str, Any], fault: str) -> list[str]:
    """Both ranks of the first stage do the second of five steps wrong."""
    place = Place.of(rank, **options)
    return [place.step(number, 3, fault * (number == 1 and rank < SHARDS)) or place.flush() for number in range(5)]


def ahead(rank: int, fault: str) -> tuple[list[str], int]:
    """Steps agreed on ahead within each stage, every third of which the first stage does wrong; exchanges."""
    place, found, draw = Place.of(rank), list[str](), random.Random(4)  # noqa: S311 - sizes, no secrets
    before = place.ranks.exchanges
    for number in range(30):
        rows = draw.randint(1, 9)
        stand_in = torch.empty(rows, HIDDEN, dtype=torch.float64, device="meta")
        proxies = {"hidden_states": stand_in, "residual": stand_in} if place.stage.rank else {}
        side = {"pp_proxy_tensors": proxies} if proxies else {}
        place.stage.runner.agree_ahead(batch_of(rows, number), **side)
        found.append(place.step(number, rows, fault * (number % 3 == 1 and rank < SHARDS)))
    return [*found, place.flush()], place.ranks.exchanges - before


@pytest.mark.parametrize("fault", ["argument", "batch", "raises"])
def test_agreed_ahead(four: Processes, fault: str) -> None:
    """What was told ahead of a step that does not come to be is heard, so that the next step can be told of."""
    for found, exchanges in four.run(ahead, fault):
        assert [bool(text) for text in found] == [number % 3 == 1 for number in range(30)] + [False]
        assert exchanges == 30


class Interrupting(dict[str, Any]):
    """A batch that somebody presses a key over."""

    def __getitem__(self, name: str) -> Any:
        """Pressed."""
        raise KeyboardInterrupt(name)


def ends_early(rank: int, how: str) -> str:
    """Rank 0's step ends before its runner begins to agree; rank 1 waits for it in what it does next."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    of_stage = Ranks(timeout=2.0, capture_timeout=20.0 if how == "interrupt" else 2.0, equal=how == "quiet")
    runners = [
        DecodeRunner(First, lambda view: view.positions * 2, ranks=of_stage, buckets=[4], backend="cpu", progress=False)
        for _ in range(2)
    ]
    runners[0].capture()
    stage = PipelineStage(runners[0], groups[rank])
    if rank == 0:
        with pytest.raises((ConfigError, KeyboardInterrupt)) as ended:
            stage(Interrupting(), **({"pp_proxy_tensors": {}} if how == "quiet" else {}))
        return type(ended.value).__name__
    with pytest.raises(RankError) as caught:
        runners[1].capture() if how == "quiet" else stage(batch_of(3, 1))
    return str(caught.value)


@pytest.mark.parametrize(("how", "kind"), [("quiet", "ConfigError"), ("interrupt", "KeyboardInterrupt")])
def test_who_asks_nobody_leaves_word(tmp_path: pathlib.Path, how: str, kind: str) -> None:
    """Quiet ranks, and one that was interrupted, exchange nothing: whoever waits for them is told what happened."""
    with ranks(2, tmp_path) as made:
        first, second = made.run(ends_early, how)
    assert first == kind
    assert f"rank 0 did not come within 2 s: it broke off a step before: {kind}: " in second


def test_one_ends_early_in_a_stage_of_one_pipeline(two: Processes) -> None:
    """With one stage there are no letters, but the ranks of it tell each other all the same."""
    first, second = two.run(argument)
    assert first == ["", "pp_proxy_tensors is received from the stage before: do not give it", ""]
    assert second == ["", f"rank 0 refused its batch, so that no rank runs the step: {first[1]}", ""]


def argument(rank: int) -> list[str]:
    """Rank 0 gives an argument that it may not give, in the second of three steps."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    runner = EagerRunner(First, lambda view: view.positions * 2, ranks=Ranks(timeout=20.0), backend="cpu")
    stage, found = PipelineStage(runner, groups[rank]), list[str]()
    for number in range(3):
        side: dict[str, Any] = {"pp_proxy_tensors": {}} if number == 1 and rank == 0 else {}
        try:
            assert torch.equal(stage(batch_of(3, number), **side), batch_of(3, number)["positions"] * 2)
            found.append("")
        except (ConfigError, RankError) as error:
            found.append(str(error))
    return found


def lost(rank: int, where: int, *, dies: bool) -> str:
    """One rank leaves after the first step, dead or not; the first error of each other."""
    place, said = Place.of(rank, timeout=10.0 if dies else 2.0), ""
    assert place.step(0, 3) == place.flush() == ""
    dist.barrier()
    if rank == where and dies:
        os._exit(1)
    if rank != where:
        first, second = place.step(1, 3), place.step(2, 3)
        said = first or second or place.flush()  # an earlier stage learns of it when it has sent, and sent again
    if not dies:
        dist.barrier()  # until all have been told
    return said


@pytest.mark.parametrize(
    ("where", "dies", "wanted"),
    [
        (1, True, {0: "rank 1 did not come", 2: "rank 0 has nothing for rank 2: ", 3: "rank 3: rank 1 is gone"}),
        (2, True, {0: "rank 0: rank 2 is gone", 1: "rank 0: rank 2 is gone", 3: "rank 0 did not come"}),
        (1, False, {0: "rank 1 did not come", 2: "rank 1 did not come", 3: "rank 3: rank 1 said nothing for "}),
    ],
)
def test_a_lost_rank(tmp_path: pathlib.Path, where: int, wanted: dict[int, str], *, dies: bool) -> None:
    """None waits for ever: those who wait for it say so first, its stage by its place there; and tell all others."""
    with ranks(4, tmp_path) as made:
        outcomes = made.outcomes(functools.partial(lost, dies=dies), where)
    assert (outcomes[where] is None) == dies
    told = {rank: "nothing" if one is None else one.value or one.trace for rank, one in enumerate(outcomes)}
    assert all(told[rank].startswith("RankError: ") and text in told[rank] for rank, text in wanted.items()), told
