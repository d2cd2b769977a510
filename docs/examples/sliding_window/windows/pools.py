"""The two KV pools: one for layers that see all, and a smaller one, of pages in a ring, for layers with a window."""

import math
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from transformers import PreTrainedModel

from serving.attention import PagedCache
from windows.model import SLIDING

PAGE: Final = 4
"""Tokens in a page, of either pool."""


def ring_pages(window: int) -> int:
    """Pages that hold a window wherever it begins: the newest page may have one token only."""
    return math.ceil((window - 1) / PAGE) + 1


@attrs.define(eq=False)
class WindowPool:
    """Keys and values of the layers with a window, in places of their own.

    table: the place of each location of the other pool, int32; 0, nobody's, for tokens that are out of the window.
    places: this step's, while its code runs; with them, no layer looks its places up. translations: how often one did.
    """

    cache: PagedCache
    table: torch.Tensor
    places: torch.Tensor | None = None
    translations: int = 0

    def place(self, locations: Sequence[int], places: Sequence[int]) -> None:
        """Remember where tokens are that have these locations in the other pool."""
        device = self.table.device
        at = torch.tensor(locations, dtype=torch.int64, device=device)
        self.table[at] = torch.tensor(places, dtype=torch.int32, device=device)

    def write(self, layer: int, locations: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store one row a token: by the step's places, else by a look-up of the locations."""
        places = self.places
        if places is None:
            self.translations += 1
            places = self.table[locations]
        self.cache.write(layer, places, keys, values)


@attrs.frozen(eq=False)
class Pools:
    """Both pools. layers: for each layer of the model, whether it has a window, and its number in its pool."""

    full: PagedCache
    window: WindowPool
    layers: tuple[tuple[bool, int], ...]

    @classmethod
    def empty(cls, model: PreTrainedModel, pages: int, rings: int) -> "Pools":
        """Pools of zeros: `pages` for all tokens, and so many requests' rings; page 0 of both is nobody's."""
        kinds = [kind == SLIDING for kind in model.config.layer_types]
        layers = tuple((sliding, kinds[:index].count(sliding)) for index, sliding in enumerate(kinds))
        full = _cache(model, kinds.count(False), pages)
        window = _cache(model, kinds.count(True), 1 + rings * ring_pages(model.config.sliding_window))
        table = torch.zeros(pages * PAGE, dtype=torch.int32, device=model.device)
        return cls(full, WindowPool(window, table), layers)


def _cache(model: PreTrainedModel, layers: int, pages: int) -> PagedCache:
    config = model.config
    shape = (layers, pages, PAGE, config.num_key_value_heads, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    return PagedCache(keys, values)
