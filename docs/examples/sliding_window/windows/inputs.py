"""What the two kinds of steps read: the field's own declarations, and where each request's pages are."""

import torch

from slotgraph import BATCH, TOKENS, Axis, copied, standard

PAGES = Axis("PAGES")
RING = Axis("RING", fixed=True)  # pages of the window pool that each request owns


class DecodeInputs(
    standard.SlidingWindow,
    standard.DecodeInputs,
    drop=("req_pool_indices", "seq_lens_cpu", "capture_hidden_mode"),
):
    """What one decode step reads: a token a request, its places in both pools, and the pages to look back over."""

    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    ring_tables: torch.Tensor = copied(BATCH, RING, dtype=torch.int32, pad=0)


class PromptInputs(standard.SlidingWindow, standard.PrefillInputs):
    """What one prefill step reads: the prompts of several requests behind one another."""

    request_rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)  # which request each token belongs to
    last_rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)  # where each request's last token lies
