"""A Llama's prefill step by each path: eagerly, breakable, and piecewise, over the same requests."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

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
from slotgraph.backends import Backend
from tests.benchmarks.llama import Shape

ATTENTION = "slotgraph-bench-prefill"
ROOM = 8192


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


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, view: PrefillInputs) -> Any:
    """Causal attention within each request, [tokens, heads, head size]; padded rows hold anything."""
    if query.is_cuda:
        longest = max(view.lengths, default=1)
        flash: Any = torch.ops.aten._flash_attention_forward
        ends = view.starts
        dropout, causal, debug = 0.0, True, False
        return flash(query, key, value, ends, ends, longest, longest, dropout, causal, debug, scale=scale)[0]
    out, begin = torch.zeros_like(query), 0
    for length in view.lengths:
        q, k, v = (one[begin : begin + length].transpose(0, 1)[None] for one in (query, key, value))
        one = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        out[begin : begin + length] = one[0].transpose(0, 1)
        begin += length
    return out


@graph_break
def broken(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Between graphs, by a mark in the code."""
    out: torch.Tensor = attend(query, key, value, scale, current_view(PrefillInputs))
    return out


@torch.library.custom_op("slotgraph_bench::attention", mutates_args=())
def named(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Between graphs, by its name."""
    out: torch.Tensor = attend(query, key, value, scale, current_view(PrefillInputs))
    return out


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


@attrs.frozen(eq=False)
class Prefill:
    """A model, and the step that runs it."""

    model: Any

    @classmethod
    def of(cls, shape: Shape, device: torch.device, dtype: torch.dtype) -> "Prefill":
        """Random weights."""
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=ROOM,
            tie_word_embeddings=True,
        )
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
        model.to(dtype=dtype).eval()
        AttentionInterface.register(ATTENTION, of_transformers)
        model.set_attn_implementation(ATTENTION)
        return cls(model)

    def step(self, view: PrefillInputs) -> torch.Tensor:
        """Logits of each request's next token."""
        out = self.model.model(input_ids=view.input_ids[None], position_ids=view.positions[None], use_cache=False)
        logits: torch.Tensor = self.model.lm_head(out.last_hidden_state[0][view.last_rows])
        return logits

    @contextlib.contextmanager
    def marked(self, split: str) -> Iterator[None]:
        """While its attention is told apart in one way or the other."""
        self.model.config.slotgraph_split = split
        yield

    def runners(self, backend: Backend, buckets: list[int], requests: int) -> dict[str, Any]:
        """A captured runner of each path; eager is first."""
        common: dict[str, Any] = {"backend": backend, "buckets": buckets, "max_batch": requests, "progress": False}
        stack = self.model.model
        eager = EagerRunner(PrefillInputs, self.step, backend=backend)
        breakable = BreakableRunner(PrefillInputs, self.step, stack=stack, **common)
        piecewise = PrefillRunner(
            PrefillInputs, self.step, stack=stack, splits=["slotgraph_bench::attention"], output_rows=BATCH, **common
        )
        with torch.no_grad():
            with self.marked("broken"):
                breakable.capture()
            with self.marked("named"):
                piecewise.capture()
        return {"eager": eager, "breakable": breakable, "piecewise": piecewise}


def batch_of(lengths: list[int], vocabulary: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Requests of given lengths with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    places = [place for length in lengths for place in range(length)]
    return {
        "input_ids": torch.randint(0, vocabulary, (total,), generator=generator).to(device),
        "positions": torch.tensor(places, dtype=torch.int64).to(device),
        "out_cache_loc": (1 + torch.randperm(ROOM, generator=generator)[:total]).to(device),
        "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32).to(device),
        "lengths": lengths,
    }
