"""What a prefill step takes by each path: a Llama's, eagerly, breakable and piecewise, and each break by itself.

pytest tests/benchmarks/test_prefill_step.py -m cuda -s
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slotgraph import (
    BATCH,
    TOKENS,
    BreakableRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    Step,
    computed,
    copied,
    current_view,
    graph_break,
)
from slotgraph.backends import Backend, choose
from slotgraph.backends.cuda import CudaBackend
from tests.benchmarks.llama import HALF, TINY, Shape
from tests.benchmarks.shown import race

# This is about time: what other packages have to say about themselves is no failure.
pytestmark = pytest.mark.filterwarnings("default")

ATTENTION = "slotgraph-bench-prefill"
ROOM = 8192
SETS = 3
BREAKS = 24


def starts(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's tokens begin, and one past the last one's end."""
    return torch.nn.functional.pad(extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


def last_rows(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's last token lies."""
    return extend_seq_lens.cumsum(0) - 1


class PrefillInputs(Inputs):
    """Tokens of several requests behind one another. lengths: the same numbers on the host."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    starts: torch.Tensor = computed(starts, shape=(BATCH + 1,), dtype=torch.int32)
    last_rows: torch.Tensor = computed(last_rows, shape=BATCH, dtype=torch.int64)
    lengths: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request that owns all tokens."""
        return {"extend_seq_lens": [step.live(TOKENS)], "lengths": [step.live(TOKENS)]}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention within each request, [tokens, heads, head size]; padded rows hold anything."""
    view, out, begin = current_view(PrefillInputs), torch.zeros_like(query), 0
    if query.is_cuda:
        longest, flash = max(view.lengths, default=1), torch.ops.aten._flash_attention_forward
        given = (view.starts, view.starts, longest, longest, 0.0, True, False)  # no dropout, causal, no debug mask
        found: torch.Tensor = flash(query, key, value, *given, scale=scale)[0]
        return found
    for length in view.lengths:
        q, k, v = (one[begin : begin + length].transpose(0, 1)[None] for one in (query, key, value))
        one = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[begin : begin + length] = one[0].transpose(0, 1)
        begin += length
    return out


broken = graph_break(attend)
"""Between graphs, by a mark in the code."""


@torch.library.custom_op("slotgraph_bench::attention", mutates_args=())
def named(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Between graphs, by its name."""
    return attend(query, key, value, scale)


@named.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    del key, value, scale
    return torch.empty_like(query)


def of_transformers(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: None, *, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer."""
    q, k, v = (one[0].transpose(0, 1).contiguous() for one in (query, key, value))
    out: torch.Tensor = (named if module.config.slotgraph_split == "named" else broken)(q, k, v, scaling)
    return out[None], None


def batch_of(lengths: list[int], vocabulary: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Requests of given lengths with random tokens."""
    seeded, total = torch.Generator().manual_seed(seed), sum(lengths)
    places = [place for length in lengths for place in range(length)]
    return {
        "input_ids": torch.randint(0, vocabulary, (total,), generator=seeded).to(device),
        "positions": torch.tensor(places, dtype=torch.int64).to(device),
        "out_cache_loc": (1 + torch.randperm(ROOM, generator=seeded)[:total]).to(device),
        "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32).to(device),
        "lengths": lengths,
    }


def race_paths(
    shape: Shape, backend: Backend, dtype: torch.dtype, lengths: list[int], close: float, **how: Any
) -> None:
    """Each path over requests of these lengths, one token in ten padding, the host waiting for each step's outputs."""
    model = shape.model(backend.device, dtype, ROOM)
    AttentionInterface.register(ATTENTION, of_transformers)
    model.set_attn_implementation(ATTENTION)

    def step(view: Any) -> torch.Tensor:
        """Logits of each request's next token."""
        out = model.model(input_ids=view.input_ids[None], position_ids=view.positions[None], use_cache=False)
        logits: torch.Tensor = model.lm_head(out.last_hidden_state[0][view.last_rows])
        return logits

    total = sum(lengths)
    told: dict[str, Any] = {"backend": backend, "buckets": [total], "max_batch": len(lengths), "progress": False}
    told["stack"] = model.model
    split: dict[str, Any] = {"splits": ["slotgraph_bench::attention"], "output_rows": BATCH}
    piecewise, runner = (
        PrefillRunner(PrefillInputs, step, **split, **told),
        BreakableRunner(PrefillInputs, step, **told),
    )
    runners: dict[str, Any] = {"eager": EagerRunner(PrefillInputs, step, backend=backend)}
    for name, made in (("piecewise", piecewise), ("breakable", runner)):
        model.config.slotgraph_split = "named" if name == "piecewise" else "broken"
        with torch.no_grad():
            made.capture()
        runners[name] = made
    shorter = [lengths[0] - min(max(1, total // 10), lengths[0] - 1), *lengths[1:]]
    batches = [batch_of(shorter, shape.vocabulary, seed, backend.device) for seed in range(SETS)]
    with torch.no_grad():
        expected = runners["eager"](batches[0])
        for name, one in runners.items():
            torch.testing.assert_close(one(batches[0]).clone(), expected, rtol=close, atol=close)
            assert name == "eager" or one.decide(batches[0]).path == name

    def waiting(one: Callable[[Any], object]) -> Callable[[Any], None]:
        def step_and_wait(batch: Any) -> None:
            one(batch)
            backend.synchronize()

        return step_and_wait

    title = f"{shape.name}, {dtype}, {len(lengths)} requests, {total} tokens: a prefill step"
    race(title, {name: waiting(one) for name, one in runners.items()}, batches, backend, **how)


class Rows(Inputs):
    """One value a token."""

    values: torch.Tensor = copied(TOKENS, 64, dtype=torch.float32, pad=0.0)


class Chain(nn.Module):
    """As many small kernels as breaks, one before each. between: what is called there."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.between = between

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Count up."""
        for _ in range(BREAKS):
            answer = self.between(values := values + 1)
            values = values if answer is None else answer
        return values


def on_values(chain: Chain, view: Any) -> Any:
    """A step that is nothing but its stack."""
    return chain(view.values)


def nothing(values: torch.Tensor) -> torch.Tensor | None:
    """Written in place, or not at all: there is nothing to move."""
    del values
    return None


def same(values: torch.Tensor) -> torch.Tensor | None:
    """An answer, which is moved to where the next graph reads it."""
    return values


def race_breaks(backend: Backend, **how: Any) -> None:
    """A step in one graph, and the same in as many as there are breaks, whose answers are to be moved or not."""
    batches = [{"values": torch.randn(16, 64, device=backend.device)} for _ in range(SETS)]
    told: dict[str, Any] = {"buckets": [16], "output_rows": TOKENS, "backend": backend, "progress": False}
    runners = {}
    ways = {"no break": nothing, "silent": graph_break(nothing), "answering": graph_break(same)}
    for name, between in ways.items():
        chain = Chain(between)
        runners[name] = BreakableRunner(Rows, functools.partial(on_values, chain), stack=chain, **told)
        runners[name].capture()
        torch.testing.assert_close(runners[name](batches[0]).clone(), batches[0]["values"] + BREAKS)
    race(f"{BREAKS} small kernels, with no break and with one after each", runners, batches, backend, **how)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("tokens", [128, 512, 2048, 8192])
def test_prefill_by_path(tokens: int, cuda: CudaBackend) -> None:
    """A 24-layer model in bfloat16, eight requests."""
    race_paths(HALF, cuda, torch.bfloat16, [tokens // 8] * 8, 0.1, rounds=11, steps=20)


@pytest.mark.cuda
@pytest.mark.slow
def test_cost_of_a_segment(cuda: CudaBackend) -> None:
    """What each break adds on the host is one launch, and the call of a function that does nothing."""
    race_breaks(cuda, rounds=21, steps=50)


def test_tiny_prefill_on_a_cpu() -> None:
    """The same on a CPU, where the figures mean nothing: what is measured is right."""
    backend = choose("cpu-capture")
    race_paths(TINY, backend, torch.float32, [8, 5, 3], 1e-4, rounds=2, steps=2)
    race_breaks(backend, rounds=2, steps=2)
