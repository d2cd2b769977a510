"""The model: a small seeded transformer in the manner of Qwen, which knows nothing of graphs."""

import math
from typing import Final

import torch
from torch import nn
from torch.nn.functional import silu

from twins.attention import StepAttention
from twins.cache import PagedCache

VOCABULARY: Final = 256
LAYERS: Final = 3
HIDDEN: Final = 64
HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_SIZE: Final = 16
LONGEST: Final = 256
"""Positions that the rope table has rows for."""


class Layer(nn.Module):
    """Attention and a gated feed-forward, each behind a norm."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_SIZE, bias=False)
        self.key_value = nn.Linear(HIDDEN, 2 * KV_HEADS * HEAD_SIZE, bias=False)
        self.out = nn.Linear(HEADS * HEAD_SIZE, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden: torch.Tensor, rope: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """[tokens, hidden] in and out."""
        normed = self.norms[0](hidden)
        query = rotated(self.query(normed).unflatten(1, (HEADS, HEAD_SIZE)), rope)
        key, value = self.key_value(normed).unflatten(1, (2 * KV_HEADS, HEAD_SIZE)).chunk(2, dim=1)
        hidden = hidden + self.out(attention(self.number, query, rotated(key, rope), value).flatten(1))
        gate, up = self.gate_up(self.norms[1](hidden)).chunk(2, dim=1)
        added: torch.Tensor = hidden + self.down(silu(gate) * up)
        return added


class Model(nn.Module):
    """Token ids and positions to logits; how tokens see one another is the step's attention's affair."""

    rope: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(number) for number in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        speeds = 1e4 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        angles = torch.arange(LONGEST)[:, None] * speeds
        self.register_buffer("rope", torch.stack((angles.cos(), angles.sin())))
        self._scale(torch.Generator().manual_seed(seed))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> torch.Tensor:
        """Hidden states, [tokens, hidden]."""
        rope = self.rope[:, positions, None]
        hidden: torch.Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, rope, attention)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocabulary]."""
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits

    def new_cache(self, pages: int, page_size: int) -> PagedCache:
        """An empty cache: zeros, since what is masked out must still be finite."""
        shape = (2, LAYERS, pages * page_size, KV_HEADS, HEAD_SIZE)
        return PagedCache(torch.zeros(shape, device=self.rope.device), page_size)

    @torch.no_grad()
    def _scale(self, generator: torch.Generator) -> None:
        """Weights so large that a token depends on all the text before it: else a text soon repeats itself."""
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                gain = {"embed": math.sqrt(HIDDEN), "head": 4.0}.get(name.split(".")[0], 1.8)
                weight.normal_(std=gain / math.sqrt(weight.shape[1]), generator=generator)


def rotated(rows: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves of a head against each other (Su and others, 2021)."""
    cos, sin = rope
    one, other = rows.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
