"""A roll call: which ranks came, asked once a rank has waited for long, in the store that the group was made with."""

import contextlib
import time
from typing import TYPE_CHECKING, Final

from ...dataflow.errors import RankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

GRACE: Final = 2.0
"""Seconds that others have to say that they are there, once one knows that something is wrong."""
_PAUSE: Final = 0.02
_STORE_IS_GONE: Final = RuntimeError
"""What stores raise, whichever it is."""
EXCHANGE: Final = "exchange"
WAIT: Final = "wait"
"""What ranks come to, each counted by itself: messages from all, and the end of a step on the device."""


class RollCall:
    """The ranks of one group; store: one that all of them reach, which nobody else uses."""

    def __init__(self, store: "Store", rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def here(self, what: str, number: int) -> None:
        """This rank is at its exchange or wait of that number, or past it."""
        with contextlib.suppress(_STORE_IS_GONE):  # `missing` says so
            self._store.set(f"{what} {self._rank}", str(number))

    def raised(self, text: str) -> None:
        """This rank broke off a step: those who wait for it are told why."""
        with contextlib.suppress(_STORE_IS_GONE):  # as above
            self._store.set(f"raised {self._rank}", text)

    def _last_words(self, rank: int) -> str:
        """What a rank said last of a step that it broke off, or nothing."""
        key = f"raised {rank}"
        with contextlib.suppress(_STORE_IS_GONE):
            return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""
        return ""

    def loss(self, what: str, number: int, told: str, how: str) -> RankError:
        """The error of one that has waited in vain. told: for what; how: in which time, or in what way."""
        missing = self._missing(what, number)
        if missing is None:
            return RankError(f"{told}: ranks were lost, and so was the store that could tell which: see its host")
        if not missing:
            return RankError(f"{told}: all ranks came, but not all {how}, or what connects them broke")
        lost = "; ".join(f"rank {rank} did not come {how}: {self._fate(rank)}" for rank in missing)
        return RankError(f"{told}: {lost}")

    def _fate(self, rank: int) -> str:
        """What is known of a rank that did not come."""
        words = self._last_words(rank)
        return f"it broke off a step before: {words}" if words else "it is dead, stuck, or does something else"

    def _missing(self, what: str, number: int) -> list[int] | None:
        """Ranks that have not said so within the time of grace; None where the store, too, is gone."""
        deadline = time.monotonic() + GRACE
        missing = [rank for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(_STORE_IS_GONE):
            while missing := [rank for rank in missing if not self._came(rank, what, number)]:
                if time.monotonic() > deadline:
                    break
                time.sleep(_PAUSE)
            return missing
        return None

    def _came(self, rank: int, what: str, number: int) -> bool:
        key = f"{what} {rank}"
        return bool(self._store.check([key])) and int(self._store.get(key)) >= number
