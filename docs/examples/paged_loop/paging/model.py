"""The model over a paged cache: one decode step, and one prefill step with attention over shared pages."""

from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from paging.inputs import DecodeInputs, PrefillInputs
from paging.request import PAGE
from serving.attention import NAME, DecodeAttention, PagedCache, Rows, paged_attention
from slotgraph import graph_break


@graph_break
def attend(query: torch.Tensor, layer: int, scale: float, cache: PagedCache, view: PrefillInputs) -> torch.Tensor:
    """Let each new token see its request's pages up to itself, shared ones among them. Runs between the graphs."""
    out, begin = torch.zeros_like(query), 0
    for row, count in enumerate(view.new_tokens):
        mine = slice(begin, begin + count)
        keys, values = cache.read(layer, view.block_tables[row : row + 1])
        seen = torch.arange(keys.shape[2], device=query.device) <= view.positions[mine, None]
        found = scaled_dot_product_attention(
            query[mine].transpose(0, 1)[None], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[mine] = found[0].transpose(0, 1)
        begin += count
    return out


class PrefillAttention:
    """Stores the new keys and values in the graph, and attends after it: so a page may be shared within one step."""

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache

    def __call__(self, layer: int, rows: Rows, scale: float, view: PrefillInputs) -> torch.Tensor:
        """Attend in one layer, [tokens, heads, head size]."""
        self._cache.write(layer, view.out_cache_loc, rows.key, rows.value)
        return attend(rows.query, layer, scale, self._cache, view)


Attention: TypeAlias = DecodeAttention | PrefillAttention


class PagedModel:
    """A model of transformers, which attends over a paged cache from here on."""

    def __init__(self, model: PreTrainedModel, pages: int) -> None:
        AttentionInterface.register(NAME, paged_attention)
        model.set_attn_implementation(NAME)
        self.model, self.cache = model, PagedCache.empty(model, pages, PAGE)
        self._prefill = PrefillAttention(self.cache)  # one for all steps: graphs take it as an argument

    def decode(self, view: DecodeInputs) -> torch.Tensor:
        """Return the next token of each request."""
        return view.next_ids.copy_(self._choose(self._hidden(view, DecodeAttention(self.cache, view))))

    def prefill(self, view: PrefillInputs) -> torch.Tensor:
        """Return the token after each prompt."""
        return self._choose(self._hidden(view, self._prefill)[view.last_rows])

    def _hidden(self, view: Any, attention: Attention) -> torch.Tensor:
        output = self.model.base_model(
            input_ids=view.input_ids[None],
            position_ids=view.positions[None],
            use_cache=False,
            step_attention=attention,
            step_view=view,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Any = self.model.get_output_embeddings()
        tokens: torch.Tensor = head(hidden).argmax(-1)
        return tokens
