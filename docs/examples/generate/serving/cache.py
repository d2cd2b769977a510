"""The paged KV cache: pages of a few tokens each, handed out by an allocator; page 0 is the dummy of padded rows."""

from collections.abc import Sequence

import attrs
import torch
from transformers import PreTrainedModel

DUMMY_PAGE = 0


class PageAllocator:
    """Hands out pages 1 to `pages` - 1; the one freed last goes first, so that a stale pointer is soon a wrong one."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, DUMMY_PAGE, -1))

    @property
    def free(self) -> int:
        """Pages that can be had now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many pages; RuntimeError where fewer are free."""
        if count > self.free:
            raise RuntimeError(f"{count} pages wanted, {self.free} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that no request reads any more."""
        self._free.extend(reversed(pages))


@attrs.frozen
class PagedCache:
    """Keys and values of all layers, [layers, pages, page size, KV heads, head size] each."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, model: PreTrainedModel, pages: int, page_size: int) -> "PagedCache":
        """A cache of zeros for a model: what is masked out must still be finite."""
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, pages, page_size, config.num_key_value_heads, head_dim)
        keys, values = (torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2))
        return cls(keys, values)

    @property
    def pages(self) -> int:
        """How many pages there are, the dummy among them."""
        return self.keys.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens in one page."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, locations: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one row a token, [tokens, KV heads, head size], at flat locations, page * page size + offset."""
        self.keys[layer].flatten(0, 1)[locations] = keys
        self.values[layer].flatten(0, 1)[locations] = values

    def read(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the pages that each request owns, [requests, KV heads, pages * page size, head size]."""
        keys, values = (pages[layer][block_tables].flatten(1, 2).transpose(1, 2) for pages in (self.keys, self.values))
        return keys, values
