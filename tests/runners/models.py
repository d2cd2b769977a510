"""What the runners' tests share: a declaration, its step, random batches, and the answers in plain code."""

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import pytest
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, DecodeRunner, EagerRunner, Inputs, computed, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.buffers import Buffers

Batch = dict[str, Any]
Runner = TypeVar("Runner")

WORDS = 50
WIDTH = 4
TABLE = torch.randn(2 * WORDS, WIDTH, generator=torch.Generator().manual_seed(11))


@functools.cache
def table_on(device: torch.device) -> torch.Tensor:
    """The table where a captured step may read it."""
    return TABLE.to(device)


recording = pytest.mark.slotgraph_backends("cpu-capture", "cuda", "npu")
"""Marks long tests of graphs: the backend `cpu` is left out, whose graph is the step itself."""


class Ids(Inputs):  # one number a request
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class PlainInputs(Inputs):  # one slot of each common kind; no tail value is one that a live row has
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=WORDS - 1)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=-7.5)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=9)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
    rows: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)


def plain_step(view: PlainInputs) -> torch.Tensor:
    """[TOKENS, WIDTH] floats; each row depends on its own slots and on the number of live requests."""
    scale = view.weights + view.pairs[:, 0] * view.pairs[:, 1]
    return table_on(view.rows.device)[view.rows] * scale[:, None] + view.live + view.places[:, None]


def random_batch(requests: int, seed: int, device: Any = "cpu") -> Batch:
    """A batch of one token a request, without a zero or a tail's value in it."""
    draw = torch.Generator().manual_seed(seed)
    batch = {
        "ids": torch.randint(1, WORDS - 1, (requests,), generator=draw),
        "places": torch.randint(1, 1000, (requests,), generator=draw),
        "weights": torch.rand(requests, generator=draw) + 0.5,
        "pairs": torch.rand(requests, 2, generator=draw) + 0.5,
    }
    return {name: value.to(device) for name, value in batch.items()}


def batch_for(inputs: type[Inputs], live: Mapping[Axis, int], seed: int, device: Any = "cpu") -> Batch:
    """Whole numbers from 1 to 98 at random for each copied slot of a declaration, of these live sizes."""
    draw, found = torch.Generator().manual_seed(seed), {}
    for name, slot in inputs.slotgraph.slots.items():
        if slot.reads(name) is not None:
            dtype = slot.dtype if isinstance(slot.dtype, torch.dtype) else torch.int64
            found[name] = torch.randint(1, 99, extent(slot.shape, live), generator=draw).to(device, dtype)
    return found


def expected(batch: Batch) -> torch.Tensor:
    """What the step must give for a batch, without any slot, bucket or buffer."""
    scale = batch["weights"] + batch["pairs"].prod(1)
    rows: torch.Tensor = TABLE[2 * batch["ids"]] * scale[:, None] + len(batch["ids"]) + batch["places"][:, None]
    return rows


def assert_right(outputs: torch.Tensor, batch: Batch) -> None:
    """The outputs are those of the batch, row by row."""
    torch.testing.assert_close(torch.as_tensor(outputs), expected(batch))


def ready(runner: Runner) -> Runner:
    """The runner, captured."""
    cast("Any", runner).capture()
    return runner


def decoder(inputs: Any, step: Any, **options: Any) -> Any:
    """A captured decode runner for 4 requests on the CPU, unless told otherwise."""
    given: dict[str, Any] = {"buckets": [4], "backend": "cpu", "progress": False, **options}
    return ready(DecodeRunner(inputs, step, **given))


def plain_runner(backend: str | Backend, **options: Any) -> DecodeRunner[PlainInputs]:
    """One over two buckets, of 4 and 8 requests, unless told otherwise."""
    given = {"backend": backend, "buckets": [4, 8], **options}
    return cast("DecodeRunner[PlainInputs]", decoder(PlainInputs, plain_step, **given))


def runner_by(way: str, inputs: Any, step: Any, **options: Any) -> Any:
    """An eager runner where the way is "eager" or "no copy", else a captured one: a backend and a lowering."""
    if way in ("eager", "no copy"):
        return EagerRunner(inputs, step, backend="cpu", no_copy=way == "no copy")
    backend, lowering = way.split()
    return decoder(inputs, step, backend=backend, lowering=lowering, **options)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as they lie in memory."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def memory_of(runner: DecodeRunner[Any]) -> dict[str, bytes]:
    """Every byte of every buffer of a runner and of the one that it falls back to."""
    found: dict[str, bytes] = {}
    for which, buffers in (("graphs", runner.graphs.buffers), ("eager", runner.eager.buffers)):
        if isinstance(buffers, Buffers):
            found |= {f"{which}.{buffer.name}": bytes_of(buffer.tensor) for buffer in buffers}
    return found


def snapshot(batch: Batch) -> Batch:
    """A copy of a batch, values and all."""
    return {name: one.clone() if isinstance(one, torch.Tensor) else copy.copy(one) for name, one in batch.items()}


def same_batch(one: Batch, other: Batch) -> bool:
    """Whether two batches hold the same values; what has no bytes (meta, sparse) counts by its shape."""
    return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and str(one) == str(other)
    if one.layout is not torch.strided or one.device.type == "meta":
        return tuple(one.shape) == tuple(other.shape)
    return one.dtype == other.dtype and tuple(one.shape) == tuple(other.shape) and bytes_of(one) == bytes_of(other)


@contextmanager
def nothing_changes(runner: DecodeRunner[PlainInputs], batch: Batch) -> Iterator[None]:
    """What the block does must leave buffers, batch, graphs and the view filled before as they were."""
    runner(random_batch(30, seed=97))
    view = runner.fill(random_batch(3, seed=98))
    before = runner.replay(view).clone()
    memory, given = memory_of(runner), snapshot(batch)
    yield
    assert memory_of(runner) == memory
    assert same_batch(batch, given)
    assert torch.equal(runner.replay(view), before)
    for requests in (2, 7, 20):
        good = random_batch(requests, seed=requests)
        assert_right(runner(good), good)
