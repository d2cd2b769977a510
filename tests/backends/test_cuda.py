"""The CUDA backend beyond the contract: what is shared does not collide; captures that fail leave no trace."""

import functools
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import HOST
from slotgraph.backends.cuda import CudaBackend
from slotgraph.backends.device import StreamBackend
from slotgraph.backends.device_graph import DeviceGraph
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError, ReplayError

_AVAILABLE = CudaBackend.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not _AVAILABLE, reason=f"cuda: {_AVAILABLE.reason}")]

MIB = 1 << 20
MODES = [(False, False, True, True), (False, True, False, True), (True, False, False, True), (True, True, True, False)]
"""Where a runner is made, captured, filled and replayed: every two of them in and out of inference mode."""
Step = Callable[[torch.Tensor], Any]


def capture(cuda: CudaBackend, step: Callable[[], Any], **more: Any) -> DeviceGraph:
    """A step captured without a warm-up."""
    with cuda.stream():
        graph = cuda.capture(step, **more)
    assert isinstance(graph, DeviceGraph)
    return graph


def assert_usable(cuda: CudaBackend, source: torch.Tensor) -> None:
    """The default stream is current, random numbers can be drawn, the pool takes a graph, and the graph is right."""
    assert torch.cuda.current_stream(cuda.device) == torch.cuda.default_stream(cuda.device)
    assert torch.rand(8, device=cuda.device).std() > 0
    graph = capture(cuda, lambda: torch.rand_like(source) * 0 + source * 5, pool=cuda.pool())
    for value in (2.0, 3.0):
        source.fill_(value)
        graph.replay()
        assert torch.equal(graph.outputs, torch.full_like(source, value * 5))


class Rows(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)
    twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)


def rows_step(view: Rows) -> torch.Tensor:
    """Reads every slot."""
    return view.twice * view.weights + view.ids


def rows_batch(cuda: CudaBackend, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """A random batch of whole numbers, made on the device."""
    draw = torch.Generator(cuda.device).manual_seed(seed)
    ids = torch.randint(1, 99, (rows,), generator=draw, device=cuda.device)
    return {"ids": ids, "weights": torch.randint(1, 9, (rows,), generator=draw, device=cuda.device).float()}


def rows_answer(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the step must give."""
    return batch["ids"] * 2 * batch["weights"] + batch["ids"]


def rows_runner(backend: CudaBackend) -> DecodeRunner[Rows]:
    """A runner over three buckets."""
    return DecodeRunner(Rows, rows_step, buckets=[1, 4, 8], backend=backend)


def sleep(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)


@pytest.fixture
def cuda() -> CudaBackend:
    """The backend on the current device."""
    return CudaBackend()


def test_host_memory_is_pinned(cuda: CudaBackend) -> None:
    """Host slots lie in pinned memory, from which a captured step may copy."""
    host = cuda.empty((4,), torch.float32, HOST)
    assert host.is_pinned()
    host.fill_(1)
    graph = capture(cuda, lambda: host.to(cuda.device, non_blocking=True) * 2)
    for value in (3.0, 4.0):
        host.fill_(value)
        graph.replay()
        assert graph.outputs.tolist() == [value * 2] * 4


def test_random_numbers(cuda: CudaBackend) -> None:
    """A graph draws other numbers at each replay, and those of two runs from one seed are the same."""
    graph = capture(cuda, lambda: torch.rand(16, device=cuda.device))
    drawn = list[torch.Tensor]()
    for number in range(6):
        if number % 3 == 0:
            torch.cuda.manual_seed(3)
        graph.replay()
        drawn.append(graph.outputs.clone())
    assert torch.equal(torch.stack(drawn[:3]), torch.stack(drawn[3:]))
    assert not torch.equal(drawn[0], drawn[1])


def test_one_stream_and_one_pool(cuda: CudaBackend) -> None:
    """All backends of one device share a stream and a pool, in which one graph's scratch serves the next."""
    other = CudaBackend()
    assert other.pool() is cuda.pool()
    with cuda.stream() as one, other.stream() as two:
        assert one == two
    source = torch.ones(4, device=cuda.device)

    def step() -> torch.Tensor:
        return source + torch.zeros(16 * MIB, device=cuda.device).sum()

    graphs = [capture(backend, step, pool=backend.pool()) for backend in (cuda, other, cuda, other)]
    assert 63 * MIB <= graphs[0].nbytes < 96 * MIB
    assert sum(graph.nbytes for graph in graphs[1:]) < 8 * MIB
    alone = capture(cuda, step)
    assert alone.nbytes >= 64 * MIB
    for graph in (*graphs, alone):
        graph.replay()
        assert torch.equal(graph.outputs, source)


def test_pool_outlives_its_graphs(cuda: CudaBackend) -> None:
    """When all graphs are gone their memory goes back, and the pool takes new ones, though old outputs are held."""
    gc.collect()
    torch.cuda.empty_cache()
    before = cuda.memory().allocated
    source = torch.ones(4, device=cuda.device)
    kept = []
    for number in range(3):
        graph = capture(cuda, lambda: source + torch.zeros(16 * MIB, device=cuda.device).sum(), pool=cuda.pool())
        graph.replay()
        kept.append(graph.outputs)
        assert torch.equal(kept[number], source)
        del graph
        gc.collect()
    torch.cuda.empty_cache()
    assert cuda.memory().allocated - before < 96 * MIB


def test_torchs_own_handle(cuda: CudaBackend) -> None:
    """A handle of torch's, as an engine may have one, is a pool too."""
    source, handle = torch.ones(4, device=cuda.device), torch.cuda.graph_pool_handle()
    graphs = [capture(cuda, functools.partial(source.mul, by), pool=handle) for by in (2, 3)]
    for graph, by in zip(graphs, (2, 3), strict=True):
        graph.replay()
        assert torch.equal(graph.outputs, source * by)


def test_bytes_of_a_runner(cuda: CudaBackend) -> None:
    """Inputs, graphs and outputs are accounted for apart, and together fit what the allocator holds more."""
    gc.collect()
    torch.cuda.empty_cache()
    before = cuda.memory().allocated
    wide = torch.ones(1, 4 * MIB, device=cuda.device)

    def step(view: Rows) -> torch.Tensor:
        return ((wide + view.weights[:, None]) * 2)[:, : MIB // 4] + 1

    runner = DecodeRunner(Rows, step, buckets=[1, 8], backend="cuda")
    memory = runner.capture().memory
    assert memory.inputs == runner.graphs.buffers.nbytes
    assert memory.outputs == (8 + 1) * MIB
    assert memory.graphs + memory.outputs >= 2 * 8 * 16 * MIB, "the sum and its double of the largest bucket"
    torch.cuda.empty_cache()
    held = cuda.memory().allocated - before - wide.nbytes
    assert abs(held - memory.total) < 64 * MIB


def test_stream_waits_both_ways(cuda: CudaBackend) -> None:
    """The capture stream begins after the caller's work, and the caller's goes on after the capture stream's."""
    source = torch.zeros(1 << 16, device=cuda.device)
    sleep(20_000_000)
    source.fill_(1)
    with cuda.stream():
        copy = source.clone()
        sleep(20_000_000)
        copy.add_(1)
    assert int(copy.sum()) == 2 * len(copy)
    assert torch.cuda.current_stream(cuda.device) == torch.cuda.default_stream(cuda.device)


@pytest.mark.parametrize(("made", "captured", "filled", "replayed"), MODES)
def test_inference_modes(cuda: CudaBackend, *, made: bool, captured: bool, filled: bool, replayed: bool) -> None:
    """Whatever was inside inference mode and whatever outside, steps are right and outputs are ordinary tensors."""
    with torch.inference_mode(mode=made):
        runner = rows_runner(cuda)
    with torch.inference_mode(mode=captured):
        runner.capture()
    for seed, rows in enumerate((3, 8, 1, 20)):
        batch = rows_batch(cuda, rows, seed)
        with torch.inference_mode(mode=filled):
            view = runner.fill(batch)
        with torch.inference_mode(mode=replayed):
            outputs = runner.replay(view)
        assert torch.equal(outputs, rows_answer(batch))
        if rows <= 8:
            outputs.add_(1)
    assert not any(buffer.tensor.is_inference() for buffer in runner.graphs.buffers)


def test_structures_of_inference_tensors(cuda: CudaBackend) -> None:
    """Outputs of a capture inside inference mode keep their structure, addresses and other values."""
    source, note = torch.ones(4, device=cuda.device), object()
    with torch.inference_mode():
        graph = capture(cuda, lambda: {"one": (source + 1)[1:], "more": (source, [source * 2, note])})
    graph.replay()
    one, (same, (double, other)) = graph.outputs["one"], graph.outputs["more"]
    assert not one.is_inference()
    assert (one.storage_offset(), one.tolist()) == (1, [2.0] * 3)
    assert same is source
    assert double.tolist() == [2.0] * 4
    assert other is note


def test_no_collection_during_capture(cuda: CudaBackend) -> None:
    """Python's collector stands still while a step is captured, and is as it was afterwards."""
    source, seen = torch.ones(4, device=cuda.device), list[bool]()

    def step() -> torch.Tensor:
        seen.append(gc.isenabled())
        return source + 1

    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            capture(cuda, step)
            assert gc.isenabled() is was_on
        finally:
            gc.enable()
    assert seen == [False, False]


def test_step_that_does_nothing(cuda: CudaBackend) -> None:
    """Nothing recorded is warned of, as torch does, and is a graph all the same."""
    source = torch.ones(4, device=cuda.device)
    with pytest.warns(UserWarning, match="empty"):
        graph = capture(cuda, lambda: source)
    graph.replay()
    assert graph.outputs is source
    assert graph.nbytes == 0


def test_two_devices(cuda: CudaBackend) -> None:
    """A backend belongs to the device that was current when it was made, whichever is current later."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device here")
    with torch.cuda.device(1):
        other = CudaBackend()
    assert other.device == torch.device("cuda", 1)
    assert other.pool() is not cuda.pool()
    runners = [rows_runner(backend) for backend in (cuda, other)]
    for runner in runners:
        runner.capture()
        assert torch.cuda.current_device() == cuda.device.index
    for seed, rows in enumerate((1, 3, 8, 9)):
        for backend, runner in zip((cuda, other), runners, strict=True):
            batch = rows_batch(backend, rows, seed)
            assert torch.equal(runner(batch), rows_answer(batch))
    assert other.empty((2,), torch.int64, "device").device == other.device
    with other.stream() as stream:
        assert stream.device == other.device


def test_runners_take_turns(cuda: CudaBackend) -> None:
    """Two runners whose graphs compute in the same memory are right on two streams, though each takes its time."""

    def step(view: Rows) -> torch.Tensor:
        scratch = view.ids[:, None].expand(-1, MIB).contiguous()
        sleep(20_000_000)
        return scratch.sum(1)

    runners = [DecodeRunner(Rows, step, buckets=[2], backend=cuda) for _ in range(2)]
    streams = [torch.cuda.Stream(cuda.device) for _ in runners]
    for runner in runners:
        runner.capture()
    batches = [rows_batch(cuda, 2, seed) for seed in range(8)]
    torch.cuda.synchronize()
    outputs = []
    for number, batch in enumerate(batches):
        with torch.cuda.stream(streams[number % 2]):
            outputs.append(runners[number % 2](batch).clone())
    torch.cuda.synchronize()
    for batch, output in zip(batches, outputs, strict=True):
        assert torch.equal(output, batch["ids"] * MIB)


def test_steps_of_fresh_tensors_ask_for_no_snapshot(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot of the allocator takes milliseconds: steps on fresh tensors do without, once memory is at hand."""
    snapshot = Mock(wraps=torch.cuda.memory_snapshot)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)
    runner = DecodeRunner(Rows, rows_step, buckets=[8], backend=cuda, debug=True, progress=False)
    runner.capture()
    for number in range(200):
        if number == 20:
            snapshot.reset_mock()
        batch = rows_batch(cuda, 1 + number % 8, number)
        assert torch.equal(runner(batch), rows_answer(batch))
    assert not snapshot.called


@pytest.fixture
def little_memory(cuda: CudaBackend) -> Iterator[None]:
    """No more than 1 GiB beyond what is held now."""
    gc.collect()
    torch.cuda.empty_cache()
    memory = cuda.memory()
    torch.cuda.set_per_process_memory_fraction((memory.allocated + 1024 * MIB) / memory.total, cuda.device)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, cuda.device)


REFUSED: list[tuple[Step, str]] = [
    (lambda x: x * x.max().item(), "item"),
    (lambda x: x.tolist(), "tolist"),
    (lambda x: x.cpu(), "cpu"),
    (lambda x: x if x.sum() > 0 else -x, "on the device"),
    (lambda x: x.nonzero(), "nonzero"),
    (lambda x: x[x > 0], "mask"),
    (torch.unique, "unique"),
    (lambda x: x.copy_(torch.ones(4)), "pinned"),
    (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), "pinned|a slot"),
    (lambda _: torch.cuda.synchronize(), "synchronize"),
]


@pytest.mark.parametrize(("step", "says"), REFUSED)
def test_refused_operations(cuda: CudaBackend, step: Step, says: str) -> None:
    """What CUDA refuses in a capture is refused with the line and the way out, and all else goes on."""
    source = torch.ones(4, device=cuda.device)
    earlier = capture(cuda, lambda: source + 1, pool=cuda.pool())
    for _ in range(2):
        with pytest.raises(CaptureError, match=says) as refused:
            capture(cuda, lambda: step(source), pool=cuda.pool())
        assert isinstance(refused.value.__cause__, RuntimeError)
        assert "test_cuda.py:" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert_usable(cuda, source)
    earlier.replay()
    assert torch.equal(earlier.outputs, source + 1)


def test_the_line_of_a_failed_capture(cuda: CudaBackend) -> None:
    """A runner's error says once what CUDA refused in each bucket, and its traceback ends in the step's own line."""

    def reads(view: Rows) -> torch.Tensor:
        return view.ids * view.ids.sum().item()

    runner = DecodeRunner(Rows, reads, buckets=[2, 4], backend=cuda)
    with pytest.raises(CaptureError) as refused:
        runner.capture()
    last, said = traceback.extract_tb(refused.value.__traceback__)[-1], str(refused.value)
    assert last.line == "return view.ids * view.ids.sum().item()"
    assert said.startswith("2 of 2 buckets were not captured and run eagerly: bucket 2, 4: ")
    assert said.count(f"test_cuda.py:{last.lineno}") == 1
    text = "".join(traceback.format_exception(refused.value))
    assert text.count("Traceback (most recent call last)") == 1


def hides(_: CudaBackend, x: torch.Tensor) -> torch.Tensor:
    """Catches what CUDA refused."""
    try:
        return x * x.sum().item()
    except RuntimeError:
        return x * 2


def interrupts(_: CudaBackend, x: torch.Tensor) -> None:
    """Is interrupted, which passes through."""
    x.mul(2)
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (hides, CaptureError, "went on after it"),
        (lambda cuda, x: cuda.capture(lambda: x + 1), CaptureError, "cannot capture another"),
        (interrupts, KeyboardInterrupt, "^$"),
    ],
)
def test_steps_that_break_off(cuda: CudaBackend, step: Any, error: type[BaseException], says: str) -> None:
    """It is told so, and the device goes on."""
    source = torch.ones(4, device=cuda.device)
    with pytest.raises(error, match=says):
        capture(cuda, lambda: step(cuda, source), pool=cuda.pool())
    assert_usable(cuda, source)


def test_memory_of_refused_captures_comes_back(cuda: CudaBackend) -> None:
    """What a broken capture allocated, and what is allocated after it, goes back to the device."""
    source = torch.ones(4, device=cuda.device)
    assert_usable(cuda, source)
    gc.collect()
    torch.cuda.empty_cache()
    before = cuda.memory().allocated

    def step() -> float:
        scratch = torch.ones(64 * MIB, device=cuda.device)
        return float((scratch + 1).sum().item())

    for _ in range(4):
        with pytest.raises(CaptureError, match="item"):
            capture(cuda, step)
    del step
    later = torch.ones(64 * MIB, device=cuda.device)
    del later
    gc.collect()
    torch.cuda.empty_cache()
    assert cuda.memory().allocated - before < 32 * MIB


@pytest.mark.parametrize("given", [False, True])
def test_pool_that_cannot_be_mended(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch, *, given: bool) -> None:
    """Where torch refuses a pool after a broken capture, as newer ones do, the shared pool goes on with another."""
    source = torch.ones(4, device=cuda.device)
    earlier = capture(cuda, lambda: source + 1, pool=cuda.pool())
    before, tries, mend = cuda.pool().handle(), list[object](), StreamBackend._capture_nothing

    def refusing(device: StreamBackend, handle: object) -> None:
        tries.append(handle)
        if len(tries) == 1:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        mend(device, handle)

    monkeypatch.setattr(StreamBackend, "_capture_nothing", refusing)
    with pytest.raises(CaptureError, match="item"):
        capture(cuda, lambda: source.sum().item(), pool=torch.cuda.graph_pool_handle() if given else cuda.pool())
    assert len(set(tries)) == 2
    assert (cuda.pool().handle() == before) is given
    assert_usable(cuda, source)
    earlier.replay()
    assert torch.equal(earlier.outputs, source + 1)


@pytest.mark.usefixtures("little_memory")
def test_out_of_memory_in_a_capture(cuda: CudaBackend) -> None:
    """A capture that the device has no memory for says what to lower, and leaves none of it behind."""
    source, before = torch.ones(4, device=cuda.device), cuda.memory().allocated
    says = r"memory ran out.*tried to allocate.*lower the number of buckets"
    for _ in range(3):

        def step() -> torch.Tensor:
            kept = [torch.empty(256 * MIB, dtype=torch.uint8, device=cuda.device) for _ in range(8)]
            return source * len(kept)

        with pytest.raises(CaptureError, match=says) as ran:
            # a pool of its own: torch keeps the memory of one that has graphs, such as those of other tests
            capture(cuda, step, pool=torch.cuda.graph_pool_handle())
        assert isinstance(ran.value.__cause__, torch.OutOfMemoryError)
        torch.cuda.empty_cache()
        assert cuda.memory().allocated - before < 64 * MIB, "the error is still held, its tensors are not"
    assert_usable(cuda, source)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("warmups", [0, 2])
def test_out_of_memory_in_one_bucket(cuda: CudaBackend, warmups: int) -> None:
    """The bucket that is too large falls back, with the reason; the others are captured, and all answers are right."""

    def step(view: Rows) -> torch.Tensor:
        scratch = [torch.zeros(len(view.ids), 32 * MIB, dtype=torch.uint8, device=view.ids.device) for _ in range(8)]
        return rows_step(view) + sum(part[:, 0] for part in scratch)

    runner = DecodeRunner(Rows, step, buckets=[1, 2, 8], backend="cuda", warmups=warmups)
    with pytest.raises(CaptureError, match=r"1 of 3 buckets.*bucket 8: the device's memory ran out"):
        runner.capture()
    assert runner.report is not None
    assert runner.report.captured == (1, 2)
    assert "KV cache" in runner.report.failed[8]
    torch.cuda.set_per_process_memory_fraction(1.0, cuda.device)
    for seed, rows in enumerate((1, 2, 7, 1, 2)):
        batch = rows_batch(cuda, rows, seed)
        assert torch.equal(runner(batch), rows_answer(batch))
    assert runner.stats()["steps"] == {"graph": 4, "eager": 1}


def test_replay_that_is_refused(cuda: CudaBackend) -> None:
    """What torch says at a replay is a ReplayError."""
    source = torch.ones(4, device=cuda.device)
    graph = capture(cuda, lambda: source + 1)
    for part in graph.graphs:
        assert part is not None
        part.reset()
    with pytest.raises(ReplayError, match="could not be replayed"):
        graph.replay()


def test_input_that_was_freed(cuda: CudaBackend) -> None:
    """Where torch can watch the inputs of a capture, a replay after one was freed is refused; else asking is."""
    if int(torch.__version__.split(".")[1]) < 13:
        with pytest.raises(BackendUnavailableError, match="cannot check"):
            CudaBackend(check_input_liveness=True)
        return
    watching, source = CudaBackend(check_input_liveness=True), torch.ones(4, device=cuda.device)
    sources = [source]
    graph = capture(watching, lambda: sources[0] * 2)
    graph.replay()
    del source
    sources.clear()
    with pytest.raises(ReplayError, match="dead tensor"):
        graph.replay()
