"""A small model with attention over requests of different lengths, for the runners that capture a part of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from slotgraph import BATCH, CACHE_LOC, TOKENS, Inputs, Step, computed, copied, current_view, graph_break

VOCAB, HIDDEN, LAYERS, ROOM = 50, 16, 3, 256


def starts(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's tokens begin."""
    ends: torch.Tensor = extend_seq_lens.cumsum(0, dtype=torch.int32)
    return ends - extend_seq_lens


class Prefill(Inputs):
    """Tokens of several requests behind one another."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    extend_start_loc: torch.Tensor = computed(starts, shape=BATCH, dtype=torch.int32)
    scale: Any

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request that owns all tokens."""
        return {"extend_seq_lens": [step.live(TOKENS)], "scale": 1.0}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Causal attention within each request, on the host's own count of them; padded rows get zeros."""
    out = torch.zeros_like(value)
    lengths, begins = view.extend_seq_lens.tolist(), view.extend_start_loc.tolist()
    for begin, length in zip(begins, lengths, strict=True):
        rows = slice(begin, begin + length)
        scores = (query[rows] @ key[rows].T) * float(view.scale)
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        out[rows] = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ value[rows]
    return out


@graph_break
def broken_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, view: Prefill) -> torch.Tensor:
    """Between graphs, with the view as an argument."""
    return attend(query, key, value, view)


@torch.library.custom_op("slotgraph_tests::attention", mutates_args=())
def named_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An operator of its own, which asks for the view."""
    return attend(query, key, value, current_view(Prefill))


@named_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    del query, key
    return torch.empty_like(value)


class Layer(nn.Module):
    """Attention, whose keys go into a cache, and a dense layer."""

    cache: torch.Tensor

    def __init__(self, generator: torch.Generator, *, named: bool) -> None:
        super().__init__()
        self.named = named
        self.mix = nn.Parameter(torch.randn(HIDDEN, 3 * HIDDEN, generator=generator) / 4)
        self.dense = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 4)
        self.register_buffer("cache", torch.zeros(ROOM, HIDDEN))

    def forward(self, hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        """One layer."""
        query, key, value = (hidden @ self.mix).chunk(3, dim=-1)
        self.cache[view.out_cache_loc] = key
        attention = named_attention(query, key, value) if self.named else broken_attention(query, key, value, view)
        hidden = hidden + attention
        return hidden + torch.tanh(hidden @ self.dense)


class Layers(nn.Module):
    """The inner layers."""

    def __init__(self, generator: torch.Generator, *, named: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(generator, named=named) for _ in range(LAYERS)])

    def forward(self, hidden: torch.Tensor, view: Prefill) -> torch.Tensor:
        """All of them."""
        for layer in self.layers:
            hidden = layer(hidden, view)
        return hidden


class Model(nn.Module):
    """Embeddings, inner layers, and a head over the last token of each request."""

    def __init__(self, seed: int = 0, *, named: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.rope = nn.Parameter(torch.randn(ROOM, HIDDEN, generator=generator) / 4)
        self.inner = Layers(generator, named=named)
        self.head = nn.Parameter(torch.randn(HIDDEN, VOCAB, generator=generator))

    def hidden(self, view: Prefill) -> torch.Tensor:
        """What the inner layers make of each token."""
        out: torch.Tensor = self.inner(self.embed[view.input_ids] + self.rope[view.positions], view)
        return out

    def forward(self, view: Prefill) -> torch.Tensor:
        """Logits of each request's next token."""
        last = (view.extend_start_loc + view.extend_seq_lens - 1).long()
        return self.hidden(view)[last] @ self.head


def batch_of(lengths: list[int], seed: int, device: torch.device | str = "cpu", scale: float = 0.3) -> dict[str, Any]:
    """Requests of given lengths, with random tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    return {
        "input_ids": torch.randint(0, VOCAB, (total,), generator=generator).to(device),
        "positions": torch.tensor([place for length in lengths for place in range(length)], dtype=torch.int64).to(device),
        "out_cache_loc": (1 + torch.randperm(ROOM - 1, generator=generator)[:total]).to(device),
        "extend_seq_lens": torch.tensor(lengths, dtype=torch.int32).to(device),
        "scale": scale,
    }
