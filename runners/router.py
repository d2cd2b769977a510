"""Routing: which bucket a batch goes to, or why it runs eagerly."""

import functools
import reprlib
from collections.abc import Callable, Collection
from typing import Any

import attrs

from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ..dataflow.bucket import Absent
from ..dataflow.computation import field_of
from ..dataflow.declaration import Declaration
from ..dataflow.errors import RankError, ReplayError
from ..dataflow.sources import Side, look_up
from .buckets import Buckets
from .captured import Captured
from .coordination import Coordinator, Live
from .decision import Decision, Path, Why
from .graphs import GraphSet

Admit = Callable[[Any, Live, Side], None]


class Router:
    """Decides for one runner; a table over row counts, so that a decision is a look-up.

    coordinator: with other ranks, which may decide otherwise. admit: raises what an eager fill would, before they are
    told. enabled: whether anything is captured at all; without, every decision is eager. leading: axes that the bucket
    decides. path: what a batch takes that fits one.
    """

    def __init__(
        self,
        declaration: Declaration,
        buckets: Buckets,
        capacity: Sizes,
        graphs: GraphSet[Any],
        coordinator: Coordinator,
        admit: Admit,
        *,
        enabled: bool = True,
        leading: Collection[Axis] = (BATCH, TOKENS),
        path: Path = "graph",
    ) -> None:
        self._enabled = enabled
        self._buckets = buckets
        self._graphs = graphs
        self._coordinator = coordinator
        self._admit_eagerly = admit
        self._table = buckets.table()
        self._fits = {rows: Decision(path, rows, "fits", f"bucket {rows} fits") for rows in buckets.sizes}
        self._counted = "rows" if BATCH in leading else "tokens"
        own = [(i, axis) for i, axis in enumerate(declaration.varying) if axis not in leading]
        self._limits = [(i, axis, capacity[axis]) for i, axis in own]
        self._fixed_fields = {
            name: field_of(None, name, default)
            for name, default in declaration.fields.items()
            if default is not attrs.NOTHING
        }

    def route(self, live: Live, absent: Absent, batch: Any, side: Side) -> Captured | Decision:
        """The graph that takes a batch, or why none does, the same on all ranks.

        Raises ReplayError before anything is captured, and RankError if the ranks cannot agree.
        """
        if not self._coordinator.quiet:
            return self._agreed_route(live, absent, batch, side)
        self._coordinator.bring(live)
        decision = self.decide(live, absent, batch)
        captured = self._graphs.get(decision.bucket, absent)
        if captured is None:  # a late capture that failed is decided anew
            return decision if decision.path == "eager" else self.decide(live, absent, batch)
        return captured

    def _agreed_route(self, live: Live, absent: Absent, batch: Any, side: Side) -> Captured | Decision:
        """The route that all ranks agree on."""
        own = self.decide(live, absent, batch)
        admit = functools.partial(self._admit, own, live, absent, batch, side)
        decision = self._coordinator.settle(own, live, admit)
        if decision.bucket is None:
            return decision
        captured = self._graphs.get(decision.bucket, absent)
        if captured is None:
            missing = ", ".join(map(repr, sorted(absent)))
            message = f"ranks agreed on bucket {decision.bucket}, of which this one has no graph without {missing}"
            raise RankError(message)
        return captured

    def _admit(self, own: Decision, live: Live, absent: Absent, batch: Any, side: Side) -> None:
        """BatchError where the fill would raise it."""
        captured = self._graphs.get(own.bucket, absent)
        if captured is None:
            self._admit_eagerly(batch, live[:-1], side)
        else:
            captured.filling.bucket.admit(batch, live[:-1], absent, side)

    def decide(self, live: Live, absent: Absent, batch: Any) -> Decision:
        """The path of a batch with these live sizes, the leading axis last. ReplayError before anything is captured."""
        rows = live[-1]
        bucket = self._table[rows] if rows < len(self._table) else None
        if bucket is not None and self._graphs.has(bucket, absent):
            for index, _, most in self._limits:
                if live[index] > most:
                    return self._refusal(live, absent, batch)
            if self._fixed_fields and self._differing(batch):
                return self._refusal(live, absent, batch)
            return self._fits[bucket]
        return self._refusal(live, absent, batch)

    def _refusal(self, live: Live, absent: Absent, batch: Any) -> Decision:
        """Why no graph takes the batch."""
        report = self._graphs.report
        if report is None:
            message = "nothing is captured yet: call capture() first"
            raise ReplayError(message)
        if not self._enabled:
            return _eager("disabled", "graphs are switched off, by graphs=False")
        rows = live[-1]
        bucket = self._buckets.fit(rows)
        if bucket is None or any(live[index] > most for index, _, most in self._limits):
            return _eager("too_large", self._too_large(live))
        if self._table[rows] is None:
            share, most_waste = self._buckets.waste(rows, bucket), self._buckets.max_waste
            return _eager("waste", f"bucket {bucket} would be {share:.0%} padding, over the limit of {most_waste:.0%}")
        if bucket in report.failed:
            return _eager("not_captured", report.failed[bucket])
        if not self._graphs.has(bucket, absent):
            names = ", ".join(map(repr, sorted(absent)))
            return _eager("absent", f"no graph was captured without {names}; pass absent=[{{{names}}}] to capture one")
        name = self._differing(batch)
        came, seen = _brief(look_up(batch, name)), self._fixed_fields[name]
        return _eager("field_differs", f"field {name!r} is {came}, not {seen!r}, with which graphs were captured")

    def _too_large(self, live: Live) -> str:
        for index, axis, most in self._limits:
            if live[index] > most:
                return f"{live[index]} rows on {axis} are more than the {most} of every bucket"
        return f"{live[-1]} {self._counted} are more than the largest bucket, {self._buckets.largest}"

    @property
    def decides_by_fields(self) -> bool:
        """Whether some fields must have the values that graphs saw."""
        return bool(self._fixed_fields)

    def same_fields(self, batch: Any) -> bool:
        """Whether all of them do."""
        return not self._differing(batch)

    def _differing(self, batch: Any) -> str:
        """The first field whose value in the batch is not the one that graphs saw, or nothing."""
        for name, captured in self._fixed_fields.items():
            value = look_up(batch, name)
            if value is not None and not _same(value, captured):
                return name
        return ""


def _same(value: Any, captured: Any) -> bool:
    """Whether two field values are one; a tensor or an array, of which `==` makes another, is never the same."""
    return value is captured or (not hasattr(value, "shape") and bool(value == captured))


def _brief(value: Any) -> str:
    """A field's value in a sentence; of a tensor or an array its kind alone, which asks no device."""
    return type(value).__name__ if hasattr(value, "shape") else reprlib.repr(value)


def _eager(why: Why, reason: str) -> Decision:
    return Decision("eager", None, why, reason)
