"""What a real step's inputs cost: a Llama's decode step by the runner beside a bare replay, and captures beside a loop.

pytest tests/benchmarks/test_llama_step.py -m cuda -s
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serving.attention import paged
from serving.batch import decode_batch
from serving.cache import PagedCache
from serving.inputs import PAGES, DecodeInputs
from serving.request import Request
from serving.steps import Steps
from slotgraph import DecodeRunner
from slotgraph.backends import Backend, choose
from slotgraph.backends.cuda import CudaBackend
from slotgraph.dataflow.capabilities import AUTO
from tests.benchmarks.shown import race

# This is about time: what other packages have to say about themselves is no failure.
pytestmark = pytest.mark.filterwarnings("default")
LIVE, BUCKET = 7, 8
BUCKETS = [8 * (1 + index) for index in range(20)]


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

    def model(self, device: torch.device, dtype: torch.dtype, room: int) -> Any:
        """A model for contexts of so many tokens."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=room,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
        return model.to(dtype=dtype).eval()


FOUR = Shape(
    name="4 layers, 1024 wide", layers=4, hidden=1024, heads=16, kv_heads=4, intermediate=2816, vocabulary=32000
)
HALF = Shape(name="24 layers, 0.5B", layers=24, hidden=896, heads=14, kv_heads=2, intermediate=4864, vocabulary=151936)
TINY = Shape(name="tiny", layers=2, hidden=32, heads=2, kv_heads=1, intermediate=32, vocabulary=64)


def steps_of(shape: Shape, device: torch.device, dtype: torch.dtype, requests: int) -> Steps:
    """A model over a cache that holds so many requests."""
    model = shape.model(device, dtype, CONTEXT)
    return Steps.over(model, PagedCache.empty(model, 1 + requests * REACH, PAGE_SIZE))


def runner_of(
    steps: Steps, backend: Backend, buckets: Sequence[int], lowering: str = AUTO
) -> DecodeRunner[DecodeInputs]:
    """A captured runner of the decode step."""
    given: dict[str, Any] = {"sizes": {PAGES: REACH}, "lowering": lowering, "progress": False}
    runner = DecodeRunner(DecodeInputs, steps.decode, buckets=list(buckets), backend=backend, **given)
    runner.capture()
    return runner


def batches_of(live: int, device: torch.device) -> list[DecodeInputs]:
    """Batches of so many requests near the end of their context that take turns, each with tensors of its own."""

    def request(number: int, row: int) -> Request:
        return Request(
            number=row,
            prompt="",
            prompt_ids=[1] * (CONTEXT - SETS + number - row),
            arrival=0,
            limit=SETS,
            generated=[2 + number + row],
            pages=list(range(1 + row * REACH, 1 + (row + 1) * REACH)),
        )

    return [decode_batch([request(number, row) for row in range(live)], PAGE_SIZE, device) for number in range(SETS)]


@contextlib.contextmanager
def served(steps: Steps) -> Iterator[None]:
    """As in an engine."""
    with paged(steps.model), torch.inference_mode():
        yield


def race_steps(title: str, steps: Steps, backend: Backend, rounds: int, each: int) -> None:
    """Steps by `runner(batch)` beside a bare replay, of a runner whose graphs hold nothing of a fill."""
    batches = batches_of(LIVE, backend.device)
    with served(steps):
        runner, other = runner_of(steps, backend, [BUCKET]), runner_of(steps, backend, [BUCKET], "foreach")
        other(batches[0])
        torch.testing.assert_close(runner(batches[1]).clone(), other(batches[1]), rtol=0.05, atol=0.05)
    captured = other.graphs.get(BUCKET, frozenset())
    assert captured is not None
    ways: dict[str, Any] = {"bare replay": lambda _: captured.graph.replay(), "runner(batch)": runner}
    around = functools.partial(served, steps)
    race(title, ways, batches, backend, rounds=rounds, steps=each, around=around)


def capture_by_hand(steps: Steps, device: torch.device, buckets: Sequence[int]) -> object:
    """All buckets in a plain loop: one pool, one stream, and a warm-up before each, the largest first."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    kept: list[object] = []
    for rows in sorted(buckets, reverse=True):
        wide, narrow = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        view = SimpleNamespace(
            input_ids=wide,
            positions=wide.clone(),
            out_cache_loc=wide.clone(),
            seq_lens=narrow + 1,
            block_tables=torch.zeros(rows, REACH, dtype=torch.int32, device=device),
            num_token_non_padded=narrow[:1],
        )
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            steps.decode(view)  # type: ignore[arg-type] # it looks like the view
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            kept.append((graph, steps.decode(view)))  # type: ignore[arg-type] # as above
    return kept


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "goal"), [pytest.param(FOUR, "3 %", id="4-layers"), pytest.param(HALF, "1.5 %", id="24-layers")]
)
def test_step_over_bare_replay(shape: Shape, goal: str, cuda: CudaBackend) -> None:
    """What `runner(batch)` takes beyond its graph's replay."""
    steps = steps_of(shape, cuda.device, torch.bfloat16, LIVE)
    title = f"{shape.name}, bfloat16, {LIVE} of {BUCKET} rows: a step; goal: at most {goal} over the bare replay"
    race_steps(title, steps, cuda, 21, 100)


@pytest.mark.cuda
@pytest.mark.slow
def test_capture_beside_a_bare_loop(cuda: CudaBackend) -> None:
    """Twenty buckets of the larger model, a warm-up and a capture each."""
    steps = steps_of(HALF, cuda.device, torch.bfloat16, LIVE)
    ways = {
        "bare loop": lambda buckets: capture_by_hand(steps, cuda.device, buckets),
        "runner.capture()": lambda buckets: runner_of(steps, cuda, buckets),
    }
    title, around = f"{HALF.name}, bfloat16: capture of 20 buckets; goal: within 1.2", functools.partial(served, steps)
    race(title, ways, [BUCKETS], cuda, rounds=5, steps=1, around=around)


def test_a_tiny_step_on_a_cpu() -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right."""
    backend = choose("cpu-capture")
    race_steps("tiny", steps_of(TINY, backend.device, torch.float32, LIVE), backend, 2, 2)
