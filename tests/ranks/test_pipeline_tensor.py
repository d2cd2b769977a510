"""Stages of several ranks each: whatever one of them meets before its runner's step, all of its stage are told.

Four ranks, two of them a stage, each of which has half of every layer's weights.
"""

import functools
import itertools
import os
import pathlib
import random
from typing import Any, Final

import attrs
import pytest
import torch
import torch.distributed as dist

from slotgraph import DecodeRunner
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.pipeline import PipelineStage
from tests.ranks.processes import Processes, raised, ranks
from tests.ranks.staged import ALL, CHANGES, CHOSEN, SIZES, First, Later, Part, batch_of, expected
from tests.ranks.stepping import runner_on, soon
from tests.runners.prefilled import HIDDEN

STAGES, SHARDS = 2, 2
KINDS: Final = ("RankError", "BatchError", "ConfigError", "ReplayError", "ValueError")


@attrs.define(eq=False)
class Place:
    """One rank's stage, and its part of the model."""

    part: Part
    ranks: Ranks
    stage: PipelineStage

    @classmethod
    def of(cls, rank: int, **options: Any) -> "Place":
        """Captured. timeout: of all waits. equal: whether ranks of a stage are known to get the same batches."""
        shards, stages = (
            [dist.new_group(members) for members in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
        )
        stage, shard = divmod(rank, SHARDS)
        seconds: float = options.pop("timeout", 20.0)
        of_stage = soon(group=shards[stage], timeout=seconds, equal=options.pop("equal", False))
        part = Part(stage, STAGES, shard, SHARDS, shards[stage])
        expected(batch_of(1, 1))  # weights are made before a graph is
        runner = runner_on(of_stage, part, Later if stage else First, sizes=SIZES if stage else {}, **options)
        group: Any = stages[shard]
        return cls(part, of_stage, PipelineStage(runner, group, timeout=seconds))

    def step(self, number: int, rows: int, fault: str = "") -> str:
        """One step, which this rank does wrong in one of several ways: what is raised, or nothing where it is right."""
        batch, outputs = batch_of(rows, number), list[Any]()
        given = {**batch, "positions": batch["positions"].to(torch.complex64)} if fault == "batch" else batch
        side: dict[str, Any] = {"pp_proxy_tensors": {}} if fault == "argument" else {}
        self.part.fault = fault
        error = raised(lambda: outputs.append(self.stage(given, **side)))
        self.part.fault = ""
        if error:
            return error
        right = torch.equal(outputs[0], expected(batch)) if self.stage.last else outputs == [None]
        return "" if right else "wrong numbers"

    def flush(self) -> str:
        """Whether the next stage is there to receive."""
        return raised(self.stage.flush)


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


def some_fail(rank: int, where: list[int], fault: str, options: dict[str, Any]) -> list[str]:
    """Three steps, of which some ranks do the second wrong; after each what the next stage says is asked for."""
    place = Place.of(rank, **options)
    return [place.step(number, 3, fault * (number == 1 and rank in where)) or place.flush() for number in range(3)]


def told_of(processes: Processes, where: list[int], fault: str, **options: Any) -> list[str]:
    """What each rank has to say of the second step, where all others were right."""
    found = processes.run(some_fail, where, fault, options)
    assert [(first, last) for first, _, last in found] == [("", "")] * 4
    return [one for _, one, _ in found]


OWN: Final = "ReplayError: the step raised ValueError: shard 1 of stage 0 lost a page"
REFUSED: Final = "refused its batch, so that no rank runs the step: "
ONE_FAILS: Final[tuple[tuple[int, str, list[str]], ...]] = (
    (0, "keys", ["", "", "RankError: step 2: rank 0 sends ", f"RankError: rank 0 {REFUSED}step 2: rank 0 sends "]),
    (
        1,
        "raises",
        [
            "",
            OWN,
            f"RankError: rank 1 {REFUSED}step 2: rank 1 has",
            f"RankError: step 2: rank 1 has nothing for rank 3: {OWN}",
        ],
    ),
    (0, "batch", ["BatchError: slot ", f"RankError: rank 0 {REFUSED}", "RankError: ", "RankError: "]),
    (1, "batch", [f"RankError: rank 1 {REFUSED}", "BatchError: slot ", "RankError: ", "RankError: "]),
    (2, "batch", ["", "", "BatchError: slot ", f"RankError: rank 0 {REFUSED}slot 'positions'"]),
    (3, "batch", ["", "", f"RankError: rank 1 {REFUSED}slot 'positions'", "BatchError: slot "]),
)
"""Who does what wrong in a step, and how what each rank is told begins."""


def test_one_fails(four: Processes) -> None:
    """Its stage is told by its runner, the next one in messages; neither runs, and the next step is as good as any."""
    for where, fault, wanted in ONE_FAILS:
        texts = told_of(four, [where], fault)
        for text, begin in zip(texts, wanted, strict=True):
            assert text.startswith(begin), (where, fault, texts)
            assert bool(text) == bool(begin)
        if fault == "keys":
            assert all("sends 'extra', and no slot of rank 2 reads it" in text for text in texts[2:])
        if fault == "batch":
            assert all("slot 'positions'" in text for text in texts if text)


def test_a_stage_fails_as_a_whole(four: Processes) -> None:
    """All of the next one are told by messages, and tell each other, or not: none waits, and the next step is right."""
    for equal, (fault, kind) in itertools.product((False, True), (("batch", "BatchError"), ("raises", "ReplayError"))):
        texts = told_of(four, [0, 1], fault, equal=equal)
        assert [text.partition(":")[0] for text in texts[:2]] == [kind] * 2
        assert all(f"rank {rank} has nothing for rank {rank + 2}: " in texts[rank + 2] for rank in range(2))


FAULTS: Final = (("batch", "argument", "raises", "keys", "shape", "dtype"), ("batch", "argument", "raises"))
"""What ranks of the first stage, and of the last, may do wrong in a step."""


@attrs.frozen
class Plan:
    """One step of all ranks. faults: by rank. flushed: whether each waits at once until its proxies are received."""

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


def failing(plan: Plan) -> list[bool]:
    """Which ranks fail in a step, as the rules have it."""
    first, last = plan.faults[:SHARDS], plan.faults[SHARDS:]
    stopped = any(fault in ("batch", "argument") for fault in first)
    failed = [stopped or fault == "raises" for fault in first]
    behind = any(failed) or any(fault in CHANGES for fault in first)
    behind |= any(fault in ("batch", "argument") for fault in last)
    return [*failed, *(behind or fault == "raises" for fault in last)]


def storm(rank: int, seed: int, steps: int) -> list[str]:
    """All steps of a plan; what each says."""
    place, found = Place.of(rank), list[str]()
    for plan in plans(seed, steps):
        found.append(place.step(plan.number, plan.rows, plan.faults[rank]))
        if plan.flushed:
            place.flush()
    place.flush()
    return found


def test_random_faults(four: Processes) -> None:
    """Nobody waits for what does not come, ranks of a stage fail together, and the step after is as good as any."""
    every = plans(3, 300)
    wanted = [failing(plan) for plan in every]
    for step, (plan, *said) in enumerate(zip(every, *four.run(storm, 3, 300), strict=True)):
        assert [bool(one) for one in said] == wanted[step], (plan, said)
        assert all(one.partition(":")[0] in ("", *KINDS) for one in said)
    together = [any(one) for one in wanted]
    assert 80 < sum(together) < 220
    assert sum(all(one) for one in wanted) > 40


def ahead(rank: int, fault: str) -> tuple[list[str], int]:
    """Steps agreed on ahead within each stage, every third of which the first stage does wrong; exchanges."""
    place, found, draw = Place.of(rank), list[str](), random.Random(4)  # noqa: S311 - sizes, no secrets
    before = place.ranks.exchanges
    for number in range(18):
        rows = draw.randint(1, 9)
        shapes = zip(ALL, (HIDDEN, HIDDEN, CHOSEN), (torch.float64, torch.float64, torch.int32), strict=True)
        proxies = {key: torch.empty(rows, size, dtype=dtype, device="meta") for key, size, dtype in shapes}
        side: dict[str, Any] = {"pp_proxy_tensors": proxies} if place.stage.rank else {}
        place.stage.runner.agree_ahead(batch_of(rows, number), **side)
        found.append(place.step(number, rows, fault * (number % 3 == 1 and rank < SHARDS)))
    return [*found, place.flush()], place.ranks.exchanges - before


@pytest.mark.parametrize("fault", ["argument", "batch", "raises"])
def test_agreed_ahead(four: Processes, fault: str) -> None:
    """What was told ahead of a step that does not come to be is heard, so that the next step can be told of."""
    for found, exchanges in four.run(ahead, fault):
        assert [bool(text) for text in found] == [number % 3 == 1 for number in range(18)] + [False]
        assert exchanges == 18


class Interrupting(dict[str, Any]):
    """A batch that somebody presses a key over."""

    def __getitem__(self, name: str) -> Any:
        """Pressed."""
        raise KeyboardInterrupt(name)


def ends_early(rank: int, how: str) -> str:
    """Rank 0's step ends before its runner begins to agree; rank 1 waits for it in what it does next."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    quiet = how == "ConfigError"
    of_stage = soon(timeout=1.2, equal=quiet)
    given: dict[str, Any] = {"buckets": [4], "backend": "cpu", "progress": False, "ranks": of_stage}
    runner, other = (DecodeRunner(First, lambda view: view.positions * 2, **given) for _ in range(2))
    runner.capture()
    of_stage.capture_timeout = 1.2
    stage = PipelineStage(runner, groups[rank])
    if rank == 1:
        return raised(other.capture) if quiet else raised(stage, batch_of(3, 1))
    try:
        return raised(stage, Interrupting(), **({"pp_proxy_tensors": {}} if quiet else {}))
    except KeyboardInterrupt:
        return "KeyboardInterrupt: "


@pytest.mark.parametrize("kind", ["ConfigError", "KeyboardInterrupt"])
def test_who_asks_nobody_leaves_word(two: Processes, kind: str) -> None:
    """Quiet ranks, and one that was interrupted, exchange nothing: whoever waits for them is told what happened."""
    first, second = two.run(ends_early, kind)
    assert first.startswith(f"{kind}: ")
    assert f"rank 0 did not come within 1.2 s: it broke off a step before: {kind}: " in second


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
