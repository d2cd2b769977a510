"""Attention over the paged cache, plugged into transformers through its attention interface."""

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from serving.cache import PagedCache
from serving.inputs import DecodeInputs, PrefillInputs

NAME = "slotgraph-paged"
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")


class StepAttention(abc.ABC):
    """Attention of one step, for all layers: what is the same in each is made once, when the step begins."""

    def __init__(self, cache: PagedCache, locations: torch.Tensor) -> None:
        self._cache = cache
        self._locations = locations

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Store this step's keys and values, then attend; all are [tokens, heads, head size]."""
        self._cache.write(layer, self._locations, key, value)
        return self.attend(layer, query, key, value, scale)

    @abc.abstractmethod
    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """What each token makes of what it may see, [tokens, heads, head size]."""


@final
class DecodeAttention(StepAttention):
    """Each row is a request's newest token and sees all that its block table points to, up to its length."""

    def __init__(self, cache: PagedCache, view: DecodeInputs) -> None:
        super().__init__(cache, view.out_cache_loc)
        self._block_tables = view.block_tables
        slots = view.block_tables.shape[1] * cache.keys.shape[2]
        places = torch.arange(slots, device=view.seq_lens.device)
        lengths = view.seq_lens.clamp(min=1)  # a row that may see nothing turns nan, and page 0 hands it on to live rows
        self._mask = (places < lengths[:, None])[:, None, None, :]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Gather the pages and attend: shapes depend on the bucket alone, nothing is read by the host."""
        del key, value
        keys, values = self._cache.read(layer, self._block_tables)
        out = functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=self._mask, scale=scale, enable_gqa=True
        )
        return out[:, :, 0]


@final
class PrefillAttention(StepAttention):
    """All prompts lie behind one another; a token sees those before it of its own request."""

    def __init__(self, cache: PagedCache, view: PrefillInputs) -> None:
        super().__init__(cache, view.out_cache_loc)
        same_request = view.request_rows[:, None] == view.request_rows
        self._mask = same_request & (view.positions[:, None] >= view.positions)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Attend within this step: nothing of these requests is in the cache yet."""
        del layer
        heads_first = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        out = functional.scaled_dot_product_attention(*heads_first, attn_mask=self._mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    step_attention: StepAttention,
    scaling: float,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out.

    Raises NotImplementedError for a model whose attention does more than plain causal attention.
    """
    for name in UNSUPPORTED:
        if settings.get(name) is not None:
            message = f"this model's attention uses {name!r}, which this demo's paged attention does not do"
            raise NotImplementedError(message)
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return step_attention(module.layer_idx, *rows, scaling)[None], None


@contextlib.contextmanager
def paged(model: PreTrainedModel) -> Iterator[None]:
    """A model that calls this module's attention; on the way out it gets back its own."""
    own = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    AttentionInterface.register(NAME, paged_attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
