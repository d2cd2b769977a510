"""Attention over cached rows and a tree beside them, plugged into transformers through its attention interface."""

from typing import Any, Final

import attrs
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from serving.attention import PagedCache

NAME: Final = "slotgraph-tree"


@attrs.frozen(kw_only=True, eq=False)
class Sight:
    """What the tokens of one step see; each request has as many tokens.

    prefix [requests, places]: rows of the cache in the order of positions, of which the first `lengths` [requests] are
    seen. beside [requests, n]: further rows, seen as the mask [requests or 1, tokens each, n] says.
    """

    prefix: torch.Tensor
    lengths: torch.Tensor
    beside: torch.Tensor
    mask: torch.Tensor


class TreeAttention:
    """Attention of one step, for all layers: stores the step's keys and values in rows [tokens], then attends."""

    def __init__(self, cache: PagedCache, rows: torch.Tensor, sight: Sight) -> None:
        self._cache = cache
        self._own = rows
        requests, width = sight.prefix.shape[0], sight.mask.shape[1]
        places = torch.arange(sight.prefix.shape[1], device=rows.device)
        prefix = (places < sight.lengths[:, None])[:, None].expand(-1, width, -1)
        self._mask = torch.cat([prefix, sight.mask.expand(requests, -1, -1)], dim=2)[:, None]
        self._rows = torch.cat([sight.prefix, sight.beside], dim=1)
        self._each = (requests, width)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[tokens, heads, head size] in and out; shapes depend on the bucket alone, and the host reads nothing."""
        self._cache.write(layer, self._own, key, value)
        keys, values = self._cache.read(layer, self._rows)
        query = query.unflatten(0, self._each).transpose(1, 2)
        out = scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: None,
    *,
    step_attention: TreeAttention,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: [1, heads, tokens, head size] in, [1, tokens, heads, head size] out."""
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return step_attention(layer, *rows, scale=scaling)[None], None


def attend_to_trees(model: PreTrainedModel) -> None:
    """From now on the model attends through `tree_attention`."""
    AttentionInterface.register(NAME, tree_attention)
    model.set_attn_implementation(NAME)
