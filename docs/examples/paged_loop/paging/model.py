"""The model over a paged cache: one decode step, and one prefill step with attention over shared pages."""

from typing import Any, TypeAlias

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from paging.inputs import DecodeInputs, PrefillInputs
from paging.request import PAGE, pages_for
from serving.attention import (
    DECODE,
    NAME,
    TRITON,
    DecodeAttention,
    PagedCache,
    Rows,
    attend_pages,
    best_attention,
    paged_attention,
)
from slotgraph import graph_break


@graph_break
def attend(
    query: torch.Tensor, layer: int, scale: float, cache: PagedCache, view: PrefillInputs, name: str
) -> torch.Tensor:
    """Let each new token see its request's pages up to itself, shared ones among them. Runs between the graphs."""
    out = torch.zeros_like(query)
    if name == TRITON:  # a row of the kernel is a token here, and one call is enough
        live = slice(sum(view.new_tokens))
        pages, lengths = view.page_table[view.requests[live]], view.positions[live] + 1
        out[live] = attend_pages(query[live], cache.keys[layer], cache.values[layer], pages, lengths, scale)
        return out
    begin = 0
    for row, (count, length) in enumerate(zip(view.new_tokens, view.lengths, strict=True)):
        mine = slice(begin, begin + count)
        pages = cache.read(layer, view.page_table[row, None, : pages_for(length)])
        keys, values = (part[:, :, :length] for part in pages)
        seen = torch.ones(count, keys.shape[2], dtype=torch.bool, device=query.device).tril(length - count)
        found = scaled_dot_product_attention(
            query[mine].transpose(0, 1)[None], keys, values, attn_mask=seen, scale=scale, enable_gqa=True
        )
        out[mine] = found[0].transpose(0, 1)
        begin += count
    return out


class PrefillAttention:
    """Stores the new keys and values in the graph, and attends after it: so a page may be shared within one step."""

    def __init__(self, cache: PagedCache, name: str) -> None:
        self._cache, self._name = cache, name

    def __call__(self, layer: int, rows: Rows, scale: float, view: PrefillInputs) -> torch.Tensor:
        """Attend in one layer, [tokens, heads, head size]."""
        self._cache.write(layer, view.out_cache_loc, rows.key, rows.value)
        return attend(rows.query, layer, scale, self._cache, view, self._name)


Attention: TypeAlias = DecodeAttention | PrefillAttention


class PagedModel:
    """A model of transformers, which attends over a paged cache from here on.

    Attributes:
        attention: The name of its attention: the demo's kernel on CUDA, else torch's own.
    """

    def __init__(self, model: PreTrainedModel, pages: int, attention: str = "auto") -> None:
        AttentionInterface.register(NAME, paged_attention)
        model.set_attn_implementation(NAME)
        self.model, self.cache = model, PagedCache.empty(model, pages, PAGE)
        self.attention = best_attention(attention, model.device)
        self._prefill = PrefillAttention(self.cache, self.attention)  # one for all steps: graphs take it as an argument

    def decode(self, view: DecodeInputs) -> torch.Tensor:
        """Return the next token of each request."""
        return view.next_ids.copy_(self._choose(self._hidden(view, DECODE[self.attention](self.cache, view))))

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
