"""What the two kinds of steps read: the declarations that the runners turn into buffers, fills, tails and views."""

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, Step, computed, copied

PAGES = Axis("PAGES")


def live_tokens(step: Step) -> int:
    """How many rows of this step are no padding."""
    return step.live(TOKENS)


class TokenInputs(Inputs):
    """What every step reads of each token; padded rows write their keys and values to the dummy page."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)


class DecodeInputs(TokenInputs):
    """What one decode step reads: a token a request, and where that request's keys and values are."""

    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    block_tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    num_token_non_padded: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)


class PrefillInputs(TokenInputs):
    """What one prefill step reads: the prompts of several requests behind one another."""

    request_rows: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)  # which request each token belongs to
    last_rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)  # where each request's last token lies
