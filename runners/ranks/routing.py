"""Routing as all ranks agree: each says what it would do alone, and each goes where all go."""

from collections.abc import Callable
from typing import Any, Final

from ...dataflow.bucket import Absent
from ...dataflow.errors import RankError
from ...dataflow.sources import NO_SIDE, Side
from ..captured import Captured
from ..decision import Decision
from ..eager import EagerRunner
from ..graphs import GraphSet
from ..router import Router
from .agreement import Agreement

Live = tuple[int, ...]
Run = Callable[[Any, Side], Any]


class Joint:
    """The routes of one runner: its own router's, agreed upon with the same runner of other ranks."""

    def __init__(self, router: Router, graphs: GraphSet[Any], eager: EagerRunner[Any], agreement: Agreement) -> None:
        self.decide: Final = router.decide
        self._router = router
        self._graphs = graphs
        self._eager = eager
        self._agreement = agreement
        self._side = NO_SIDE

    @property
    def alone(self) -> Router | None:
        """Its own router, where that decides for quiet ranks."""
        return self._router if self._agreement.ranks.quiet else None

    def repeating(self, run: Run, live: Live) -> Run:
        """A step of quiet ranks that goes as one before it: they know what all bring, and one broken off is told."""
        ranks, brought = self._agreement.ranks, self._agreement.same(live)
        begin, broke_off = ranks.brought, ranks.broke_off

        def told(batch: Any, side: Side) -> Any:
            begin(brought)
            try:
                return run(batch, side)
            except BaseException as error:
                broke_off(error)
                raise

        return told

    def begin(self, side: Side) -> None:
        """A fill begins."""
        self._side = side
        self._agreement.begin()

    def route(self, live: Live, absent: Absent, batch: Any) -> Captured | Decision:
        """The graph that takes a batch, or why none does, as `Router.route`; the same on all ranks. RankError."""
        if self._agreement.ranks.quiet:
            self._agreement.alone(live)
            return self._router.route(live, absent, batch)
        own = self.decide(live, absent, batch)
        decision = self.settle(own, live, lambda: self._admit(own, live, absent, batch))
        if decision.bucket is None:
            return decision
        captured = self._graphs.get(decision.bucket, absent)
        if captured is None:
            missing = ", ".join(map(repr, sorted(absent)))
            message = f"ranks agreed on bucket {decision.bucket}, of which this one has no graph without {missing}"
            raise RankError(message)
        return captured

    def _admit(self, own: Decision, live: Live, absent: Absent, batch: Any) -> None:
        """BatchError where the fill would raise it."""
        captured = self._graphs.get(own.bucket, absent)
        if captured is None:
            self._eager.admit(batch, live[:-1], absent, self._side)
        else:
            captured.filling.bucket.admit(batch, live[:-1], absent, self._side)

    def settle(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """What all ranks do, where this one would do `own`: see `Agreement.settle`."""
        return self._agreement.settle(own, live, admit)

    def refuse(self, error: BaseException) -> None:
        """This rank's fill ends in an error: see `Agreement.refuse`."""
        self._agreement.refuse(error)
