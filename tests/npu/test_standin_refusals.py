"""What the stand-in refuses during a capture, and that a refused call spoils the capture."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.npu.programs import output

pytestmark = pytest.mark.modes("eager", "lazy")

Call = Callable[[Any, torch.Tensor], object]

REFUSED: dict[str, Call] = {
    "item": lambda _, tensor: tensor[0].item(),
    "cpu": lambda _, tensor: tensor.cpu(),
    "blocking copy": lambda _, tensor: tensor.copy_(torch.randn(3)),
    "synchronise the stream": lambda npu, _: npu.current_stream().synchronize(),
    "synchronise the device": lambda npu, _: npu.synchronize(),
}


def attempt(npu: Any, call: Call, **options: Any) -> list[RuntimeError]:
    """What a call in a capture raised, and what the end of the capture raised."""
    raised: list[RuntimeError] = []
    tensor = torch.randn(3, device="npu")
    try:
        # The outer one, because npu.graph leaves its stream the current one when the end of the capture fails.
        with npu.stream(npu.current_stream()), npu.graph(npu.NPUGraph(), **options):
            tensor.add_(1)
            try:
                call(npu, tensor)
            except RuntimeError as error:
                raised.append(error)
    except RuntimeError as error:
        raised.append(error)
    return raised


@pytest.mark.parametrize("call", REFUSED.values(), ids=list(REFUSED))
def test_a_call_that_reads_or_waits_is_refused(npu: Any, call: Call) -> None:
    """The call fails at once, and the capture cannot be ended well."""
    refused, spoiled = attempt(npu, call)
    assert "error" in str(refused)
    assert "507903" in str(spoiled)


@pytest.mark.parametrize("call", REFUSED.values(), ids=list(REFUSED))
def test_a_capture_after_a_refused_one_is_well(npu: Any, call: Call) -> None:
    """A spoilt capture leaves no stream captured, and no memory in use."""
    attempt(npu, call)
    tensor, graph = torch.ones(3, device="npu"), npu.NPUGraph()
    with npu.graph(graph):
        tensor.add_(1)
    graph.replay()
    assert tensor.tolist() == [2.0] * 3


def test_a_copy_from_pinned_memory_is_captured(npu: Any) -> None:
    """It becomes a node that reads the buffer at each replay."""
    source, target = torch.randn(3).pin_memory(), torch.zeros(3, device="npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        target.copy_(source, non_blocking=True)
    for _ in range(2):
        source.copy_(torch.randn(3))
        graph.replay()
        assert torch.equal(target.cpu(), source)


@pytest.mark.modes("eager")
def test_an_asynchronous_copy_from_pageable_memory_is_refused() -> None:
    """It is refused on torch_npu's own thread, whose queue then runs nothing more: so in a process of its own."""
    source = """
        import torch, torch_npu
        tensor = torch.ones(3, device="npu")
        try:
            with torch.npu.graph(torch.npu.NPUGraph()):
                tensor.copy_(torch.randn(3), non_blocking=True)
        except RuntimeError as error:
            print(" ".join(str(error).split()))
    """
    assert "not allowed" in output(source).splitlines()[-1]


def in_another_thread(_: Any, tensor: torch.Tensor) -> None:
    """Make a blocking copy on a thread that captures nothing; raise here what it raised there."""
    raised: list[RuntimeError] = []

    def copy() -> None:
        try:
            torch.empty_like(tensor).copy_(torch.randn(3))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize(("mode", "refused"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_the_capture_error_mode_says_whether_other_threads_are_held_to_it(
    npu: Any, mode: str, *, refused: bool
) -> None:
    """A blocking copy on another thread is refused, and spoils the capture, in the global mode alone."""
    raised = attempt(npu, in_another_thread, capture_error_mode=mode)
    assert bool(raised) is refused


def test_the_default_stream_cannot_be_captured(npu: Any) -> None:
    """torch_npu says so itself."""
    with pytest.raises(RuntimeError, match="non-default stream"):
        npu.NPUGraph().capture_begin()
