"""What kinds of models add to any phase: mixins, which are plain bases and combine in any order."""

import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import copied, staged
from ...dataflow.tails import keep, once
from .axes import HIDDEN
from .dtypes import MODEL_DTYPE


class SlidingWindow(Inputs):
    """A mixin: models some of whose layers see a window only, with a KV pool of its own.

    out_cache_loc_swa: lent to the KV pool while buckets are captured, so that graphs write there without a translation.
    """

    out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0, poison=())


class Mrope(Inputs):
    """A mixin: multimodal models, whose positions have three parts.

    mrope_positions: absent where a batch is text alone; padded columns are executed, at position 0.
    """

    mrope_positions: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, strided=True, default=None)


class DraftMrope(Mrope):
    """A mixin for draft: the same, where each step advances the positions.

    mrope_positions: advanced in place, all three parts, and put back by the graph; absent where a batch is text alone.
    """

    mrope_positions: torch.Tensor | None = copied(
        3, TOKENS, dtype=torch.int64, pad=0, strided=True, default=None, restored=True
    )


class InputEmbeds(Inputs):
    """A mixin: multimodal models, which make one sequence of what images and texts are embedded to.

    input_embeds: the model writes it inside the step, where each batch differs; padded rows are executed, on zeros.
    """

    input_embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=MODEL_DTYPE, pad=0)


class Mamba(Inputs):
    """A mixin: state-space models, which keep a state a request and snapshots of it.

    mamba_track_indices: where snapshots go; padded rows name entry 0, which is kept free.
    mamba_track_mask: which requests take one; padded rows take none.
    mamba_track_seqlens: how many tokens a snapshot stands for.
    """

    mamba_track_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, poison=())
    mamba_track_mask: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
    mamba_track_seqlens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)


class EncoderDecoder(Inputs):
    """A mixin: models with an encoder, to whose output decoder layers attend.

    encoder_lens: 0 at first, written for live rows alone; a stale length is one that some encoder output had.
    """

    encoder_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=once(0))


class NgramEmbedding(Inputs):
    """A mixin: models that embed a token together with those before it.

    ngram_column_starts: where each request's tokens stand in the table of ids.
    ngram_req_lens: how many of them; 1 at first, so that a row never written has a token.
    """

    ngram_column_starts: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=keep("a stale start is one that a request had"),
        poison="stale",
        source="ngram_embedding_info.column_starts",
    )
    ngram_req_lens: torch.Tensor = copied(
        BATCH,
        dtype=torch.int32,
        pad=keep("a stale length is one that a request had"),
        poison="stale",
        starts=1,
        source="ngram_embedding_info.req_lens",
    )
