"""Keys and values of one model, a row a token, and who owns which row; rows 0 and 1 are nobody's."""

from collections.abc import Sequence
from typing import Final

import attrs
import torch
from transformers import PreTrainedModel

NOBODYS: Final = 2
"""Row 0 is written by padded rows, row 1 by draft-extend while it is captured."""


class RowAllocator:
    """Hands out `rows` rows; the one freed last goes first, so that a stale location is soon a wrong one."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(NOBODYS + rows - 1, NOBODYS - 1, -1))

    @property
    def free(self) -> int:
        """Rows that can be had now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many rows; RuntimeError where fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} rows wanted, {self.free} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, rows: Sequence[int]) -> None:
        """Return rows that no request reads any more."""
        self._free.extend(reversed(rows))


@attrs.frozen(eq=False)
class KeysAndValues:
    """Keys and values of all layers, [layers, rows, KV heads, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, model: PreTrainedModel, rows: int) -> "KeysAndValues":
        """Zeros for a model, for `rows` rows and nobody's: what is masked out must still be finite."""
        config = model.config
        head_dim = config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, NOBODYS + rows, config.num_key_value_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        return cls(keys, values)

    def write(self, layer: int, rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put a token's keys and values, [tokens, KV heads, head size], into each row."""
        self.keys[layer][rows] = keys
        self.values[layer][rows] = values

    def read(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows [requests, n], as [requests, KV heads, n, head size]."""
        return self.keys[layer][rows].transpose(1, 2), self.values[layer][rows].transpose(1, 2)
