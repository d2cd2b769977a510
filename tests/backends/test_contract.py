"""What every backend must do; a third party's runs it too, by being installed beside slotgraph."""

import itertools
import time
from typing import Any

import pytest
import torch

from slotgraph import CACHE_LOC, SEQ_LEN_FILL
from slotgraph.backends import DEVICE, HOST, Availability, Backend, Graph, Memory, Placement, choose, load, names
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError

pytestmark = pytest.mark.slotgraph_backends("every")

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
PLACEMENTS: tuple[Placement, ...] = (DEVICE, HOST)


def random_on(backend: Backend, rows: int, seed: int) -> torch.Tensor:
    """[rows, 3] random floats on the device, at an address of their own."""
    tensor = backend.empty((rows, 3), torch.float32, DEVICE)
    tensor.copy_(torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return tensor


def captured(backend: Backend, step: Any, **more: Any) -> Graph:
    """A step warmed up and captured as the runners do it."""
    with backend.stream():
        step()
        backend.synchronize()
        return backend.capture(step, **more)


def has_true_graphs(backend: Backend) -> bool:
    """Whether a replay writes to where the capture did, which only a backend with modes of capture does."""
    return bool(backend.capabilities.capture_error_modes)


def test_name(backend: Backend, backend_name: str) -> None:
    """A backend is named as users write it, is loaded and chosen by that name, and says that it can run."""
    assert type(backend).name == backend.name == backend_name
    assert backend_name in names()
    assert load(backend_name) is type(backend)
    assert type(choose(backend_name)) is type(backend)
    assert choose(backend) is backend
    available = type(backend).is_available()
    assert isinstance(available, Availability)
    assert available
    assert not available.reason
    assert isinstance(type(backend).priority, int)


def test_capabilities(backend: Backend) -> None:
    """The record is the same at each call, cannot be changed, and names roles, memory and lowerings that exist.

    The fused lowerings are there where, and only where, the device has the kernel.
    """
    record = backend.capabilities
    assert record == backend.capabilities
    frozen: Any = record
    with pytest.raises(AttributeError):
        frozen.foreach_chunk = 3
    with pytest.raises(TypeError):
        frozen.roles["cache_loc"] = torch.int8
    assert CACHE_LOC.on(record) in CACHE_LOC.accepts
    assert SEQ_LEN_FILL.on(record) in {0, 1}
    assert record.foreach_chunk >= 0
    assert record.graphs_hint is None or record.graphs_hint > 0
    assert len(set(record.lowerings)) == len(record.lowerings)
    assert {"slot_by_slot"} <= set(record.lowerings) <= set(LADDER)
    assert (backend.fusion() is not None) == ("in_graph" in record.lowerings) == ("fused" in record.lowerings)


def test_current_stream(backend: Backend) -> None:
    """The current stream has a number, memory belongs to a stream, and streams can be ordered."""
    here = backend.stream_key()
    assert here() == here() == backend.stream_key()()
    sources = [random_on(backend, 2, 1), backend.empty((0,), torch.int64, DEVICE)]
    assert list(backend.streams_of(sources[:1])) == [here()]
    assert len(backend.streams_of(sources)) == 2
    backend.order(here(), here())
    assert bool((sources[0] > 0).all())


def test_empty(backend: Backend) -> None:
    """Memory is of the shape, dtype and device asked for, contiguous, ordinary in any mode, and its own."""
    for dtype, placement, inside in itertools.product(DTYPES, PLACEMENTS, (False, True)):
        with torch.inference_mode(mode=inside):
            tensor = backend.empty((5, 2), dtype, placement)
        assert (tensor.shape, tensor.dtype) == ((5, 2), dtype)
        assert tensor.device == (backend.device if placement == DEVICE else torch.device("cpu"))
        assert tensor.is_contiguous()
        assert (tensor.is_inference(), tensor.requires_grad) == (False, False)
        tensor.fill_(1)
        backend.synchronize()
        assert bool((tensor == 1).all())
        assert backend.empty((0,), dtype, placement).numel() == 0
        kept = [backend.empty((7,), dtype, placement) for _ in range(4)]
        assert len({tensor.data_ptr() for tensor in kept}) == len(kept)


def test_replays_on_changed_inputs(backend: Backend) -> None:
    """A replay computes on what its inputs hold now; true graphs write to the same tensors each time.

    The structure of outputs stays anywhere.
    """
    source, weights = random_on(backend, 4, 1), random_on(backend, 3, 2)
    graph = captured(backend, lambda: {"one": source + 1, "two": ((source @ weights).relu(), [source - source.sum()])})
    first = graph.outputs
    addresses = {tensor.data_ptr() for tensor in (first["one"], first["two"][0], first["two"][1][0])}
    for seed in range(3, 8):
        source.copy_(random_on(backend, 4, seed))
        graph.replay()
        backend.synchronize()
        now = graph.outputs
        assert isinstance(now["two"], tuple)
        wanted = (source + 1, (source @ weights).relu(), source - source.sum())
        found = (now["one"], now["two"][0], now["two"][1][0])
        torch.testing.assert_close(found, wanted)
        if has_true_graphs(backend):
            assert {tensor.data_ptr() for tensor in found} == addresses


def test_step_that_writes_its_state(backend: Backend) -> None:
    """Each replay moves the step's state on by one; where graphs are true, capture leaves it as it was."""
    state, source = backend.empty((3,), torch.int64, DEVICE), random_on(backend, 4, 1)
    state.zero_()

    def step() -> torch.Tensor:
        state.add_(1)
        return source.sum(0) + state

    with backend.stream():
        graph = backend.capture(step)
    backend.synchronize()
    before = int(state[0])
    assert before == 0 or not has_true_graphs(backend)
    for replay in range(1, 4):
        graph.replay()
        backend.synchronize()
        assert state.tolist() == [before + replay] * 3
        torch.testing.assert_close(graph.outputs, source.sum(0) + before + replay)


@pytest.mark.parametrize("inside", [False, True])
def test_inference_mode(backend: Backend, *, inside: bool) -> None:
    """What was captured inside inference mode is replayed outside it, and the other way round."""
    source = random_on(backend, 4, 1)
    with torch.inference_mode(mode=inside):
        graph = captured(backend, lambda: source * 3)
    source.copy_(random_on(backend, 4, 2))
    with torch.inference_mode(mode=not inside):
        graph.replay()
    backend.synchronize()
    torch.testing.assert_close(graph.outputs.clone(), source * 3)


def test_step_that_raises_in_capture(backend: Backend) -> None:
    """A step that raises is a CaptureError chained to it; the next capture, the earlier graphs and the stream work."""
    source = random_on(backend, 4, 1)
    earlier = captured(backend, lambda: source + 1)

    def bad() -> torch.Tensor:
        source.mul(2)
        raise LookupError("out of workspace")

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"LookupError.*out of workspace") as refused, backend.stream():
            backend.capture(bad)
        assert isinstance(refused.value.__cause__, LookupError)
    later = captured(backend, lambda: source * 5)
    source.copy_(random_on(backend, 4, 2))
    for graph, answer in ((earlier, source + 1), (later, source * 5)):
        graph.replay()
        backend.synchronize()
        torch.testing.assert_close(graph.outputs, answer)


def test_error_modes(backend: Backend) -> None:
    """Each mode that the record names is taken, and where there are any, another one is refused."""
    source = random_on(backend, 4, 1)
    for mode in backend.capabilities.capture_error_modes:
        graph = captured(backend, lambda: source - 2, error_mode=mode)
        graph.replay()
        backend.synchronize()
        torch.testing.assert_close(graph.outputs, source - 2)
    if backend.capabilities.capture_error_modes:
        with pytest.raises((CaptureError, RuntimeError, ValueError), match="no such mode"):
            captured(backend, source.neg, error_mode="no such mode")


def test_bytes(backend: Backend) -> None:
    """A graph's bytes and a device's memory are whole numbers that fit one another, and grow by holding more."""
    source = random_on(backend, 64, 1)
    graph = captured(backend, lambda: (source * 2 + 1) * source)
    assert isinstance(graph.nbytes, int)
    assert graph.nbytes >= 0
    memory = backend.memory()
    assert isinstance(memory, Memory)
    assert memory.total > 0
    assert 0 <= memory.free <= memory.total
    assert 0 <= memory.allocated <= memory.total
    kept = backend.empty((1 << 20,), torch.float32, DEVICE)
    kept.fill_(1)
    backend.synchronize()
    assert backend.memory().allocated >= memory.allocated


def test_events(backend: Backend) -> None:
    """Events pass in order, can be waited for, and measure more milliseconds for more work."""
    source = random_on(backend, 512, 1)
    wide = source.repeat(1, 100)
    begin = time.perf_counter_ns()
    start = backend.event()
    wide = (wide @ wide.T @ wide).tanh()
    middle = backend.event()
    for _ in range(20):
        wide = (wide @ wide.T @ wide).tanh()
    stop = backend.event()
    stop.synchronize()
    most = (time.perf_counter_ns() - begin) / 1e6  # what lies between the events lies between these two, too
    assert all(event.query() is True for event in (start, middle, stop))
    assert 0 < start.elapsed_time(middle) < start.elapsed_time(stop) < 1.01 * most + 0.001
    assert middle.elapsed_time(stop) < start.elapsed_time(stop)


def test_stream(backend: Backend) -> None:
    """Work on the stream is done after a synchronisation, also where the block raised, and the stream may be nested."""
    source = random_on(backend, 4, 1)
    with pytest.raises(KeyError), backend.stream():
        raise KeyError
    with backend.stream(), backend.stream():
        twice = source * 2
    backend.synchronize()
    assert torch.equal(twice, source * 2)
