"""Draft: several steps of a draft model in one graph, each over the TOPK branches of every request's tree."""

import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.capabilities import CACHE_LOC
from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import constant, copied, staged
from ...dataflow.tails import keep
from .axes import HIDDEN, STEPS, TOPK, VOCAB
from .dtypes import MODEL_DTYPE
from .requests import Requests


class DraftInputs(Requests):
    """What drafting a tree reads: TOPK tokens a request, STEPS steps of them in one graph.

    input_ids: no batch brings them; each step writes the ids of the branches that it goes on with, all rows of them.
    positions: each step advances them in place; the graph puts them back, so that no one else sees that.
    out_cache_loc: a location for each branch of each step; padded rows write to location 0, which is kept free.
    extend_seq_lens: each branch grows by one token a step.
    topk_p: the probabilities of the branches to begin with; 0 in padded rows, which win nothing.
    topk_index: the ids of these branches; 0 in padded rows, an id like any other.
    hidden_states: the target's last one for each request; so large that it is copied by itself, not in a group.
    """

    input_ids: torch.Tensor = staged(TOKENS, dtype=torch.int64, pad=keep("written before it is read, all rows"))
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, restored=True)
    out_cache_loc: torch.Tensor = copied(TOKENS * STEPS, dtype=CACHE_LOC, pad=0)
    extend_seq_lens: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32)
    topk_p: torch.Tensor = copied(BATCH, TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, TOPK, dtype=torch.int64, pad=0)
    hidden_states: torch.Tensor = copied(BATCH, HIDDEN, dtype=MODEL_DTYPE, pad=0)
    capture_hidden_mode: str = "null"


class DraftSampling(Inputs):
    """A mixin: what drafting reads where drafts are sampled, not taken greedily.

    draft_probs: what the first branches were drawn from, to be held against the target's probabilities.
    sampling_seed: one a request, so that a run can be repeated.
    temperatures: logits are divided by them; 1 in padded rows, since 0 would make NaN of them.
    top_ks: the whole vocabulary in padded rows, which cuts nothing off.
    """

    draft_probs: torch.Tensor = copied(BATCH, VOCAB, dtype=torch.float32, pad=0)
    sampling_seed: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    temperatures: torch.Tensor = copied(BATCH, 1, dtype=torch.float32, pad=1)
    top_ks: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=VOCAB)
