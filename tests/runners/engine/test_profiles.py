"""While a profiler of torch is on, its trace has ranges of fills and steps; the steps are the same."""

import collections
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, InputBuffers, Inputs, copied
from slotgraph.errors import BatchError
from tests.runners.kinds import RUNNERS, batch_of, captured, tensors_of

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])


class Advancing(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)


def rows(count: int) -> dict[str, torch.Tensor]:
    """A batch of so many requests."""
    return {"ids": torch.arange(count), "lens": torch.ones(count, dtype=torch.int64)}


def ranges_of(call: Any) -> tuple[Any, dict[str, int]]:
    """What a call returns, and how many ranges of each name it has in a profile."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        made = call()
    found = [event.name.removeprefix("slotgraph:") for event in profiled.events() or () if "slotgraph:" in event.name]
    return made, dict(collections.Counter(found))


@BACKENDS
@pytest.mark.parametrize("runner", RUNNERS)
def test_each_runner_has_ranges(runner: str, backend: str) -> None:
    """A fill and a run by a graph or eagerly, in a call and apart; outputs and the way of the fill are as without."""
    one = captured(runner, backend=backend)
    run = "eager" if one.decide(batch_of(runner, 2, 0)).bucket is None else "replay"
    expected = tensors_of(one(batch_of(runner, 2, 0)))
    for call in (one, lambda batch: one.replay(one.fill(batch))):
        outputs, found = ranges_of(lambda call=call: call(batch_of(runner, 2, 0)))
        assert found == {"fill": 1, run: 1}
        assert all(map(torch.equal, tensors_of(outputs), expected))
    if run == "replay":
        _, found = ranges_of(lambda: one(batch_of(runner, 5, 0)))
        assert found == {"fill": 1, "eager": 1}
    before = collections.Counter(one.stats()["lowerings"])
    one(batch_of(runner, 2, 0))
    plain = collections.Counter(one.stats()["lowerings"])
    ranges_of(lambda: one(batch_of(runner, 2, 0)))
    assert collections.Counter(one.stats()["lowerings"]) - plain == plain - before


@BACKENDS
def test_loops_and_buffers_have_ranges(backend: str) -> None:
    """Each launched step of a loop, which begins with a call, and each fill of buffers without a runner."""
    runner = DecodeRunner(Advancing, lambda view: view.ids + view.lens, buckets=[4], backend=backend)
    runner.capture()

    def three_steps() -> list[Any]:
        steps = runner.steps(rows(3))
        return [next(steps).tokens() for _ in range(3)]

    found, ranges = ranges_of(three_steps)
    assert found == three_steps()
    assert ranges == {"step": 3, "fill": 1, "replay": 1}
    buffers = InputBuffers(Advancing, {BATCH: 4, TOKENS: 4}, backend=backend)
    view, ranges = ranges_of(lambda: buffers.fill(rows(3)))
    assert (view.ids.tolist(), ranges) == ([0, 1, 2, 0], {"fill": 1})


@BACKENDS
def test_a_refused_batch_ends_its_range(backend: str) -> None:
    """The error is the caller's; the next step has ranges of its own, and without a profiler there are none."""
    runner = EagerRunner(Advancing, lambda view: view.ids * 2, backend=backend)

    def refused() -> None:
        with pytest.raises(BatchError, match="ids"):
            runner({"ids": torch.arange(3.0), "lens": [1, 1, 1]})

    _, ranges = ranges_of(refused)
    assert ranges == {"fill": 1}
    assert ranges_of(lambda: runner(rows(2)).tolist()) == ([0, 2], {"fill": 1, "eager": 1})
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        pass
    runner(rows(2))
    assert [event for event in profiled.events() or () if "slotgraph" in event.name] == []
