"""Parts of the standard declarations: axes for a model's sizes, its dtype, and token counts by rank."""

from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Step
from ...dataflow.capabilities import Role, dtype_text
from ...dataflow.errors import ComputeError, ConfigError, DeclarationError
from ...dataflow.inputs import V
from ...dataflow.slots import slot
from ...dataflow.sources import look_up
from ..engine.config import checked
from ..ranks.group import Ranks

HIDDEN: Final = Axis("HIDDEN", fixed=True)
"""Elements of one token's hidden state."""
VOCAB: Final = Axis("VOCAB", fixed=True)
"""Tokens that the model knows: elements of one row of logits."""
CONTEXT: Final = Axis("CONTEXT", fixed=True)
"""The most tokens that one request may have, prompt and answer together."""
FILL: Final = Axis("FILL", fixed=True)
"""Cached tokens of each request that fit in a tree mask: the backend's fill value, or up to CONTEXT."""
TOPK: Final = Axis("TOPK", fixed=True)
"""Branches of a draft tree: the tokens of a request in a draft step."""
STEPS: Final = Axis("STEPS", fixed=True)
"""Draft steps in one graph."""
FRONT: Final = Axis("FRONT", fixed=True)
"""Tokens of a request that come before its drafts in a multi-layer draft-extend."""
INDEX_TOPK: Final = Axis("INDEX_TOPK", fixed=True)
"""Cached tokens that sparse attention chooses for each token."""
ADAPTERS: Final = Axis("ADAPTERS", fixed=True)
"""Low-rank adapters that are loaded at once."""
DP: Final = Axis("DP", fixed=True)
"""Data-parallel ranks with token counts of their own, or 1 if one count serves all."""
MODEL_DTYPE: Final = Role("model_dtype", torch.bfloat16)
"""The dtype that the model computes in: bfloat16 unless `model_dtype` says otherwise."""


def model_dtype(dtype: torch.dtype) -> Callable[[type[V]], type[V]]:
    """Decorate a declaration so that each slot of the model's dtype, inherited ones too, has this dtype.

    Raise DeclarationError if no slot has the model's dtype, or if a slot's values do not fit.
    """

    def settle(inputs: type[V]) -> type[V]:
        slots, fields = inputs.slotgraph.slots, attrs.fields(inputs)  # type: ignore[arg-type] # made one in place
        own = [one for one in fields if one.name in slots and slots[one.name].dtype == MODEL_DTYPE]
        if not own:
            raise DeclarationError(
                f"{inputs.__name__}: no slot has the model's dtype: leave out model_dtype({dtype_text(dtype)})"
            )
        body: dict[str, Any] = {name: getattr(inputs, name) for name in ("__module__", "__qualname__", "__doc__")}
        body["__annotations__"] = {one.name: one.type for one in own}
        for one in own:
            body[one.name] = slot(attrs.evolve(slots[one.name], dtype=dtype), init=one.init, default=one.default)
        kind: Any = type(inputs)
        made: type[V] = kind(inputs.__name__, (inputs,), body)
        return made

    return settle


@attrs.frozen(kw_only=True)
class Sharding:
    """How a step's tokens are spread over the ranks of tensor-parallel attention.

    An object or a mapping of your own, with these names among others, serves as well.

    Attributes:
        attn_tp_size: Ranks that share the attention of one batch.
        attn_tp_rank: Which of them this one is, from 0.
        scattered: Whether each rank has only its part of the padded tokens, and not all of them.

    Raises:
        ConfigError: A value is out of range.
    """

    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    scattered: bool = False

    def __attrs_post_init__(self) -> None:
        """Raise ConfigError for a rank out of range."""
        size = checked("attn_tp_size", "a number of ranks, at least 1", self.attn_tp_size, int, 1)
        checked("attn_tp_rank", f"a rank from 0, below attn_tp_size, {size}", self.attn_tp_rank, int, 0, size - 1)

    @classmethod
    def of(cls, settings: object) -> "Sharding":
        """Return the sharding of a runner's settings.

        Raise ConfigError if they lack a name, or the rank is out of range.
        """
        if isinstance(settings, cls):
            return settings
        found = {field.name: look_up(settings, field.name) for field in attrs.fields(cls)}
        for name in [name for name, value in found.items() if value is None]:
            raise ConfigError(
                f"settings have no {name!r}, which says how tokens are sharded: give it, or standard.Sharding(...)"
            )
        return cls(**found)


def count_batches(ranks: Ranks) -> int:
    """Return how many batches the ranks have.

    Raise ConfigError if the ranks do not divide into groups of `shards` that share one.
    """
    if not ranks.batches:
        raise ConfigError(
            f"{ranks.size} ranks do not divide into groups of {ranks.shards} that share a batch, as Ranks(shards=) "
            f"says: make Ranks of the group of all ranks, or use standard.ExpertParallel and "
            f"standard.DataParallelCarried, which need no ranks"
        )
    return ranks.batches


def num_token_non_padded(step: Step, settings: object) -> int:
    """Return the live tokens among those of this rank, by the runner's settings: see `Sharding`."""
    return _live_part(step, Sharding.of(settings))


def own_tokens(step: Step, ranks: Ranks) -> int:
    """Return the live tokens among those of this rank, by the runner's `Ranks(shards=)`."""
    count_batches(ranks)
    shards = ranks.shards
    return _live_part(step, Sharding(attn_tp_size=shards, attn_tp_rank=ranks.rank % shards, scattered=shards > 1))


def _live_part(step: Step, sharding: Sharding) -> int:
    """Return the live tokens of a rank's part, or all of them if they are not scattered.

    The formula is clamp(live - chunk * rank, 0, chunk) with chunk = padded / ranks.
    """
    live = step.live(TOKENS)
    padded = step.padded(TOKENS)
    size = sharding.attn_tp_size
    if not sharding.scattered:
        return live
    chunk, rest = divmod(padded, size)
    if rest:
        raise ComputeError(
            f"slot 'num_token_non_padded': {padded} padded tokens do not divide among {size} attention-TP ranks, over "
            f"which they are scattered: choose buckets whose tokens are a multiple of {size}, and pad the "
            "batches of steps that run eagerly, or drop the slot there"
        )
    return min(max(live - chunk * sharding.attn_tp_rank, 0), chunk)


def agreed_tokens(step: Step, ranks: Ranks) -> list[int]:
    """Return the live tokens of each batch of the ranks in this step. Raises the errors of `_of_batches`."""
    return _of_batches(TOKENS, step, ranks)


def agreed_requests(step: Step, ranks: Ranks) -> list[int]:
    """Return the live requests of each batch of the ranks in this step.

    Raises the errors of `_of_batches`.
    """
    return _of_batches(BATCH, step, ranks)


def _of_batches(axis: Axis, step: Step, ranks: Ranks) -> list[int]:
    """Return the live rows that the first rank of each batch sent. In a micro-batch they are those of the whole step.

    Raise ConfigError if DP is not the number of batches.
    """
    batches = count_batches(ranks)
    asked = step.padded(DP)
    if asked != batches:
        raise ConfigError(
            f"sizes has {DP} = {asked}, and {ranks.size} ranks, of which each {ranks.shards} in a row share a batch, "
            f"have {batches} batches: give DP the size {batches}, or Ranks(shards=) the number of ranks that share one"
        )
    return list(ranks.live(axis)[:: ranks.shards])


def padded_tokens(step: Step) -> list[int]:
    """Return the padded token count for every rank, since ranks that gather run one bucket and exchange its padding."""
    return [step.padded(TOKENS)] * step.padded(DP)


def padded_requests(step: Step) -> list[int]:
    """Return the padded request count for every rank, since each request has one row of logits."""
    return [step.padded(BATCH)] * step.padded(DP)


def last_accepted(num_accept_tokens: torch.Tensor, extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Return the row of each request's last accepted token: i * W + num_accept_tokens[i] - 1.

    W is in extend_seq_lens.
    """
    rows = torch.arange(num_accept_tokens.shape[0], device=num_accept_tokens.device)
    return rows * extend_seq_lens + num_accept_tokens - 1


def last_correct(
    num_correct_drafts: torch.Tensor, extend_start_loc: torch.Tensor, front_tokens: torch.Tensor
) -> torch.Tensor:
    """Return the row of each request's last correct draft: i * W + front + num_correct_drafts[i].

    i * W is in extend_start_loc. A padded row, whose count is -1, stays in its own rows, even if front is 0.
    """
    return extend_start_loc + (front_tokens + num_correct_drafts).clamp(min=0).to(torch.int64)


def first_tokens(extend_seq_lens: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the row where each request's tokens begin: the exclusive prefix sum of extend_seq_lens.

    A request without tokens, as padded ones are, would begin past the last row. It begins at that row instead.
    """
    starts = extend_seq_lens.cumsum(0) - extend_seq_lens
    return starts.clamp(max=max(input_ids.shape[0] - 1, 0)).to(torch.int32)  # lengths that are not copied may be int64


def segment_offsets(seg_lens: torch.Tensor) -> torch.Tensor:
    """Return where each request's tokens begin, and behind them how many there are."""
    return torch.nn.functional.pad(seg_lens.cumsum(0, dtype=torch.int32), (1, 0))


def even_starts(step: Step) -> torch.Tensor:
    """Return the row where each request's tokens begin if all have equally many: arange * W, at full capacity."""
    return torch.arange(step.padded(BATCH), dtype=torch.int32, device="cpu") * step.padded(WIDTH)
