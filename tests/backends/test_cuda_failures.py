"""The CUDA backend where captures fail: each says why, leaves no trace, and all else goes on."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slotgraph import DecodeRunner
from slotgraph.backends.cuda import CudaBackend
from slotgraph.backends.device import StreamBackend
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError, ReplayError
from tests.backends.test_cuda import MIB, Rows, assert_usable, capture, rows_answer, rows_batch, rows_step

_AVAILABLE = CudaBackend.is_available()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not _AVAILABLE, reason=f"cuda: {_AVAILABLE.reason}")]

Step = Callable[[torch.Tensor], Any]


@pytest.fixture
def cuda() -> CudaBackend:
    """The backend on the current device."""
    return CudaBackend()


@pytest.fixture
def little_memory(cuda: CudaBackend) -> Iterator[None]:
    """No more than 1 GiB beyond what is held now."""
    gc.collect()
    torch.cuda.empty_cache()
    memory = cuda.memory()
    torch.cuda.set_per_process_memory_fraction((memory.allocated + 1024 * MIB) / memory.total, cuda.device)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, cuda.device)


def waits(x: torch.Tensor) -> torch.Tensor:
    """Waits for the device."""
    torch.cuda.synchronize()
    return x + 1


REFUSED: list[tuple[str, Step, str]] = [
    ("item", lambda x: x * x.max().item(), "item"),
    ("tolist", lambda x: x.tolist(), "tolist"),
    ("cpu", lambda x: x.cpu(), "cpu"),
    ("bool", lambda x: x if x.sum() > 0 else -x, "on the device"),
    ("nonzero", lambda x: x.nonzero(), "nonzero"),
    ("mask", lambda x: x[x > 0], "mask"),
    ("unique", torch.unique, "unique"),
    ("pageable", lambda x: x.copy_(torch.ones(4)), "pinned"),
    ("made", lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device), "pinned|a slot"),
    ("synchronize", waits, "synchronize"),
]


@pytest.mark.parametrize(("step", "says"), [pytest.param(step, says, id=name) for name, step, says in REFUSED])
def test_refused_operations(cuda: CudaBackend, step: Step, says: str) -> None:
    """What CUDA refuses in a capture is refused with the line and the way out, and all else goes on."""
    source = torch.ones(4, device=cuda.device)
    earlier = capture(cuda, lambda: source + 1, pool=cuda.pool())
    for _ in range(2):
        with pytest.raises(CaptureError, match=says) as refused:
            capture(cuda, lambda: step(source), pool=cuda.pool())
        assert isinstance(refused.value.__cause__, RuntimeError)
        assert "test_cuda_failures.py:" in str(refused.value)
        assert "\n" not in str(refused.value)
    assert_usable(cuda, source)
    earlier.replay()
    assert torch.equal(earlier.outputs, source + 1)


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


def nests(cuda: CudaBackend, x: torch.Tensor) -> Any:
    """Captures another step, which is refused before it does harm."""
    return cuda.capture(lambda: x + 1)


@pytest.mark.parametrize(
    ("step", "error", "says"),
    [
        (hides, CaptureError, "went on after it"),
        (nests, CaptureError, "cannot capture another"),
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
    for _ in range(3):

        def step() -> torch.Tensor:
            kept = [torch.empty(256 * MIB, dtype=torch.uint8, device=cuda.device) for _ in range(8)]
            return source * len(kept)

        with pytest.raises(
            CaptureError, match=r"memory ran out.*tried to allocate.*lower the number of buckets"
        ) as ran:
            capture(cuda, step, pool=cuda.pool())
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
