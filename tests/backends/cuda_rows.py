"""What the CUDA backend's tests share: captures, a declaration with its step, and the answers in plain code."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from slotgraph import BATCH, DecodeRunner, Inputs, computed, copied
from slotgraph.backends.cuda import CudaBackend
from slotgraph.backends.device_graph import DeviceGraph

MIB = 1 << 20


def inference(*, inside: bool) -> AbstractContextManager[Any]:
    """Inference mode, or nothing."""
    return torch.inference_mode() if inside else nullcontext()


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
    """What the steps of this file read."""

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
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
