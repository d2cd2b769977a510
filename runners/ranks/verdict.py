"""Verdicts: what follows for all ranks from what each of them said, the same on each."""

from collections.abc import Sequence
from typing import Final, get_args

from ...dataflow.axes import Axis
from ...dataflow.errors import RankError
from ..decision import Decision, Why
from .group import Ranks
from .message import EAGER, REFUSED, Message

WHYS: Final[tuple[Why, ...]] = get_args(Why)
"""Reasons, by the numbers that messages have for them."""


def first(messages: Sequence[Message], verdict: int) -> int | None:
    """The first rank that said so."""
    return next((rank for rank, one in enumerate(messages) if one.verdict == verdict), None)


def check(messages: Sequence[Message], axes: Sequence[Axis], ranks: Ranks) -> None:
    """RankError, on all ranks alike, where one refused its batch, or those that share one bring different sizes."""
    refused = first(messages, REFUSED)
    if refused is not None:
        message = f"rank {refused} refused its batch, so that no rank runs the step: {messages[refused].text}"
        raise RankError(message)
    _check_shared(messages, axes, ranks)


def _check_shared(messages: Sequence[Message], axes: Sequence[Axis], ranks: Ranks) -> None:
    if ranks.shards == 1 or not ranks.batches:
        return
    torn: list[int] = []
    for first in range(0, ranks.size, ranks.shards):
        sharing = range(first, first + ranks.shards)
        if any(messages[rank].live != messages[first].live for rank in sharing):
            torn += sharing
    if torn:
        brought = (dict(zip(axes, messages[rank].live, strict=True)).items() for rank in torn)
        each = (", ".join(f"{rows} {axis.name}" for axis, rows in sizes) for sizes in brought)
        told = "; ".join(f"rank {rank} brings {sizes}" for rank, sizes in zip(torn, each, strict=True))
        message = f"each {ranks.shards} ranks in a row share a batch, so that no rank runs the step: {told}"
        raise RankError(message)


def verdict(own: Decision, messages: Sequence[Message]) -> tuple[Decision, int]:
    """The path of all, and who forced it: the first rank that must run eagerly, else that needs the largest bucket.

    own: this rank's, alone.
    """
    eager = first(messages, EAGER)
    if eager is not None:
        one = messages[eager]
        return Decision("eager", None, WHYS[one.why], f"rank {eager}: {one.text}", eager), eager
    bucket = max(one.bucket for one in messages)
    rank = next(rank for rank, one in enumerate(messages) if one.bucket == bucket)
    reason = f"bucket {bucket} fits the {messages[rank].live[-1]} rows of rank {rank}, the most of all"
    return Decision(own.path, bucket, "fits", reason, rank), rank
