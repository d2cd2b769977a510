"""The pools: what each layer remembers of all requests, one row a request; row 0 is the dummy of padded rows."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import DynamicCache


@attrs.frozen(eq=False)
class Layer:
    """What one layer remembers of each row, None for what it has not: a hybrid's layers differ.

    conv: the newest inputs of the convolution, [rows, channels, kernel]. state: the recurrent state, [rows, ...].
    keys, values: of the attention, [rows, KV heads, positions, head size].
    """

    conv: torch.Tensor | None
    state: torch.Tensor | None
    keys: torch.Tensor | None
    values: torch.Tensor | None

    @classmethod
    def of(cls, layer: Any) -> "Layer":
        """What a layer of transformers' own cache holds."""
        conv, state = (getattr(layer, name, {}).get(0) for name in ("conv_states", "recurrent_states"))
        return cls(conv, state, getattr(layer, "keys", None), getattr(layer, "values", None))

    def empty(self, rows: int, context: int) -> "Layer":
        """A pool of zeros for what looks like this: what attention masks out must still be finite."""
        keys, values = (
            None if prompt is None else prompt.new_zeros(rows, prompt.shape[1], context, prompt.shape[3])
            for prompt in (self.keys, self.values)
        )
        conv, state = (None if one is None else one.new_zeros(rows, *one.shape[1:]) for one in (self.conv, self.state))
        return Layer(conv, state, keys, values)

    def store(self, rows: torch.Tensor, prompt: "Layer") -> None:
        """Put what was remembered of a prompt into its row, over whatever an earlier request left there."""
        for pool, one in ((self.conv, prompt.conv), (self.state, prompt.state)):
            if pool is not None and one is not None:
                pool[rows] = one
        for pool, one in ((self.keys, prompt.keys), (self.values, prompt.values)):
            if pool is not None and one is not None:
                pool[rows, :, : one.shape[2]] = one

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(pool.nbytes for pool in (self.conv, self.state, self.keys, self.values) if pool is not None)


@attrs.frozen(eq=False)
class Pools:
    """What a model remembers of every request, layer by layer. context: positions that a row has room for."""

    layers: Sequence[Layer]
    context: int

    @classmethod
    def like(cls, cache: DynamicCache, rows: int, context: int) -> "Pools":
        """Pools of zeros, in the shapes that transformers' own cache has after any prompt."""
        return cls([Layer.of(layer).empty(rows, context) for layer in cache.layers], context)

    def store(self, rows: torch.Tensor, cache: DynamicCache) -> None:
        """Put what transformers' own cache holds of one prompt into its row."""
        for pool, layer in zip(self.layers, cache.layers, strict=True):
            pool.store(rows, Layer.of(layer))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows of all layers."""
        return sum(layer.nbytes for layer in self.layers)
