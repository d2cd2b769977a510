"""Together: the ranks of a runner while its steps are run more often than asked, so that all of them run the same.

Collectives of a step wait for every rank. What a rank runs next must then hang on nothing that it alone has found: the
ranks ask each other wherever that is so.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ...dataflow.errors import RankError
from ..coordination import Coordinator, T
from ..parts import Parts
from ..recording.ranks import RecordedRanks


class Together:
    """What the ranks of one runner tell each other; of a runner that has no others, what it tells itself.

    Raises RankError, which names them, where ranks do something else, or do not come.
    """

    def __init__(self, parts: Parts[Any]) -> None:
        recorded = isinstance(parts.stage.declaration.ranks, RecordedRanks)
        self._coordinator = Coordinator() if recorded else parts.coordinator

    @property
    def rank(self) -> int:
        """Which one this is."""
        return self._coordinator.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._coordinator.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that shows what all do."""
        return self.rank == 0

    def begin(self, what: Callable[[], str]) -> None:
        """All begin the same thing; what it is must be the same for all."""
        if self.size > 1:
            self._coordinator.tell(what())

    def any(self, one: bool) -> bool:  # noqa: FBT001 - a vote
        """Whether it is so on some rank."""
        return bool(self.first("yes" if one else ""))

    def first(self, text: str, number: int = 0) -> tuple[int, str, int] | None:
        """The first rank that has something to say, what, and its number; None where none has."""
        told = self._coordinator.tell("a look at a step, of a check or a debug mode", text, number)
        return next(((rank, *one) for rank, one in enumerate(told) if one[0]), None)

    def least(self, number: int) -> int:
        """The smallest number of all."""
        return min(one for _, one in self._coordinator.tell("how many steps there is room for", "", number))

    @contextlib.contextmanager
    def raising(self, what: str) -> Iterator[None]:
        """A block that all ranks run: an error of one of them is raised on it, and told to the others as RankError."""
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, once it is told
            raised = error
        first = self.first("" if raised is None else f"{type(raised).__name__}: {raised}")
        if raised is not None:
            raise raised
        if first is not None:
            message = f"{what} raised on rank {first[0]}: {first[1]}"
            raise RankError(message)

    def run(self, call: Callable[[], T]) -> T:
        """Run something that all ranks run. Ranks that wait for this one are told if it raises."""
        return self._coordinator.run(call)
