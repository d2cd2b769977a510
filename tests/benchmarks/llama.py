"""A Llama's decode step over the demo's paged cache, its batches, and bare captures: what real steps are timed with."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serving.attention import paged
from serving.batch import decode_batch
from serving.cache import PagedCache
from serving.inputs import PAGES, DecodeInputs
from serving.request import Request
from serving.steps import Steps
from serving.timing import Contestant, Race
from slotgraph import DecodeRunner
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import AUTO

PAGE_SIZE = 16
CONTEXT = 256
"""Tokens that each request's attention reaches over."""
SETS = 4
REACH = CONTEXT // PAGE_SIZE


@attrs.frozen(kw_only=True)
class Shape:
    """A model's sizes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int


FOUR = Shape(
    name="4 layers, 1024 wide", layers=4, hidden=1024, heads=16, kv_heads=4, intermediate=2816, vocabulary=32000
)
HALF = Shape(name="24 layers, 0.5B", layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864, vocabulary=151936)


def steps_of(shape: Shape, device: torch.device, dtype: torch.dtype, requests: int) -> Steps:
    """A model with random weights, over a cache that holds so many requests."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(dtype=dtype).eval()  # type: ignore[call-arg]
    return Steps.over(model, PagedCache.empty(model, 1 + requests * REACH, PAGE_SIZE))


def runner_of(
    steps: Steps, backend: Backend, buckets: Sequence[int], lowering: str = AUTO
) -> DecodeRunner[DecodeInputs]:
    """A runner of the decode step, not captured yet."""
    return DecodeRunner(
        DecodeInputs,
        steps.decode,
        buckets=list(buckets),
        backend=backend,
        sizes={PAGES: REACH},
        lowering=lowering,
        progress=False,
    )


def batches_of(live: int, device: torch.device) -> list[DecodeInputs]:
    """Batches of so many requests near the end of their context that take turns, each with tensors of its own."""
    made = []
    for number in range(SETS):
        length = CONTEXT - SETS + number
        requests = [
            Request(
                number=row,
                prompt="",
                prompt_ids=[1] * (length - row),
                arrival=0,
                limit=SETS,
                generated=[2 + number + row],
                pages=list(range(1 + row * REACH, 1 + (row + 1) * REACH)),
            )
            for row in range(live)
        ]
        made.append(decode_batch(requests, PAGE_SIZE, device))
    return made


@contextlib.contextmanager
def served(steps: Steps) -> Iterator[None]:
    """As in an engine."""
    with paged(steps.model), torch.inference_mode():
        yield


def step_times(steps: Steps, backend: Backend, live: int, bucket: int, race: Race) -> tuple[list[float], list[float]]:
    """Microseconds for each round's steps, of a bare replay and of `runner(batch)`.

    The graph that is replayed bare is that of a runner whose graphs hold nothing of a fill.
    """
    batches = batches_of(live, backend.device)
    with served(steps):
        runner, other = runner_of(steps, backend, [bucket]), runner_of(steps, backend, [bucket], "foreach")
        runner.capture()
        other.capture()
        other(batches[0])
        captured = other.graphs.get(bucket, frozenset())
        assert captured is not None
        replay = captured.graph.replay
        torch.testing.assert_close(runner(batches[1]).clone(), other(batches[1]), rtol=0.05, atol=0.05)
    bare, whole = race.run(
        [
            Contestant(lambda _: replay(), lambda: served(steps)),
            Contestant(lambda number: runner(batches[number % SETS]), lambda: served(steps)),
        ]
    )
    return bare, whole


def by_runner(steps: Steps, backend: Backend, buckets: Sequence[int]) -> Callable[[], object]:
    """Captures all buckets as the library does; what is returned keeps them."""
    runner = runner_of(steps, backend, buckets)

    def capture() -> object:
        runner.capture()
        return runner

    return capture


def by_hand(steps: Steps, backend: Backend, buckets: Sequence[int]) -> Callable[[], object]:
    """Captures all buckets in a plain loop: one pool, one stream, and a warm-up before each, the largest first."""
    views = [_static(rows, backend.device) for rows in sorted(buckets, reverse=True)]

    def capture() -> object:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(backend.device)  # type: ignore[no-untyped-call]
        kept: list[object] = []
        for view in views:
            stream.wait_stream(torch.cuda.current_stream(backend.device))
            with torch.cuda.stream(stream):
                steps.decode(view)
            torch.cuda.synchronize(backend.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                outputs = steps.decode(view)
            kept.append((graph, outputs))
        return kept

    return capture


def _static(rows: int, device: torch.device) -> Any:
    """Input tensors for one bucket, as one makes them by hand."""
    wide, narrow = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
    return SimpleNamespace(
        input_ids=wide,
        positions=wide.clone(),
        out_cache_loc=wide.clone(),
        seq_lens=narrow + 1,
        block_tables=torch.zeros(rows, REACH, dtype=torch.int32, device=device),
        num_token_non_padded=narrow[:1],
    )


def capture_seconds(
    ways: Sequence[Callable[[Steps, Backend, Sequence[int]], Callable[[], object]]],
    steps: Steps,
    backend: Backend,
    buckets: Sequence[int],
    rounds: int,
) -> list[list[float]]:
    """Seconds that each way takes to capture all buckets, taking turns; a first round, which warms up, is left out."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(1 + rounds):
        for way, seconds in zip(ways, taken, strict=True):
            with served(steps):
                capture = way(steps, backend, buckets)
                backend.synchronize()
                begin = time.perf_counter()
                kept = capture()
                backend.synchronize()
                seconds.append(time.perf_counter() - begin)
                del kept, capture
    return [seconds[1:] for seconds in taken]


def ladder(count: int) -> list[int]:
    """So many buckets, in steps of eight."""
    return [8 * (index + 1) for index in range(count)]


def is_sane(times: Sequence[float]) -> bool:
    """Whether something was measured at all; how long it took is for the reader."""
    return all(math.isfinite(time) and time > 0 for time in times)
