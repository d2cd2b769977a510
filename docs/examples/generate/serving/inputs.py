"""What the two kinds of steps read: the declarations that the runners turn into buffers, fills, tails and views."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, Step, computed, copied, standard

PAGES = Axis("PAGES")
D = TypeVar("D", bound="DecodeInputs")
T = TypeVar("T", bound="TokenInputs")


def live_tokens(step: Step) -> int:
    """How many rows of this step are no padding."""
    return step.live(TOKENS)


def last_rows(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Where each request's last token lies."""
    return extend_seq_lens.cumsum(0) - 1


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
    """What one prefill step reads: the prompts of several requests behind one another.

    extend_seq_lens: how many tokens each has. lengths: the same numbers on the host, so that nobody asks the device.
    """

    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    last_rows: torch.Tensor = computed(last_rows, shape=BATCH, dtype=torch.int64)
    lengths: list[int]

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """What graphs are captured on: one request that owns all tokens."""
        tokens = [step.live(TOKENS)]
        return {"extend_seq_lens": tokens, "lengths": tokens}


def with_all_counts(declaration: type[D]) -> type[D]:
    """A declaration of decode steps, and how many tokens each rank has in the step."""

    class Counted(declaration, standard.DataParallelAgreed):  # type: ignore[misc, valid-type]
        """Ranks decode in the same bucket, and know of one another."""

    return cast("type[D]", Counted)


def all_counts(view: Any) -> torch.Tensor:
    """How many tokens each rank has in a step of such a declaration, [ranks] int32."""
    counts: torch.Tensor = view.global_num_tokens
    return counts


def after_others(declaration: type[T], dtype: torch.dtype) -> type[T]:
    """A declaration for layers that others run before; their hidden states come from there."""

    class Later(declaration, standard.PipelineProxies, drop=["pp_residual"]):  # type: ignore[misc, valid-type]
        """A part of the model that does not begin with tokens."""

    return cast("type[T]", standard.model_dtype(dtype)(Later))


def proxies(view: Any) -> torch.Tensor:
    """The hidden states of such a declaration, [tokens, elements] in the model's dtype."""
    hidden: torch.Tensor = view.pp_hidden_states
    return hidden
