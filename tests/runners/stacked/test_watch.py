"""The watch over what graphs read and write, by itself."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slotgraph import current_view, errors
from slotgraph.runners.running import RUNNING, Running
from slotgraph.runners.stacked.capture import Fenced, ReadWatch
from tests.runners.prefilled import Prefill


def view_of() -> Prefill:
    """A view of its own, without a fill."""
    return Prefill(
        input_ids=torch.arange(4),
        positions=torch.arange(4),
        out_cache_loc=torch.arange(4),
        extend_seq_lens=torch.tensor([4], dtype=torch.int32),
        scale=2,
    )


@contextlib.contextmanager
def while_running(step: Running) -> Iterator[Running]:
    """While a step runs."""
    token = RUNNING.set(weakref.ref(step))
    try:
        yield step
    finally:
        RUNNING.reset(token)


def test_reads_and_writes() -> None:
    """Places are told from addresses, through views of them, and writes from what an operator's schema says."""
    given = [(place, torch.rand(4, 3)) for place in range(5)]
    one, two, three, four, five = (tensor for _, tensor in given)
    with while_running(Running(view_of())), ReadWatch({}, given) as watch:
        torch.addmm(one[:, 0], two[:, :2], three[:2, 0:1].expand(2, 4).clone())
        four[1:].mul_(2)
        torch.add(one, two, out=five)
    assert watch.read == {0, 1, 2, 3, 4}
    assert watch.written == {3, 4}


def test_operator_that_asks_for_the_view() -> None:
    """An operator of someone's own that asks for the view is refused in a graph, and gets it in a break."""

    @torch.library.custom_op("slotgraph_tests::asking", mutates_args=())
    def asking(value: torch.Tensor) -> torch.Tensor:
        return torch.mul(value, current_view(Prefill).scale)

    value, view = torch.ones(2), view_of()
    with while_running(Running(view)) as step, ReadWatch({}, []):
        assert current_view(Prefill) is view
        with pytest.raises(errors.CaptureError, match=r"operator slotgraph_tests::asking asks for the step"):
            asking(value)
        assert step.operator is None
        step.inside = "a break"
        assert asking(value).tolist() == [2, 2]


def test_shown_view() -> None:
    """While graphs are looked at, their code sees what is shown to it, breaks what is live, another class neither."""

    class Other(Prefill):
        """Another declaration."""

    view, shown = view_of(), view_of()
    with while_running(Running(view, shown=shown)) as step:
        assert current_view(Prefill) is shown
        step.inside = "a break"
        assert current_view(Prefill) is view
        with pytest.raises(errors.ReplayError, match="the running step's view is of Prefill, not of Other"):
            current_view(Other)
    with pytest.raises(errors.ReplayError, match="no step is running"):
        current_view(Prefill)


def test_fence() -> None:
    """Behind a fence all is refused by the slot's name, but what is the same of it in each step."""
    fenced = Fenced.around(torch.arange(3), "lengths")
    assert (fenced.dtype, fenced.device, fenced.ndim, fenced.dim()) == (torch.int64, torch.device("cpu"), 1, 1)
    uses: list[Any] = [
        lambda: fenced.shape,
        lambda: len(fenced),
        lambda: fenced + 1,
        lambda: torch.add(torch.ones(3), fenced),
        lambda: torch.stack([torch.arange(3), fenced]),
        lambda: fenced[0],
        fenced.tolist,
        fenced.numel,
        lambda: list(fenced),
        lambda: fenced.copy_(torch.ones(3)),
    ]
    for use in uses:
        with pytest.raises(errors.CaptureError, match="reads slot 'lengths', whose rows are requests, outside"):
            use()
