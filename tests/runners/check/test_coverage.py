"""Coverage: garbage that shows what is not written, and slots that nothing reads, where that can be known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, constant, copied, host_parameter, once, output
from slotgraph.backends import choose
from slotgraph.runners.check.coverage import _may_be_read
from slotgraph.runners.check.fills import garbage, over_garbage
from slotgraph.runners.check.reads import needed_slots, read_slots
from slotgraph.runners.check.report import Case
from tests.runners.models import bytes_of, memory_of, plain_runner, random_batch
from tests.runners.check.planted import HalfWritten, Sound, runner_of, sound
from tests.strategies import DTYPES

COVERAGE = ("coverage",)


@settings(max_examples=30)
@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=3), seed=st.integers(0, 99))
def test_garbage_differs_everywhere(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    """Two kinds of garbage have no element in common, so that one that is not written always shows."""
    like = torch.empty(shape, dtype=dtype)
    one, other = (garbage(like, torch.Generator().manual_seed(seed), flipped=flipped) for flipped in (False, True))
    assert one.shape == other.shape == like.shape
    assert one.dtype == other.dtype == dtype
    assert all(a != b for a, b in zip(bytes_of(one), bytes_of(other), strict=True))
    assert dtype != torch.bool or set(bytes_of(one)) <= {0, 1}


def test_garbage_is_taken_back(cpu: str) -> None:
    """Where a fill is refused, what lay there before lies there again, and the runner goes on."""
    runner = plain_runner(cpu)
    runner(random_batch(8, 1))
    before, batch = memory_of(runner), random_batch(3, 2)
    with pytest.raises(ValueError, match="slot 'ids'"):
        _refused_over_garbage(runner, batch, before)
    assert memory_of(runner) == before


def _refused_over_garbage(runner: Any, batch: dict[str, torch.Tensor], before: dict[str, bytes]) -> None:
    with over_garbage(runner, Case(batch, {}, 3), torch.Generator()):
        assert memory_of(runner) != before
        runner.fill({**batch, "ids": batch["ids"].float()})


class Shapes(Inputs):
    """Slots that a step may read in many ways, or not at all."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    looked_at: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    sliced: torch.Tensor = copied(TOKENS, 2, dtype=torch.float32, pad=0)
    by_operator: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=0)
    needed: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    made: torch.Tensor = computed(lambda needed: needed + 1, shape=BATCH, dtype=torch.int64)
    maybe: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    set_once: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(1))
    fixed: torch.Tensor = constant(3, shape=BATCH, dtype=torch.int64)
    on_host: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    lens: torch.Tensor = host_parameter(BATCH, dtype=torch.int32, pad=0)
    lent: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    outside: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    result: torch.Tensor = output(TOKENS, dtype=torch.float32)


@torch.library.custom_op("slotgraph_tests::proofs_twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    """An operator of its own."""
    return values * 2


def reads_some(view: Shapes) -> torch.Tensor:
    """Reads a part of one slot, gives another to an operator of its own, and looks at the shape of a third."""
    rows = view.looked_at.view(-1, 1).shape[0]
    view.result.copy_(view.sliced.transpose(0, 1)[1, :rows] + twice(view.by_operator) + view.ids + view.made)
    return view.result


def shapes_runner(**options: Any) -> DecodeRunner[Shapes]:
    """A captured runner of that step, which lends a slot."""
    runner = DecodeRunner(
        Shapes, reads_some, buckets=[4], backend="cpu", progress=False, lend={"lent": lambda _: None}, **options
    )
    runner.capture()
    return runner


def test_what_is_read() -> None:
    """What an operator takes is read, from a view or whole; what is only looked at is not."""
    runner = shapes_runner()
    view = runner.fill(runner_batch(3))
    assert read_slots(runner.parts, view) == {"ids", "sliced", "by_operator", "needed", "made", "result"}
    assert needed_slots(Shapes.slotgraph) == {"needed"}


def runner_batch(rows: int) -> dict[str, Any]:
    """A batch of so many rows."""
    whole = ("ids", "looked_at", "needed", "maybe", "set_once", "on_host", "lent", "outside")
    batch: dict[str, Any] = {name: torch.arange(rows) + 1 for name in whole}
    return {
        **batch,
        "sliced": torch.randn(rows, 2),
        "by_operator": torch.randn(rows),
        "lens": torch.ones(rows, dtype=torch.int32),
    }


def test_unread_slots() -> None:
    """A finding for each where that can be known, else a note with the reason; none for what is read outside."""
    report = slotgraph.check(shapes_runner(), only=COVERAGE, progress=False, read_outside=["outside"])
    assert [finding.slot for finding in report.findings] == ["looked_at"]
    assert "drop=['looked_at']" in report.findings[0].message
    reasons = {
        "maybe": "it is optional",
        "set_once": "it is written once",
        "fixed": "it is constant",
        "on_host": "it is on the host, where it may be read before the replay",
        "lent": "it is lent to something outside",
    }
    assert list(report.notes) == [
        f"no operator of the step reads slot {name!r}: {why}" for name, why in reasons.items()
    ]


def test_unread_on_a_device() -> None:
    """Where kernels may be launched beside operators, nobody can know that a slot is not read."""
    slot = Shapes.slotgraph.slots["looked_at"]
    assert _may_be_read(slot, lent=False, device=torch.device("cpu")) is None
    assert _may_be_read(slot, lent=False, device=torch.device("cuda")) == "a kernel that is launched by itself may"


def test_read_in_one_pattern_is_read(cpu: str) -> None:
    """A slot that is read only where an optional one is absent is no finding."""

    class Either(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        other: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
        instead: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    def step(view: Either) -> torch.Tensor:
        return view.ids + (view.instead if view.other is None else view.other)

    runner: Any = DecodeRunner(Either, step, buckets=[2], backend=cpu, absent=[{"other"}], progress=False)
    runner.capture()
    assert slotgraph.check(runner, only=COVERAGE, progress=False).ok


def test_rows_are_named(cpu: str) -> None:
    """An output that is written in part is told by its rows, some of them and how many more."""

    def step(view: Any) -> torch.Tensor:
        made = sound(view)
        view.half[:1].copy_(made[:1])
        return made

    report = slotgraph.check(runner_of(step, cpu, HalfWritten, buckets=[8]), only=COVERAGE, progress=False)
    assert "output slot 'half' is not written by the step: rows 1, 2, 3, 4 and 3 more still hold" in str(report)


def test_compiled_steps_are_read(cpu: str) -> None:
    """A step of which a part is compiled runs as it was written while it is looked at."""
    if cpu == "cpu":
        compiled = torch.compile(sound, backend="eager")
        report = slotgraph.check(runner_of(compiled, cpu, buckets=[4]), only=COVERAGE, progress=False)
        assert report.ok, str(report)


def test_every_kind_of_slot_is_looked_at() -> None:
    """The sound declaration leaves nothing unread on this machine, so that a finding is the bug's."""
    report = slotgraph.check(runner_of(sound, choose("cpu"), Sound), only=COVERAGE, progress=False)
    assert report.ok
    assert not report.notes


class Lengths(Inputs):
    """Two slots."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


@pytest.mark.parametrize(
    "step",
    [
        lambda view: view.ids + torch.tensor(view.lens.tolist()),
        lambda view: view.ids + torch.as_tensor(view.lens.numpy() * 2),
        lambda view: (view.ids * 2, view.lens),
        lambda view: torch.cond(view.ids.sum() > 3, torch.mul, torch.add, (view.ids, view.lens)),
    ],
    ids=["list", "array", "handed out", "operator of functions"],
)
def test_reads_that_are_no_plain_operators(step: Callable[[Any], Any]) -> None:
    """What the host takes as numbers, what the step hands out, and what an operator of functions takes, is read."""
    report = slotgraph.check(runner_of(step, "cpu", Lengths), progress=False, only=COVERAGE)
    assert report.ok, str(report)
