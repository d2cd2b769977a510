"""What the two kinds of steps read: the declarations, and the batches that the engine makes of them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.nn.functional import pad

from serving.request import Request
from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Inputs,
    Step,
    attention,
    computed,
    copied,
    output,
    standard,
)

D = TypeVar("D", bound="TokenInputs")


def place(page_table: torch.Tensor, positions: torch.Tensor, page_size: torch.Tensor, out: torch.Tensor) -> None:
    """Where the cache has each request's newest token: page * page size + offset; padded rows get the dummy page's."""
    pages = page_table.gather(1, (positions // page_size)[:, None])[:, 0]
    out.copy_(pages * page_size + positions % page_size)


class TokenInputs(Inputs):
    """What every step reads of each token; padded rows write their keys and values to the dummy page.

    numbers: of the requests, on which draws depend.
    """

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class DecodeInputs(TokenInputs, attention.PagedCache):
    """What one decode step reads: a token a request, and what attention reads of its cache: seq_lens and page_table.

    next_ids: what the step writes: the token after each request's newest.
    then: what the next step reads, if the host says nothing.
    """

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda next_ids: next_ids)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda positions: positions + 1)
    out_cache_loc: torch.Tensor = computed(place, shape=TOKENS, dtype=CACHE_LOC)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, then=lambda seq_lens: seq_lens + 1)
    page_table: torch.Tensor = copied(BATCH, attention.PAGES, dtype=torch.int32, pad=0, poison=())  # no other is free
    num_token_non_padded: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    next_ids: torch.Tensor = output(BATCH, dtype=torch.int64)


class PrefillInputs(TokenInputs):
    """What one prefill step reads: the prompts of several requests behind one another.

    extend_seq_lens: how many tokens each has. lengths: the same numbers on the host, so that nobody asks the device.
    cu_seqlens_q: where the tokens of each begin, and behind them how many there are, as attention over all wants them.
    """

    extend_seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0)
    cu_seqlens_q: torch.Tensor = computed(
        lambda extend_seq_lens: pad(extend_seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        shape=BATCH + 1,
        dtype=torch.int32,
    )
    last_rows: torch.Tensor = computed(lambda cu_seqlens_q: cu_seqlens_q[1:].long() - 1, shape=BATCH, dtype=torch.int64)
    lengths: list[int]

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """What graphs are captured on: one request that owns all tokens."""
        tokens = [step.live(TOKENS)]
        return {"extend_seq_lens": tokens, "lengths": tokens}


def prefill_batch(requests: Sequence[Request], page_size: int, device: torch.device) -> PrefillInputs:
    """All tokens of the requests' prompts behind one another, with no padding between them."""
    tokens = [(request, position) for request in requests for position in range(len(request.prompt_ids))]
    lengths = [len(request.prompt_ids) for request in requests]
    return PrefillInputs(
        input_ids=_int64([request.prompt_ids[position] for request, position in tokens], device),
        positions=_int64([position for _, position in tokens], device),
        out_cache_loc=_int64([request.location(position, page_size) for request, position in tokens], device),
        numbers=_int64([request.number for request in requests], device),
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        lengths=lengths,
    )


def decode_batch(
    requests: Sequence[Request], width: int, device: torch.device, first: torch.Tensor | None = None
) -> DecodeInputs:
    """Each request's newest token, which is its first one if `first` has them; page tables are `width` pages wide."""
    lens = [request.seq_len + (first is not None) for request in requests]
    return DecodeInputs(
        input_ids=_int64([request.generated[-1] for request in requests], device) if first is None else first,
        positions=_int64([seq_len - 1 for seq_len in lens], device),
        numbers=_int64([request.number for request in requests], device),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        page_table=torch.tensor(tables(requests, width), dtype=torch.int32, device=device),
    )


def tables(requests: Sequence[Request], width: int) -> list[list[int]]:
    """The pages of each request, and behind them the dummy page."""
    return [request.pages + [0] * (width - len(request.pages)) for request in requests]


def _int64(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def with_all_counts(declaration: type[D]) -> type[D]:
    """A declaration of decode steps, and how many tokens each rank has in the step: view.global_num_tokens."""

    class Counted(declaration, standard.DataParallelAgreed):  # type: ignore[misc, valid-type]
        """Ranks decode in the same bucket, and know of one another."""

    return cast("type[D]", Counted)


def with_ends(declaration: type[D], eos: Collection[int]) -> type[D]:
    """A declaration of decode steps that says itself which requests are done, for several steps in one launch.

    last: the position at which a request's last token is chosen, as the engine sets it on a batch.
    """

    def ends(next_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        done = positions > last
        for token in eos:
            done = done | (next_ids == token)
        return done

    class Ending(declaration):  # type: ignore[misc, valid-type]
        """Rows of requests that are done are as padded rows: what they write goes to the dummy page."""

        last: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=_last_of)
        done: torch.Tensor = copied(
            BATCH, dtype=torch.bool, pad=True, source=lambda batch: _last_of(batch) < batch.positions, then=ends
        )

    return cast("type[D]", Ending)


def _last_of(batch: Any) -> torch.Tensor:
    """Positions of last tokens; for batches that only measure a step, far away."""
    return getattr(batch, "last", torch.full_like(batch.positions, 1 << 40))


def after_others(declaration: type[D], dtype: torch.dtype) -> type[D]:
    """A declaration for layers that others run before, whose hidden states come in: view.pp_hidden_states."""

    class Later(declaration, standard.PipelineProxies, drop=["pp_residual"]):  # type: ignore[misc, valid-type]
        """A part of the model that does not begin with tokens."""

    return cast("type[D]", standard.model_dtype(dtype)(Later))
