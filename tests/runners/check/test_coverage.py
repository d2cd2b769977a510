"""Coverage: garbage that shows what is not written, and slots that nothing reads, if that can be known."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, constant, copied, output
from slotgraph.extend import once
from slotgraph.runners.bits import garbage
from tests.runners.check.planted import Sound, found_by, runner_of, sound
from tests.runners.models import bytes_of, memory_of, plain_runner, random_batch
from tests.strategies import DTYPES


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


def test_garbage_is_taken_back(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a fill is refused over garbage, what lay there before lies there again."""
    runner = plain_runner(cpu)
    runner(random_batch(3, 2))
    before, during, fill = memory_of(runner), list[dict[str, bytes]](), type(runner).fill

    def refused(self: Any, *batch: Any, **side: Any) -> Any:
        during.append(memory_of(self))
        if len(during) > 1:
            raise ValueError("refused")
        return fill(self, *batch, **side)

    monkeypatch.setattr(type(runner), "fill", refused)
    with pytest.raises(ValueError, match="refused"):
        found_by("poison", runner, [random_batch(3, 2)], state=[])
    assert [one == before for one in during] == [True, False]
    assert memory_of(runner) == before


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
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, placement="host", argument="lens")
    outside: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    result: torch.Tensor = output(TOKENS, dtype=torch.float32)


@torch.library.custom_op("slotgraph_tests::check_twice", mutates_args=())
def twice(values: torch.Tensor) -> torch.Tensor:
    """An operator of its own."""
    return values * 2


def reads_some(view: Shapes) -> torch.Tensor:
    """Reads a part of one slot, gives another to an operator of its own, and looks at the shape of a third."""
    rows = view.looked_at.view(-1, 1).shape[0]
    view.result.copy_(view.sliced.transpose(0, 1)[1, :rows] + twice(view.by_operator) + view.ids + view.made)
    return view.result


def test_unread_slots() -> None:
    """A finding for each if that can be known, else a note with the reason. None for what is read outside."""
    runner = DecodeRunner(Shapes, reads_some, buckets=[4], backend="cpu", progress=False)
    runner.capture()
    report = slotgraph.check(runner, only=("coverage",), progress=False, read_outside=["outside"])
    assert [finding.slot for finding in report.findings] == ["looked_at"]
    assert "drop=['looked_at']" in report.findings[0].message
    reasons = {
        "maybe": "it is optional",
        "set_once": "it is written once",
        "fixed": "it is constant",
        "on_host": "it is on the host, where it may be read before the replay",
    }
    assert list(report.notes) == [
        f"no operator of the step reads slot {name!r}: {why}" for name, why in reasons.items()
    ]


class Lengths(Inputs):
    """Two slots."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


@pytest.mark.parametrize(
    ("step", "inputs"),
    [
        (lambda view: view.ids + torch.tensor(view.lens.tolist()), Lengths),
        (lambda view: view.ids + torch.as_tensor(view.lens.numpy() * 2), Lengths),
        (lambda view: (view.ids * 2, view.lens), Lengths),
        pytest.param(
            lambda view: torch.cond(view.ids.sum() > 3, torch.mul, torch.add, (view.ids, view.lens)),
            Lengths,
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="its cond takes no inputs that share memory"),
        ),
        (torch.compile(sound, backend="eager"), Sound),
    ],
    ids=["list", "array", "handed out", "operator of functions", "compiled"],
)
def test_reads_that_are_no_plain_operators(step: Callable[[Any], Any], inputs: type[Inputs]) -> None:
    """What the host takes as numbers, what the step hands out, what functions take, and a step that is compiled."""
    report = slotgraph.check(runner_of(step, "cpu", inputs, buckets=[4]), progress=False, only=("coverage",))
    assert (report.findings, report.notes) == ((), ())
