"""The functions of computed counts: each names what it needs, and gives every padded row."""

import torch

from ...dataflow.axes import BATCH, TOKENS, WIDTH
from ...dataflow.errors import ComputeError
from ...dataflow.step import Step
from .axes import DP
from .settings import Sharding


def num_token_non_padded(step: Step, settings: object) -> int:
    """Live tokens among those that this rank holds: clamp(live - chunk * rank, 0, chunk), chunk = padded / ranks.

    Where tokens are not scattered, each rank holds all of them. ComputeError where the padded tokens do not divide
    among the ranks; ConfigError where the settings do not say how they do (see `Sharding`).
    """
    live, sharding = step.live(TOKENS), Sharding.of(settings)
    if not sharding.scattered:
        return live
    padded, ranks = step.padded(TOKENS), sharding.attn_tp_size
    chunk, rest = divmod(padded, ranks)
    if rest:
        message = (
            f"slot 'num_token_non_padded': {padded} padded tokens do not divide among {ranks} attention-TP ranks, over "
            f"which they are scattered: choose buckets whose tokens are a multiple of {ranks}"
        )
        raise ComputeError(message)
    return min(max(live - chunk * sharding.attn_tp_rank, 0), chunk)


def padded_tokens(step: Step) -> list[int]:
    """The padded token count for every rank: gathered ranks run the same bucket, and move its padding, too."""
    return [step.padded(TOKENS)] * step.padded(DP)


def padded_requests(step: Step) -> list[int]:
    """The padded request count for every rank: one row of logits a request."""
    return [step.padded(BATCH)] * step.padded(DP)


def last_accepted(num_accept_tokens: torch.Tensor, extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """The row of each request's last accepted token: i * W + num_accept_tokens[i] - 1; extend_seq_lens holds W."""
    rows = torch.arange(num_accept_tokens.shape[0], device=num_accept_tokens.device)
    return rows * extend_seq_lens + num_accept_tokens - 1


def last_correct(
    num_correct_drafts: torch.Tensor, extend_start_loc: torch.Tensor, front_tokens: torch.Tensor
) -> torch.Tensor:
    """The row of each request's last correct draft: i * W + front + num_correct_drafts[i], i * W from extend_start_loc.

    A padded row, whose count is -1, stays in its own rows, also where nothing stands in front.
    """
    return extend_start_loc + (front_tokens + num_correct_drafts).clamp(min=0).to(torch.int64)


def first_tokens(extend_seq_lens: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Where each request's tokens begin: the exclusive prefix sum of extend_seq_lens.

    A request without tokens, as padded ones are, would begin past the last row; it begins at that row instead.
    """
    starts = extend_seq_lens.cumsum(0) - extend_seq_lens
    return starts.clamp(max=max(input_ids.shape[0] - 1, 0)).to(torch.int32)  # lengths handed through may be int64


def even_starts(step: Step) -> torch.Tensor:
    """Where each request's tokens begin if all have as many: arange * W, at full capacity."""
    return torch.arange(step.padded(BATCH), dtype=torch.int32) * step.padded(WIDTH)
