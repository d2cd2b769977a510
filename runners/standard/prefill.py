"""Prefill: steps over the tokens of several prompts, padded along the tokens alone."""

from collections.abc import Mapping
from typing import Any

import torch

from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.capabilities import CACHE_LOC, SEQ_LEN_FILL
from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import computed, copied
from .axes import HIDDEN
from .counts import first_tokens
from .dtypes import MODEL_DTYPE
from .requests import Requests


class PrefillInputs(Inputs):
    """What the captured pieces of a prefill read: tokens alone, so that no piece hangs on how many requests there are.

    input_ids: padded rows are executed, by kernels that may sort or route by id: one and the same id each time.
    positions: padded rows are executed; a stale position indexes the rope table past its end.
    out_cache_loc: padded rows are executed, and write to location 0, which is kept free for that.
    """

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)


class BreakableInputs(PrefillInputs, Requests, drop=["seq_lens_cpu"]):
    """What breaks and eager parts of a prefill read beside: how its tokens belong to requests.

    Only whole-model capture pads requests; a padded one has no tokens.

    extend_seq_lens: new tokens of each request; 0 in padded rows, so that attention does nothing for them.
    extend_prefix_lens: cached tokens before the new ones; 0 in padded rows, which have no cache.
    extend_start_loc: where each request's tokens begin; a padded row stays inside the tokens.
    orig_seq_lens: lengths before anything was chunked, for rope scaling that hangs on them.
    """

    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, poison=(), converts=(torch.int64,))
    extend_prefix_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, converts=(torch.int64,))
    extend_start_loc: torch.Tensor = computed(first_tokens, shape=BATCH, dtype=torch.int32)
    orig_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, converts=(torch.int64,))

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """One request without a prefix, which owns every token of the bucket."""
        whole, none = [step.padded(TOKENS)], [0]
        mine = {"seq_lens": whole, "extend_seq_lens": whole, "orig_seq_lens": whole}
        mine |= {"extend_prefix_lens": none, "req_pool_indices": none}
        present = {name: value for name, value in mine.items() if name in cls.slotgraph.slots}
        return {**super().placeholder(step), **present}


class DraftPrefillInputs(PrefillInputs):
    """What the prefill of a draft model reads beside: the target's hidden states.

    hidden_states: one for each token of the target's prefill; padded rows are executed, on zeros.
    """

    hidden_states: torch.Tensor = copied(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)
