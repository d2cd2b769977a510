"""A language model of a few lines, with a paged cache: what an engine's decode step runs."""

import torch
from torch import nn
from torch.nn import functional

from slotgraph import BATCH, Axis, Inputs, copied

PAGES = Axis("PAGES")
PAGE = 4
"""Tokens of a page."""
UNUSED = 0
"""The page that padded rows write."""


class DecodeInputs(Inputs):
    """One token a request, its position, and the pages that the request has."""

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=UNUSED * PAGE)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=UNUSED)


class Model(nn.Module):
    """One layer of attention over a paged cache; greedy, so that tokens can be compared."""

    def __init__(self, vocabulary: int, hidden: int, pages: int, device: torch.device) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device)

        self.embed, self.out, self.head = (
            weights(vocabulary, hidden),
            weights(hidden, hidden),
            weights(hidden, vocabulary),
        )
        self.query = weights(hidden, hidden) * 0.02  # so that each token depends on many before it
        self.keys = torch.zeros(pages * PAGE, hidden, dtype=torch.float64, device=device)

    def forward(self, view: DecodeInputs) -> torch.Tensor:
        """The next token of each row."""
        hidden = self.embed[view.input_ids]
        self.keys[view.out_cache_loc] = hidden
        places = (view.block_tables.long()[:, :, None] * PAGE + torch.arange(PAGE, device=hidden.device)).flatten(1)
        scores = torch.einsum("bh,bph->bp", hidden @ self.query, self.keys[places])
        beyond = torch.arange(places.shape[1], device=hidden.device) > view.positions[:, None]
        mixed = torch.einsum("bp,bph->bh", functional.softmax(scores.masked_fill(beyond, -1e9), -1), self.keys[places])
        return ((hidden + 9 * mixed @ self.out) @ self.head).argmax(-1)
