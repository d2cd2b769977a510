"""Draft-extend: the draft model reads what the target accepted, WIDTH tokens for each request."""

import torch

from ...dataflow.axes import BATCH, TOKENS, WIDTH
from ...dataflow.capabilities import CACHE_LOC
from ...dataflow.specifiers import computed, constant, copied, output
from ...dataflow.tails import keep
from .axes import FRONT, HIDDEN, VOCAB
from .counts import even_starts, last_accepted, last_correct
from .dtypes import MODEL_DTYPE
from .requests import Requests


class DraftExtendInputs(Requests):
    """What the draft model reads after a verification: WIDTH tokens a request, as many as were drafted.

    input_ids: a stale id is still a row of the embedding table, and nobody reads what comes of it.
    positions: a stale position indexes the rope table past its end.
    out_cache_loc: while a bucket is captured all rows write to location 1, in a step padded ones to 0, both kept free.
    hidden_states: the target's, one for each token; padded rows are executed, on zeros.
    extend_seq_lens: each request has WIDTH tokens, accepted or not.
    num_correct_drafts: WIDTH in padded rows, as if all of their drafts were right.
    num_accept_tokens: WIDTH in padded rows, whose select_index is then the last of their own rows.
    select_index: the row of each request's last accepted token; it hangs on WIDTH, so no two widths may share it.
    next_token_logits: one row a request, that of select_index.
    """

    input_ids: torch.Tensor = copied(
        TOKENS, dtype=torch.int64, pad=keep("any id will do, its row's result is dropped"), poison="stale"
    )
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, starts=1)
    hidden_states: torch.Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)
    extend_seq_lens: torch.Tensor = constant(WIDTH, shape=BATCH, dtype=torch.int32)
    num_correct_drafts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=WIDTH)
    num_accept_tokens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=WIDTH)
    select_index: torch.Tensor = computed(last_accepted, shape=BATCH, dtype=torch.int64)
    next_token_logits: torch.Tensor = output(BATCH, VOCAB, dtype=torch.float32)
    capture_hidden_mode: str = "null"


class MultiLayerDraftExtendInputs(DraftExtendInputs):
    """What a draft of several layers reads, one step a layer: FRONT tokens and the drafts, WIDTH together a request.

    One set serves all layers.

    hidden_states: each layer writes them in the graph for the next one, so that no tail is known to be clean.
    num_correct_drafts: 1 while a bucket is captured, an ordinary count; -1 in padded rows: nothing was drafted.
    num_accept_tokens: likewise.
    extend_start_loc: where each request's tokens begin, the same in each step.
    front_tokens: FRONT where the device can read it, to find the drafts behind them.
    select_index: the row of each request's last correct draft, in padded rows one of their own.
    """

    hidden_states: torch.Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0, rewritten=True)
    num_correct_drafts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1, starts=1)
    num_accept_tokens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1, starts=1)
    extend_start_loc: torch.Tensor = constant(even_starts, shape=BATCH, dtype=torch.int32)
    front_tokens: torch.Tensor = constant(FRONT, shape=1, dtype=torch.int32)
    select_index: torch.Tensor = computed(last_correct, shape=BATCH, dtype=torch.int64)
