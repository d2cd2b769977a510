"""What a break gets in each step, what it may return, and what is refused."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, EagerRunner, current_view, graph_break
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import BatchError, CaptureError, ReplayError
from slotgraph.runners.engine.capture import Clock
from tests.backends.test_contract import has_true_graphs
from tests.runners.models import Ids, decoder
from tests.runners.prefilled import Prefill, around, assert_equal, batch_of, scaled


def test_a_break_outside_of_steps_is_the_function_itself() -> None:
    """Elsewhere a marked function is the function itself: name, arguments, gradients, errors and all."""

    @graph_break
    def square(value: torch.Tensor, power: int = 2) -> torch.Tensor:
        """Its own docstring."""
        return value**power

    value = torch.tensor([3.0], requires_grad=True)
    assert (square.__name__, square.__doc__) == ("square", "Its own docstring.")
    torch.autograd.backward(square(value, power=3))
    assert value.grad is not None
    assert value.grad.item() == 27
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        square()  # type: ignore[call-arg] # that is the test


def test_a_view_that_is_not_there_is_refused(cpu: str) -> None:
    """A view is asked for in a step, by its own declaration."""

    class Other(Prefill):
        """Another declaration."""

    with pytest.raises(ReplayError, match="no step is running"):
        current_view(Prefill)
    eager = EagerRunner(Prefill, lambda _: current_view(Other), backend=cpu)
    with pytest.raises(ReplayError, match="the running step's view is of Prefill, not of Other"):
        eager(batch_of([2], 1))


def test_an_answer_unlike_the_captures_is_refused(backend: Backend) -> None:
    """An answer of another shape, dtype, structure or python value than at capture is refused, by the break's name."""
    if not has_true_graphs(backend):
        pytest.skip(f"{backend.name} runs what follows a break anew")
    other: list[Any] = []

    @graph_break
    def changing(hidden: torch.Tensor) -> Any:
        return other[0](hidden) if other else (hidden + 1, 3)

    runner, eager = around(lambda hidden, _: changing(hidden)[0] * 2, backend)
    batch = batch_of([3], 1, backend.device)
    for answer, said in (
        (lambda hidden: (hidden[:-1], 3), r"result 0 is float\d+ of shape \[3, 2\], and was float\d+ of shape"),
        (lambda hidden: (hidden.half(), 3), "result 0 is float16"),
        (lambda hidden: [hidden, 3], "returned another structure than at capture"),
        (lambda hidden: (hidden, 4), "result 1 is 4, and was 3 at capture: return what changes"),
        (lambda hidden: (hidden, hidden), "result 1 is float"),
        (lambda _: (None, 3), "result 0 is None"),
    ):
        other[:] = [answer]
        with pytest.raises(ReplayError, match=r"break '.*changing'.*" + said):
            runner(batch)
        other.clear()
        assert torch.equal(runner(batch), eager(batch))


def test_a_break_inside_a_break_is_refused(backend: Backend) -> None:
    """A mark within a marked function is refused with both names."""

    @graph_break
    def outer(hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        return scaled(hidden, view)

    with pytest.raises(
        CaptureError, match=r"break 'scaled' is called inside break '.*outer', all of which runs eagerly"
    ):
        around(outer, backend)


def test_a_bucket_whose_break_raises_is_left_out(backend: Backend) -> None:
    """A bucket whose break raises is not captured, its error names the break, and other buckets are usable."""

    @graph_break
    def picky(hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) == 8:
            raise NotImplementedError("no kernel for eight rows")
        return hidden * 2

    runner, eager = around(lambda hidden, _: picky(hidden) + 1, backend, lazy=True)
    runner(batch_of([5], 1, backend.device))
    assert runner.report is not None
    assert set(runner.report.failed) == {8}
    reason = runner.report.failed[8]
    assert "picky' raised NotImplementedError: no kernel for eight rows" in reason
    assert runner.decide(batch_of([6], 1)).reason == reason
    for lengths in ([3], [5], [1, 3]):
        batch = batch_of(lengths, 2, backend.device)
        assert torch.equal(runner(batch), eager(batch))
    assert runner.stats()["steps"] == {"breakable": 2, "eager": 2}
    with pytest.raises(CaptureError, match=r"1 of 2 buckets were not captured .* bucket 8: break '.*picky'"):
        around(lambda hidden, _: picky(hidden) + 1, backend)


def test_a_break_that_raises_in_a_step_is_named(backend: Backend) -> None:
    """What a break raises in a replay is chained to a ReplayError with its name; the next step is right."""
    faults: list[Exception] = []

    @graph_break
    def flaky(hidden: torch.Tensor) -> torch.Tensor:
        for fault in faults:
            raise fault
        return hidden * 2

    runner, eager = around(lambda hidden, _: flaky(hidden + 1) + 1, backend)
    batch = batch_of([2, 1], 3, backend.device)
    faults.append(OSError("the disk is full"))
    with pytest.raises(ReplayError, match=r"break '.*flaky' raised OSError: the disk is full") as raised:
        runner(batch)
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(OSError, match=r"^the disk is full"):  # an eager step passes it on
        runner(batch_of([9], 3, backend.device))
    faults[:] = [BatchError("one of our own")]
    with pytest.raises(BatchError, match=r"^one of our own"):
        runner(batch)
    faults.clear()
    assert_equal(runner, eager, backend.device)


def test_a_graph_with_breaks_is_no_step(backend: Backend) -> None:
    """A graph with breaks is not a step: replayed without its runner, it says so."""
    if not has_true_graphs(backend):
        pytest.skip(f"{backend.name} has no graphs")
    runner, _ = around(scaled, backend)
    captured = runner.graphs.get(8, frozenset())
    assert captured is not None
    with pytest.raises(ReplayError, match="break 'scaled' needs a step: replay through the runner"):
        captured.graph.replay()


@pytest.mark.parametrize("shared", [True, False])
def test_another_runner_may_not_replay_over_a_steps_memory(backend: Backend, *, shared: bool) -> None:
    """Its replay may overwrite what later graphs of the step read, where both share a pool: that step is refused."""
    other = decoder(Ids, lambda view: view.ids * 3, buckets=[2], output_rows=BATCH, backend=backend)
    wanted = [False]

    @graph_break
    def nesting(hidden: torch.Tensor) -> torch.Tensor:
        rows = other({"ids": torch.tensor([5, 6], device=hidden.device)}) if wanted[0] else None
        return hidden * 2 if rows is None else hidden + rows.sum()

    runner, eager = around(lambda hidden, _: nesting(hidden + 1) * 2, backend)
    other.graphs.clock = runner.graphs.clock if shared else Clock()  # as where a device's runners share their pool
    wanted[0] = True
    batch = batch_of([2, 1], 3, backend.device)
    if shared:
        with pytest.raises(ReplayError, match="a graph of the same memory pool"):
            runner(batch)
    elif backend.pool() is None:
        assert torch.equal(runner(batch), eager(batch))
    wanted[0] = False
    assert_equal(runner, eager, backend.device)
