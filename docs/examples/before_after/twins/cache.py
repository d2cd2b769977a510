"""The paged KV cache: pages of a few tokens each, handed out by an allocator; page 0 is the dummy of padded rows."""

from collections.abc import Sequence
from typing import Final

import attrs
import torch

DUMMY_PAGE: Final = 0


class PageAllocator:
    """Hands out pages 1 to `pages` - 1; the one freed last goes first, so that a stale place is soon a wrong one."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, DUMMY_PAGE, -1))

    @property
    def free(self) -> int:
        """Pages that can be had now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """That many pages; IndexError where fewer are free."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages that no sequence reads any more."""
        self._free.extend(reversed(pages))


@attrs.frozen(eq=False)
class PagedCache:
    """Keys and values of all layers, [2, layers, pages * page size, KV heads, head size]: a row is a token's place."""

    rows: torch.Tensor
    page_size: int

    @property
    def pages(self) -> int:
        """How many pages there are, the dummy among them."""
        return self.rows.shape[2] // self.page_size

    def write(self, layer: int, slot_mapping: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put this step's keys and values, [tokens, KV heads, head size], where each token's place is."""
        self.rows[0, layer][slot_mapping] = keys
        self.rows[1, layer][slot_mapping] = values

    def read(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the pages that each sequence owns, [sequences, KV heads, pages * page size, head size]."""
        offsets = torch.arange(self.page_size, device=block_tables.device)
        places = (block_tables[:, :, None] * self.page_size + offsets).flatten(1)
        return self.rows[0, layer][places].transpose(1, 2), self.rows[1, layer][places].transpose(1, 2)

    def live(self) -> torch.Tensor:
        """All pages but the dummy, which padded rows fill with whatever they hold."""
        return self.rows[:, :, (DUMMY_PAGE + 1) * self.page_size :]
