"""Attention over both pools, plugged into transformers through its attention interface."""

import abc
import contextlib
from collections.abc import Iterator
from typing import Any, Final, final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from serving.attention import Rows
from windows.inputs import DecodeInputs, PromptInputs
from windows.pools import PAGE, Pools

NAME: Final = "slotgraph-windows"


class StepAttention(abc.ABC):
    """Attention of one step, for all layers: what is the same in each is made once, when the step begins."""

    def __init__(self, pools: Pools, out_cache_loc: torch.Tensor) -> None:
        self.pools = pools
        self._locations = out_cache_loc

    def __call__(self, layer: int, rows: Rows, scale: float) -> torch.Tensor:
        """Store this step's keys and values in the layer's pool, then attend: [tokens, heads, head size]."""
        sliding, number = self.pools.layers[layer]
        pool = self.pools.window if sliding else self.pools.full
        pool.write(number, self._locations, rows.key, rows.value)
        return self.attend(number, rows, scale, sliding=sliding)

    @abc.abstractmethod
    def attend(self, number: int, rows: Rows, scale: float, *, sliding: bool) -> torch.Tensor:
        """What each token makes of what it may see. number: the layer's in its pool."""


@final
class DecodeAttention(StepAttention):
    """Each row is a request's newest token, and sees what its pages hold, up to its length or within its window."""

    def __init__(self, pools: Pools, view: DecodeInputs, window: int) -> None:
        super().__init__(pools, view.out_cache_loc)
        device, positions = view.seq_lens.device, view.positions[:, None]
        self._tables = {False: view.block_tables, True: view.ring_tables}
        places = torch.arange(view.block_tables.shape[1] * PAGE, device=device)
        ring = view.ring_tables.shape[1] * PAGE
        age = (positions - torch.arange(ring, device=device)) % ring  # of what lies in each place of a ring
        seen = {False: places < view.seq_lens.clamp(min=1)[:, None], True: (age < window) & (age <= positions)}
        self._masks = {sliding: mask[:, None, None, :] for sliding, mask in seen.items()}

    def attend(self, number: int, rows: Rows, scale: float, *, sliding: bool) -> torch.Tensor:
        """Gather the layer's pages and attend: shapes depend on the bucket alone, and nothing is read by the host."""
        cache = self.pools.window.cache if sliding else self.pools.full
        keys, values = cache.read(number, self._tables[sliding])
        query, mask = rows.query[:, :, None], self._masks[sliding]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[:, :, 0]


@final
class PromptAttention(StepAttention):
    """All prompts lie behind one another; a token sees those of its own request up to itself, or its window of them."""

    def __init__(self, pools: Pools, view: PromptInputs, window: int) -> None:
        super().__init__(pools, view.out_cache_loc)
        behind = view.positions[:, None] - view.positions
        causal = (view.request_rows[:, None] == view.request_rows) & (behind >= 0)
        self._masks = {False: causal, True: causal & (behind < window)}

    def attend(self, number: int, rows: Rows, scale: float, *, sliding: bool) -> torch.Tensor:
        """Attend within this step: nothing of these requests was in the pools before."""
        del number
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (rows.query, rows.key, rows.value))
        mask = self._masks[sliding]
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def windowed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    step_attention: StepAttention,
    scaling: float,
    **_settings: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out."""
    rows = Rows(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
    layer: Any = module.layer_idx
    return step_attention(layer, rows, scaling)[None], None


@contextlib.contextmanager
def windowed(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model attends through `windowed_attention`; afterwards as before."""
    own: Any = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    AttentionInterface.register(NAME, windowed_attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)
