"""What a real step's inputs cost: a Llama's decode step by the runner beside a bare replay, and captures beside a loop.

pytest tests/benchmarks/test_llama_step.py -m cuda -s
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from serving.attention import PagedCache, paged
from serving.inputs import DecodeInputs, decode_batch
from serving.measuring import ALONE, COMPILED, PLAIN, alone
from serving.request import Request
from serving.steps import Steps
from slotgraph import DecodeRunner, attention
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.capabilities import AUTO
from slotgraph.runners.testing.timing import Run, measure
from tests.benchmarks.shown import race, show

# This is about time: what other packages have to say about themselves is no failure.
pytestmark = pytest.mark.filterwarnings("default")
LIVE, BUCKET = 7, 8
BUCKETS = [8 * (1 + index) for index in range(20)]
PAGE_SIZE, SETS = 16, 4
CONTEXT = 256
"""Tokens that each request's attention reaches over."""
REACH = CONTEXT // PAGE_SIZE
SIZES: Final = {attention.PAGES: REACH, attention.PAGE_SIZE: PAGE_SIZE}
SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "4 layers, 1024 wide": (4, 1024, 16, 4, 2816, 32000),
    "8 layers, 1024 wide": (8, 1024, 16, 4, 2816, 32000),
    "24 layers, 0.5B": (24, 896, 14, 2, 4864, 151936),
    "tiny": (2, 32, 2, 1, 32, 64),
}
"""By name layers, width, heads, heads of the cache, width of the MLP, and words."""


def steps_of(shape: str, device: torch.device, dtype: torch.dtype) -> Steps:
    """A model over a cache that holds the live requests."""
    layers, hidden, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype=dtype).eval()
    return Steps(model, PagedCache.empty(model, 1 + LIVE * REACH, PAGE_SIZE))


def runner_of(
    steps: Steps, backend: Backend, buckets: Sequence[int], lowering: str = AUTO, *, compiled: bool = False
) -> DecodeRunner[DecodeInputs]:
    """A captured runner of the decode step."""
    given: dict[str, Any] = {"sizes": SIZES, "lowering": lowering, "progress": False}
    step = steps.decoding(compiled=compiled)
    runner = DecodeRunner(DecodeInputs, step, buckets=list(buckets), backend=backend, **given)
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

    return [decode_batch([request(number, row) for row in range(live)], REACH, device) for number in range(SETS)]


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
        torch.testing.assert_close(runner(batches[1]).logits.clone(), other(batches[1]).logits, rtol=0.05, atol=0.05)
    captured = other.graphs.get(BUCKET, frozenset())
    assert captured is not None
    ways: dict[str, Any] = {"bare replay": lambda _: captured.graph.replay(), "runner(batch)": runner}
    around = functools.partial(served, steps)
    race(title, ways, batches, backend, rounds=rounds, steps=each, around=around)


def capture_by_hand(steps: Steps, device: torch.device, buckets: Sequence[int]) -> object:
    """All buckets in a plain loop: one pool, one stream, and a warm-up before each, the largest first."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    kept: list[object] = []
    for rows in sorted(buckets, reverse=True):
        wide, narrow = (torch.zeros(rows, dtype=dtype, device=device) for dtype in (torch.int64, torch.int32))
        view = SimpleNamespace(
            input_ids=wide,
            positions=wide.clone(),
            out_cache_loc=wide.clone(),
            seq_lens=narrow + 1,
            page_table=torch.zeros(rows, REACH, dtype=torch.int32, device=device),
            num_token_non_padded=narrow[:1],
            numbers=wide.clone(),
        )
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            steps.decode(view)  # type: ignore[arg-type] # it looks like the view
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            kept.append((graph, steps.decode(view)))  # type: ignore[arg-type] # as above
    return kept


@pytest.mark.slotgraph_backends("cuda")
@pytest.mark.parametrize(("shape", "goal"), [("4 layers, 1024 wide", "3 %"), ("24 layers, 0.5B", "1.5 %")])
def test_step_over_bare_replay(shape: str, goal: str, slotgraph_backend: Backend) -> None:
    """What `runner(batch)` takes beyond its graph's replay."""
    steps = steps_of(shape, slotgraph_backend.device, torch.bfloat16)
    title = f"{shape}, bfloat16, {LIVE} of {BUCKET} rows: a step; goal: at most {goal} over the bare replay"
    race_steps(title, steps, slotgraph_backend, 21, 100)


@pytest.mark.slotgraph_backends("cuda")
@pytest.mark.parametrize("shape", ["8 layers, 1024 wide", "24 layers, 0.5B"])
def test_compiled_step_beside_what_a_user_would_pick(shape: str, slotgraph_backend: Backend) -> None:
    """A step through `DecodeRunner`, plain and compiled, and transformers' own under "reduce-overhead"."""
    backend = slotgraph_backend
    steps = steps_of(shape, backend.device, torch.bfloat16)
    batches, around = batches_of(LIVE, backend.device), functools.partial(served, steps)
    with served(steps):
        runners = {
            PLAIN: runner_of(steps, backend, [BUCKET]),
            COMPILED: runner_of(steps, backend, [BUCKET], compiled=True),
        }
        plain, compiled = (runner(batches[0]).logits.clone() for runner in runners.values())
    assert (plain - compiled).norm() < 0.05 * plain.norm()
    own: Any
    own, emptied = alone(steps.model, batches, CONTEXT)

    def through(runner: Callable[[Any], Any]) -> Run:
        return Run(lambda batch: runner(batch).next_ids.tolist(), batches, around)

    runs = {name: through(runner) for name, runner in runners.items()}
    runs[ALONE] = Run(lambda number: own(number).argmax(-1).tolist(), range(SETS), emptied)
    measure(list(runs.values()), backend, 15, 100)
    title = f"{shape}, bfloat16, {LIVE} of {BUCKET} rows, the host waits for tokens"
    show(title, {name: run.host for name, run in runs.items()})


@pytest.mark.slotgraph_backends("cuda")
def test_capture_beside_a_bare_loop(slotgraph_backend: Backend) -> None:
    """Twenty buckets of the larger model, a warm-up and a capture each."""
    shape, backend = "24 layers, 0.5B", slotgraph_backend
    steps = steps_of(shape, backend.device, torch.bfloat16)
    ways = {
        "bare loop": lambda buckets: capture_by_hand(steps, backend.device, buckets),
        "runner.capture()": lambda buckets: runner_of(steps, backend, buckets),
    }
    title, around = f"{shape}, bfloat16: capture of 20 buckets; goal: within 1.2", functools.partial(served, steps)
    race(title, ways, [BUCKETS], backend, rounds=5, steps=1, around=around)


def test_a_tiny_step_on_a_cpu() -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right."""
    backend = choose("cpu-capture")
    race_steps("tiny", steps_of("tiny", backend.device, torch.float32), backend, 2, 2)
