"""An engine's own declaration: a decode step over a paged cache, with adapters for some batches."""

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, Axis, Inputs, Step, computed, copied
from slotgraph.extend import side

PAGES = Axis("PAGES")
MAX_LEN = 512


def live_requests(step: Step) -> int:
    """What a kernel is told, that it may leave padded rows alone."""
    return step.live(BATCH)


def key_ends(seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's keys end, one after another."""
    return seq_lens.cumsum(0, dtype=torch.int64)


class DecodeInputs(Inputs):
    """What one decode step reads; a request has as many pages as its length says, of one location each."""

    input_ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=MAX_LEN - 1)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, limit=MAX_LEN)
    out_cache_loc: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0, source="tables.blocks")
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1.0)
    adapters: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, source=side("lora.ids"), default=None)
    num_requests: torch.Tensor = computed(live_requests, shape=1, dtype=torch.int32)
    key_ends: torch.Tensor = computed(key_ends, shape=BATCH, dtype=torch.int64)
