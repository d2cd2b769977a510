"""What a step reads: a few lists from the scheduler, and what the device makes of them."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import torch

from slotgraph import BATCH, TOKENS, Axis, Inputs, computed, copied, staged
from slotgraph.extend import Group

KEYS = Axis("KEYS")  # keys that a step attends to, those of all requests behind one another
PAGES = Axis("PAGES", fixed=True)  # the most pages that a request may have
OUTPUTS = Axis("OUTPUTS", fixed=True)  # what a step writes for each request: its token, and its logprob if asked for
REQUESTS = Axis("REQUESTS", fixed=True)  # the most requests of a step, and one row more


@attrs.frozen
class Layers:
    """The layers of one kind, which share page tables.

    Attributes:
        page: Tokens in a page.
        stride: How far a page's first token lies from that of the page before it, in the cache.
        trash: Where padded rows write.
        fresh: What the read index holds for a key of this very step, for layers with a window.
        window: How many tokens a token attends to, or 0 for all.
    """

    page: int
    stride: int
    trash: int
    fresh: int
    window: int = 0

    def cached(self, past: Any) -> Any:
        """Return how many keys of earlier steps each request attends to, of an array."""
        return np.minimum(past, self.window - 1) if self.window else past

    def cached_keys(self, past_lens: torch.Tensor) -> torch.Tensor:
        """Return the same on the device."""
        return past_lens.clamp(max=self.window - 1) if self.window else past_lens

    def places(self, pages: torch.Tensor, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return where tokens at these positions lie in the cache. A window's pages are a ring."""
        position = position % self.window if self.window else position
        page = pages[request, (position // self.page).clamp(0, pages.shape[1] - 1)]
        return page.long() * self.stride + position % self.page


def inputs_for(kinds: Mapping[str, Layers], dtype: torch.dtype) -> type[Inputs]:
    """Return the declaration for a model with layers of these kinds, whose masks have this dtype."""
    group = Group(*kinds)

    def each(make: Callable[[Layers], Callable[..., torch.Tensor]]) -> Mapping[str, Callable[..., torch.Tensor]]:
        return {kind: make(layers) for kind, layers in kinds.items()}

    class BatchingInputs(Inputs):
        """Tokens and lengths of requests, and the pages of each.

        Attributes:
            carried_from: The row of the last step whose token comes here, or -1 if the host knows the token.
            token_request: The request of each token.
            key_request: The request of each key, by kind of layers.
            output_ids: What steps chose. It is kept, so that the next step can take tokens from it.
        """

        host_ids: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0)
        carried_from: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=-1)
        token_request: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=-1)
        past_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
        query_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, poison=())  # its sum is an index
        key_request: Mapping[str, torch.Tensor] = copied(KEYS, dtype=torch.int32, pad=-1, group=group)
        pages: Mapping[str, torch.Tensor] = copied(BATCH, PAGES, dtype=torch.int32, pad=0, ragged=True, group=group)
        output_ids: torch.Tensor = staged(OUTPUTS, REQUESTS, dtype=torch.int32, starts=0)
        input_ids: torch.Tensor = computed(carry, shape=TOKENS, dtype=torch.int32)
        position_ids: torch.Tensor = computed(position_ids_of, shape=TOKENS, dtype=torch.int32)
        logits_indices: torch.Tensor = computed(last_tokens, shape=BATCH, dtype=torch.int64)
        write_index: Mapping[str, torch.Tensor] = computed(
            each(write_index), shape=TOKENS, dtype=torch.int64, group=group
        )
        read_index: Mapping[str, torch.Tensor] = computed(each(read_index), shape=KEYS, dtype=torch.int64, group=group)
        attention_mask: Mapping[str, torch.Tensor] = computed(
            each(lambda layers: attention_mask(layers, dtype)), shape=(TOKENS, KEYS), dtype=dtype, group=group
        )

    return BatchingInputs


def starts(lens: torch.Tensor) -> torch.Tensor:
    """Return where each request begins among all."""
    return lens.cumsum(0) - lens


def carry(host_ids: torch.Tensor, carried_from: torch.Tensor, output_ids: torch.Tensor) -> torch.Tensor:
    """Take the token that the last step chose, where the host has not read it yet."""
    return torch.where(carried_from < 0, host_ids, output_ids[0, carried_from.clamp(min=0)])


def position_ids_of(token_request: torch.Tensor, past_lens: torch.Tensor, query_lens: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its request."""
    offset = (past_lens - starts(query_lens))[token_request.clamp(min=0)]
    places = torch.arange(len(token_request), device=offset.device) + offset
    return torch.where(token_request < 0, 0, places).to(torch.int32)


def last_tokens(query_lens: torch.Tensor) -> torch.Tensor:
    """Return where the last token of each request lies, whose logits choose the next one."""
    return (query_lens.cumsum(0) - 1).clamp(min=0)


def write_index(layers: Layers) -> Callable[..., torch.Tensor]:
    """Return the function that says where each token's key and value go."""

    def write(
        token_request: torch.Tensor,
        position_ids: torch.Tensor,
        past_lens: torch.Tensor,
        query_lens: torch.Tensor,
        pages: torch.Tensor,
    ) -> torch.Tensor:
        request = token_request.clamp(min=0)
        is_kept = token_request >= 0
        if layers.window:  # of more new tokens than the window holds, only the last are kept
            is_kept &= position_ids >= (past_lens + query_lens - layers.window)[request]
        return torch.where(is_kept, layers.places(pages, request, position_ids), layers.trash)

    return write


def read_index(layers: Layers) -> Callable[..., torch.Tensor]:
    """Return the function that says where each key lies."""

    def read(
        key_request: torch.Tensor, past_lens: torch.Tensor, query_lens: torch.Tensor, pages: torch.Tensor
    ) -> torch.Tensor:
        request, cached = key_request.clamp(min=0), layers.cached_keys(past_lens)
        place = torch.arange(len(key_request), device=pages.device) - starts(cached + query_lens)[request]
        found = layers.places(pages, request, place + (past_lens - cached)[request])
        if layers.window:  # keys of this step are not in the cache when it is read
            found = torch.where(place >= cached[request], layers.fresh, found)
        return torch.where(key_request < 0, 0, found)

    return read


def attention_mask(layers: Layers, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Return the function that makes the mask of all tokens and keys, to be added to scores."""

    def mask(
        token_request: torch.Tensor,
        key_request: torch.Tensor,
        position_ids: torch.Tensor,
        past_lens: torch.Tensor,
        query_lens: torch.Tensor,
    ) -> torch.Tensor:
        cached = layers.cached_keys(past_lens)
        offset = (past_lens - cached - starts(cached + query_lens))[key_request.clamp(min=0)]
        position = torch.arange(len(key_request), device=offset.device) + offset
        is_seen = (token_request[:, None] == key_request) & (position <= position_ids[:, None])
        if layers.window:
            is_seen &= position > position_ids[:, None] - layers.window
        return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)

    return mask
