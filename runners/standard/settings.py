"""What the counts ask of a runner's settings, or of its ranks: how its tokens are sharded."""

from typing import Any

import attrs

from ...dataflow.errors import ConfigError
from ...dataflow.sources import look_up
from ..ranks.group import Ranks


@attrs.frozen(kw_only=True)
class Sharding:
    """How a step's tokens are spread over the ranks of tensor-parallel attention.

    attn_tp_size: ranks that share the attention of one batch. attn_tp_rank: which of them this one is, from 0.
    scattered: whether each rank holds its part of the padded tokens alone, instead of all of them.
    An object or a mapping of the user's own, with these names among others, serves as well. Raises ConfigError.
    """

    attn_tp_size: int = 1
    attn_tp_rank: int = 0
    scattered: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse a rank that is none."""
        if self.attn_tp_size < 1 or not 0 <= self.attn_tp_rank < self.attn_tp_size:
            message = (
                f"attn_tp_rank is {self.attn_tp_rank} of {self.attn_tp_size}: expected a rank from 0, below "
                "attn_tp_size, which is at least 1"
            )
            raise ConfigError(message)

    @classmethod
    def of(cls, settings: object) -> "Sharding":
        """What a runner's settings say. ConfigError where they lack a name, or where the rank is none."""
        return settings if isinstance(settings, cls) else cls(**{name: _asked(settings, name) for name in _NAMES})

    @classmethod
    def over(cls, ranks: Ranks) -> "Sharding":
        """This rank's place where each `Ranks(shards=)` ranks in a row share a batch, a part of its tokens each.

        ConfigError where the ranks do not divide so.
        """
        batches_of(ranks)
        return cls(attn_tp_size=ranks.shards, attn_tp_rank=ranks.rank % ranks.shards, scattered=ranks.shards > 1)


def batches_of(ranks: Ranks) -> int:
    """How many batches ranks bring. ConfigError where they do not divide so that `shards` of them share each."""
    if not ranks.batches:
        message = (
            f"{ranks.size} ranks do not divide so that each {ranks.shards} of them share a batch, as Ranks(shards=) "
            "says: make it of the group of all ranks that do, or take the slots that settings and batches give, "
            "standard.ExpertParallel and standard.DataParallelCarried"
        )
        raise ConfigError(message)
    return ranks.batches


_NAMES = tuple(field.name for field in attrs.fields(Sharding))


def _asked(settings: object, name: str) -> Any:
    value = look_up(settings, name)
    if value is None:
        message = f"settings have no {name!r}, which tells how tokens are sharded: give it, or standard.Sharding(...)"
        raise ConfigError(message)
    return value
