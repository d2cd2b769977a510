"""Counts that ranks must agree on: of the padded bucket, of what the ranks tell, or carried where the batch has them.

Where no graph takes a batch, nothing is padded. What the ranks tell is as right there; of counts against the padded
bucket the batch has its own: name them in the runner's `carry=`, so that its eager steps read what the batch brings.
"""

import torch

from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import computed, copied
from .axes import DP
from .counts import (
    agreed_requests,
    agreed_tokens,
    num_token_non_padded,
    own_tokens,
    padded_requests,
    padded_tokens,
)


class ExpertParallel(Inputs):
    """A mixin: experts and gathered data parallelism, which must not route padded rows. Needs settings: see `Sharding`.

    num_token_non_padded: live tokens of this rank's part of the padded bucket; the rest is routed to no expert.
    """

    num_token_non_padded: torch.Tensor = computed(num_token_non_padded, shape=1, dtype=torch.int32)


class ExpertParallelSharded(Inputs):
    """A mixin: the same, where the runner's `Ranks(shards=)` says over which ranks a bucket's tokens are spread.

    num_token_non_padded: live tokens of this rank's part, all of them where there is one shard; needs no settings.
    """

    num_token_non_padded: torch.Tensor = computed(own_tokens, shape=1, dtype=torch.int32)


class DataParallelGathered(Inputs):
    """A mixin: data-parallel attention whose ranks gather their tokens, all of them in the same bucket.

    global_num_tokens: the padded count, live or not, also on an idle rank: collectives move whole buckets.
    global_num_tokens_for_logprob: likewise, a row of logits a token.
    """

    global_num_tokens: torch.Tensor = computed(padded_tokens, shape=DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = computed(padded_tokens, shape=DP, dtype=torch.int32)


class DataParallelGatheredExtend(DataParallelGathered):
    """A mixin for draft-extend: the same, with a row of logits a request.

    global_num_tokens_for_logprob: the padded request count, since select_index leaves one row of each request.
    """

    global_num_tokens_for_logprob: torch.Tensor = computed(padded_requests, shape=DP, dtype=torch.int32)


class DataParallelAgreed(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, so that their counts differ and `Ranks` tells them.

    global_num_tokens: live tokens of each batch, as ranks told before this step; 0 of an idle one, padding of none.
    global_num_tokens_for_logprob: likewise, a row of logits a token.
    """

    global_num_tokens: torch.Tensor = computed(agreed_tokens, shape=DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = computed(agreed_tokens, shape=DP, dtype=torch.int32)


class DataParallelAgreedExtend(DataParallelAgreed):
    """A mixin for draft-extend: the same, with a row of logits a request.

    global_num_tokens_for_logprob: live requests of each batch, since select_index leaves one row of each.
    """

    global_num_tokens_for_logprob: torch.Tensor = computed(agreed_requests, shape=DP, dtype=torch.int32)


class DataParallelCarried(Inputs):
    """A mixin: data-parallel attention whose ranks do not gather, where no `Ranks` but the batch has their counts.

    global_num_tokens: what the scheduler's ranks agreed on; a buffer of zeros in its place is a known bug.
    global_num_tokens_for_logprob: likewise.
    """

    global_num_tokens: torch.Tensor = copied(DP, dtype=torch.int32)
    global_num_tokens_for_logprob: torch.Tensor = copied(DP, dtype=torch.int32)
