"""The stand-in's graphs: what a capture takes, forks, pools, and the limit on device streams."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.npu.programs import output

pytestmark = pytest.mark.modes("eager", "lazy")


def captured(npu: Any, step: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A graph of the step, and what the step returned."""
    graph = npu.NPUGraph()
    with npu.graph(graph, **options):
        made = step()
    return graph, made


def test_a_fork_is_joined(npu: Any) -> None:
    """A stream that waits for an event of the capture is captured too, and what joins it runs after it."""
    source, side = torch.randint(1, 9, (4,)).to("npu"), npu.Stream()

    def step() -> torch.Tensor:
        seen = source + 1
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            doubled = seen * 2
        npu.current_stream().wait_stream(side)
        return doubled + 100

    graph, made = captured(npu, step)
    for _ in range(2):
        source.random_(1, 9)
        graph.replay()
        assert torch.equal(made.cpu(), (source.cpu() + 1) * 2 + 100)


def test_a_read_before_the_join_is_too_early(npu: Any) -> None:
    """Within a graph too, what was not waited for has not run."""
    source, side = torch.randint(1, 9, (4,)).to("npu"), npu.Stream()
    doubled = torch.full_like(source, -1)

    def step() -> torch.Tensor:
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            torch.add(source, source, out=doubled)
        early = doubled + 0
        npu.current_stream().wait_stream(side)
        return early

    graph, early = captured(npu, step)
    graph.replay()
    assert early.tolist() == [-1] * 4
    assert torch.equal(doubled.cpu(), source.cpu() * 2)


def test_a_forked_stream_that_is_not_joined_is_refused_and_free_afterwards(npu: Any) -> None:
    """The end of a capture names the fault, and releases all its streams."""
    tensor, side = torch.ones(4, device="npu"), npu.Stream()

    def step() -> None:
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            tensor.add_(1)

    with pytest.raises(RuntimeError, match="107025"), npu.stream(npu.current_stream()):
        captured(npu, step)
    with npu.stream(side):
        tensor.add_(5)
    side.synchronize()
    assert tensor.tolist() == [6.0] * 4


def test_a_joined_stream_is_free_after_the_capture(npu: Any) -> None:
    """Work that a forked stream is given after the capture runs; it does not go on into the graph."""
    tensor, side = torch.ones(4, device="npu"), npu.Stream()

    def step() -> None:
        side.wait_stream(npu.current_stream())
        with npu.stream(side):
            tensor.add_(1)
        npu.current_stream().wait_stream(side)

    graph, _ = captured(npu, step)
    with npu.stream(side):
        tensor.mul_(10)
    side.synchronize()
    graph.replay()
    assert tensor.tolist() == [11.0] * 4


def test_graphs_share_a_pool(npu: Any) -> None:
    """A pool's handle gives the second graph the memory of what the first no longer holds."""
    source = torch.randn(1 << 20, device="npu")
    first, made = captured(npu, lambda: source * 2)
    address = made.data_ptr()
    assert (made.clone() == 0).sum() < made.numel()
    del made
    second, shared = captured(npu, lambda: source * 3, pool=first.pool())
    assert shared.data_ptr() == address
    second.replay()
    assert torch.equal(shared.cpu(), source.cpu() * 3)


@pytest.mark.modes("eager")
def test_a_fork_counts_towards_the_limit() -> None:
    """Each stream in a capture takes one of the device's; the wait fails on torch_npu's thread, without the code."""
    source = """
        import torch, torch_npu
        tensor, side, graph = torch.ones(3, device="npu"), torch.npu.Stream(), torch.npu.NPUGraph()
        try:
            with torch.npu.graph(graph):
                side.wait_stream(torch.npu.current_stream())
                with torch.npu.stream(side):
                    tensor.add_(1)
                torch.npu.current_stream().wait_stream(side)
        except RuntimeError as error:
            print(" ".join(str(error).split()))
    """
    assert "rtStreamWaitEvent execution failed" in output(source, STANDIN_STREAM_LIMIT="1").splitlines()[-1]


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


def blocking_copy(raised: list[RuntimeError]) -> None:
    """Make a blocking copy; note what it raises."""
    try:
        torch.empty(3, device="npu").copy_(torch.randn(3))
    except RuntimeError as error:
        raised.append(error)


@pytest.mark.parametrize(("mode", "refused"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_the_capture_error_mode_says_whether_other_threads_are_held_to_it(
    npu: Any, mode: str, *, refused: bool
) -> None:
    """A blocking copy on a thread that captures nothing is refused, and spoils the capture, in one mode alone."""
    raised, tensor = list[RuntimeError](), torch.randn(3, device="npu")

    def step() -> None:
        tensor.add_(1)
        thread = threading.Thread(target=blocking_copy, args=(raised,))
        thread.start()
        thread.join()

    try:
        with npu.stream(npu.current_stream()):  # npu.graph leaves its own the current one when a capture's end fails
            captured(npu, step, capture_error_mode=mode)
    except RuntimeError as error:
        raised.append(error)
    assert bool(raised) is refused


def test_the_default_stream_cannot_be_captured(npu: Any) -> None:
    """torch_npu says so itself."""
    with pytest.raises(RuntimeError, match="non-default stream"):
        npu.NPUGraph().capture_begin()
