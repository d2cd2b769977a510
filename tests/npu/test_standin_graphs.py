"""The stand-in's graphs: capture, replay, forks, pools, and the limit on device streams."""

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


def test_a_capture_runs_nothing_and_a_replay_runs_it(npu: Any) -> None:
    """Replays read what the buffers hold then."""
    source = torch.randint(0, 9, (4,)).to("npu")
    target = torch.full_like(source, -1)
    graph, _ = captured(npu, lambda: target.copy_(source + 1))
    assert target.tolist() == [-1] * 4
    for _ in range(2):
        source.random_(0, 9)
        graph.replay()
        assert torch.equal(target.cpu(), source.cpu() + 1)


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


LIMITED = """
    import torch, torch_npu
    tensor, graphs = torch.ones(3, device="npu"), []
    for attempt in range(4):
        graph = torch.npu.NPUGraph()
        try:
            with torch.npu.graph(graph):
                tensor.add_(1)
        except RuntimeError as error:
            print("refused", attempt, " ".join(str(error).split()))
            del graphs[0]
        else:
            print("captured", attempt)
            graphs.append(graph)
"""


@pytest.mark.modes("eager")
def test_the_limit_on_streams_refuses_a_capture_until_a_graph_is_given_back() -> None:
    """With STANDIN_STREAM_LIMIT the wheel's own message for too many graphs comes, with the code that is asked for."""
    printed = output(LIMITED, STANDIN_STREAM_LIMIT="2", STANDIN_STREAM_ERROR="207008")
    lines = [line for line in printed.splitlines() if line.startswith(("captured", "refused"))]
    assert [line.split()[0] for line in lines] == ["captured", "captured", "refused", "captured"]
    assert "error code is 207008" in lines[2]
    assert "Stream resources are insufficient" in lines[2]


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
