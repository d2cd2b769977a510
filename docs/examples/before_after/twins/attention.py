"""Attention over the paged cache: of prompts behind one another, and of one token a sequence."""

import abc
from typing import final

import torch
from torch.nn.functional import scaled_dot_product_attention

from twins.cache import PagedCache


class StepAttention(abc.ABC):
    """Attention of one step, for all layers. slot_mapping: the place of each token in the cache, [tokens] int64."""

    def __init__(self, cache: PagedCache, slot_mapping: torch.Tensor) -> None:
        self._cache = cache
        self._slot_mapping = slot_mapping

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Store keys and values, then attend; all are [tokens, heads, head size]."""
        self._cache.write(layer, self._slot_mapping, key, value)
        return self.attend(layer, query, key, value)

    @abc.abstractmethod
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """What each token makes of what it may see."""


@final
class PrefillAttention(StepAttention):
    """All prompts lie behind one another; a token sees those of its own sequence up to itself.

    sequence_rows: which sequence each token belongs to, [tokens] int64.
    """

    def __init__(
        self, cache: PagedCache, slot_mapping: torch.Tensor, positions: torch.Tensor, sequence_rows: torch.Tensor
    ) -> None:
        super().__init__(cache, slot_mapping)
        self._mask = (sequence_rows[:, None] == sequence_rows) & (positions[:, None] >= positions)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend within this step: nothing of these sequences was in the cache before."""
        del layer
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, attn_mask=self._mask, enable_gqa=True)
        return out[0].transpose(0, 1)


@final
class DecodeAttention(StepAttention):
    """Each row is a sequence's newest token, and sees all that its block table points to, up to its length."""

    def __init__(
        self, cache: PagedCache, slot_mapping: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> None:
        super().__init__(cache, slot_mapping)
        self._block_tables = block_tables
        places = torch.arange(block_tables.shape[1] * cache.page_size, device=context_lens.device)
        # A row that may see nothing turns nan, and would hand it on to live rows through page 0: hence at least 1.
        self._mask = (places < context_lens.clamp(min=1)[:, None])[:, None, None, :]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Gather the pages and attend: shapes depend on the bucket alone, and nothing is read by the host."""
        del key, value
        keys, values = self._cache.read(layer, self._block_tables)
        out = scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=self._mask, enable_gqa=True)
        return out[:, :, 0]
