"""The watch over what graphs read and write, by itself."""

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import nn

from slotgraph import current_view, errors
from slotgraph.runners.running import RUNNING, Running
from slotgraph.runners.stacked.watch import Fenced, ReadWatch, tensors_within
from tests.runners.prefilled import Prefill


@attrs.define
class Node:
    """An object with slots instead of a dict, which may lead back to itself."""

    tensor: torch.Tensor
    further: list[Any] = attrs.field(factory=list)


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
    assert watch.use.read == {0, 1, 2, 3, 4}
    assert watch.use.written == {3, 4}


def test_nothing_is_noted_elsewhere() -> None:
    """Outside of steps and within breaks everything may be read."""
    slot = torch.rand(3)
    with ReadWatch({"slot": slot}, [(0, slot)]) as watch:
        slot.sum()
        with while_running(Running(view_of(), inside="a break")):
            slot.sum()
    assert watch.use.read == frozenset()


def test_forbidden_slots() -> None:
    """A slot over requests is found by its address, whoever made the view of it; empty ones are nowhere."""
    slot, empty = torch.rand(5, 2), torch.empty(0)
    with while_running(Running(view_of())), ReadWatch({"empty": empty, "lengths": slot}, []):
        torch.rand(3).add(1)
        torch.cat([empty, torch.rand(3)])
        with pytest.raises(errors.CaptureError, match=r"aten::slice reads slot 'lengths', whose rows are"):
            slot[2:, 1].sum()


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


def test_tensors_within() -> None:
    """Tensors are found in attributes, slots and containers, a few levels down; modules are not looked into."""
    found = [torch.rand(1) for _ in range(5)]
    node = Node(found[0], [(found[1],), {"a": Node(found[2])}, nn.Linear(1, 1), torch, len, "text"])
    node.further.append(node)
    holder = SimpleNamespace(node=node, more={"tensor": found[3]}, deep=[[[[[[found[4]]]]]]])
    assert {id(tensor) for tensor in tensors_within(holder)} == {id(found[place]) for place in range(4)}
    assert {id(tensor) for tensor in tensors_within(node)} == {id(found[place]) for place in range(3)}
    assert list(tensors_within(nn.Linear(2, 2))) == []
    assert list(tensors_within(found[0])) == [found[0]]
