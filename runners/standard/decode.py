"""Decode, target-verify and eager: steps of as many tokens for each request, cached tokens before them."""

import torch

from ...dataflow.axes import BATCH, TOKENS, WIDTH
from ...dataflow.capabilities import CACHE_LOC
from ...dataflow.specifiers import copied, output, staged
from ...dataflow.tails import keep
from .axes import FILL, VOCAB
from .requests import Requests


class DecodeInputs(Requests):
    """What one decode step reads, and where it writes its logits.

    input_ids: a stale id is still a row of the embedding table, and nobody reads what comes of it.
    positions: a stale position indexes the rope table past its end, an illegal access after hours.
    out_cache_loc: padded rows write their keys and values, too; location 0 is kept free for that.
    next_token_logits: one allocation for all buckets, at an address that samplers and collectives know.
    """

    input_ids: torch.Tensor = copied(
        TOKENS, dtype=torch.int64, pad=keep("any id will do, its row's result is dropped"), poison="stale"
    )
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    next_token_logits: torch.Tensor = output(TOKENS, VOCAB, dtype=torch.float32)
    capture_hidden_mode: str = "null"


class TargetVerifyInputs(DecodeInputs):
    """What the target model reads to verify a tree of WIDTH draft tokens for each request.

    custom_mask: which tokens each draft token sees, written by who builds the tree; True at first and in padded rows,
    since a softmax over nothing is NaN.
    """

    custom_mask: torch.Tensor = staged((BATCH * FILL + TOKENS) * WIDTH, dtype=torch.bool, pad=True)


class EagerInputs(DecodeInputs):
    """What an eager step reads: the decode set, never padded.

    It has no counts of its own. Those that a mixin would compute, an eager batch has right already: name them in the
    runner's `carry=`, so that nothing is written over them.
    """
