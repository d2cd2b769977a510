"""Declarations that the tests of slotgraph.testing share."""

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, Step, computed, copied, keep, output, staged
from slotgraph.extend import HOST, once, side

PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)


def live_tokens(step: Step) -> int:
    """What the host computes."""
    return step.live(TOKENS)


def ends(seq_lens: torch.Tensor) -> torch.Tensor:
    """What the device computes."""
    return seq_lens.cumsum(0, dtype=torch.int64)


class Mixed(Inputs):
    """Slots of every kind, nested and beside the batch, required and optional, of one and of two varying dims."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    locations: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, source="paging.tables")
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=1.5)
    temperatures: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=once(1.0))
    hidden: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=torch.float16, pad=keep("no one reads it"), source=side("proxy.hidden"), default=None
    )
    flags: torch.Tensor | None = copied(BATCH, dtype=torch.bool, pad=False, placement=HOST, default=None)
    count: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    ends: torch.Tensor = computed(ends, shape=BATCH, dtype=torch.int64)
    embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.float32, pad=0)
    logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
    mode: str = "decode"
