"""The base of all runners: how a step is run, and what can be asked of any runner."""

import abc
from collections.abc import Mapping
from typing import Any, Generic

from ..dataflow.sources import Side
from .decision import Decision
from .parts import Parts
from .stage import V
from .watching import Watch


class Runner(abc.ABC, Generic[V]):
    """Fills a declaration's slots from a batch and runs a step on the view. Subclasses are final, or abstract.

    A call is a fill and a replay; whoever watches a runner is told of both.
    """

    @property
    @abc.abstractmethod
    def parts(self) -> Parts[V]:
        """What it is made of, for tools that look at runners."""

    @property
    @abc.abstractmethod
    def watch(self) -> Watch:
        """Who is told of each step."""

    def __call__(self, batch: Any, **side: Any) -> Any:
        """Run one step and return its outputs for the live rows, valid until the next replay.

        Raises BatchError where the batch does not fit its declaration, ReplayError before `capture`.
        """
        if self.watch.watchers:
            return self.replay(self.fill(batch, **side))
        return self._step(batch, side)

    def fill(self, batch: Any, **side: Any) -> V:
        """Fill the inputs from a batch and return the view that the step sees.

        Raises as a call does; the buffers, the graphs and the batch are then as they were.
        """
        if self.watch.watchers:
            return self.watch.fill(lambda: self._fill_view(batch, side), batch, side)
        return self._fill_view(batch, side)

    def replay(self, view: V) -> Any:
        """Run the step on the view that was filled last. ReplayError where another fill has overwritten it."""
        if self.watch.watchers:
            return self.watch.replay(lambda: self._replay_view(view), view)
        return self._replay_view(view)

    @abc.abstractmethod
    def _step(self, batch: Any, side: Side) -> Any:
        """A fill and a replay at once."""

    @abc.abstractmethod
    def _fill_view(self, batch: Any, side: Side) -> V:
        """A fill."""

    @abc.abstractmethod
    def _replay_view(self, view: V) -> Any:
        """A replay."""

    @abc.abstractmethod
    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""

    @abc.abstractmethod
    def stats(self) -> Mapping[str, Any]:
        """Its books as plain data."""
