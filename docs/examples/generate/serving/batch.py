"""Batches: instances of the declarations, made from the requests that run in a step."""

from collections.abc import Sequence

import torch

from serving.inputs import DecodeInputs, PrefillInputs
from serving.request import Request


def prefill_batch(requests: Sequence[Request], page_size: int, device: torch.device) -> PrefillInputs:
    """All tokens of the requests' prompts behind one another, with no padding between them."""
    tokens = [(request, position) for request in requests for position in range(len(request.prompt_ids))]
    lengths = [len(request.prompt_ids) for request in requests]
    return PrefillInputs(
        input_ids=_int64([request.prompt_ids[position] for request, position in tokens], device),
        positions=_int64([position for _, position in tokens], device),
        out_cache_loc=_int64([request.location(position, page_size) for request, position in tokens], device),
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        lengths=lengths,
    )


def decode_batch(requests: Sequence[Request], page_size: int, device: torch.device) -> DecodeInputs:
    """Each request's newest token; block tables are as wide as the longest of these requests needs."""
    newest = [request.seq_len - 1 for request in requests]
    return DecodeInputs(
        input_ids=_int64([request.generated[-1] for request in requests], device),
        positions=_int64(newest, device),
        out_cache_loc=_int64([r.location(at, page_size) for r, at in zip(requests, newest, strict=True)], device),
        seq_lens=torch.tensor([request.seq_len for request in requests], dtype=torch.int32, device=device),
        block_tables=_block_tables(requests, device),
    )


def _block_tables(requests: Sequence[Request], device: torch.device) -> torch.Tensor:
    width = max(len(request.pages) for request in requests)
    rows = [request.pages + [0] * (width - len(request.pages)) for request in requests]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _int64(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
