"""Watching a runner: what is told of each step, and may look at it, without a word of it in the hot loop."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeVar

from ..dataflow.inputs import Inputs
from ..dataflow.sources import Side

V = TypeVar("V", bound=Inputs)


class Watcher:
    """Is told of each step of a runner, in the order of these methods. Whatever it raises goes to the caller."""

    def before_fill(self, batch: Any, side: Side) -> None:
        """A batch has come; nothing was read or written."""

    def filled(self, view: Inputs) -> None:
        """The slots are filled, and the view is what the caller gets; `runner.agreed` has what ranks agreed on."""

    def before_replay(self, view: Inputs) -> None:
        """The step is about to run on this view, by a graph or eagerly."""

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """The step has run; what is returned goes to the caller in the outputs' place."""
        del view
        return outputs

    def failed(self, error: BaseException) -> None:
        """The fill or the step raised; the caller gets the error."""


WATCHERS: Final[dict[str, Callable[..., Watcher]]] = {}
"""What makes the watcher of each debug mode that has one, in the order in which they watch; `debug` fills it."""


def watchers_of(runner: object, modes: Collection[str], *given: object) -> list[Watcher]:
    """New watchers of a runner's steps, one for each of these debug modes that watches steps, and what it is given."""
    return [make(runner, *given) for mode, make in WATCHERS.items() if mode in modes]


class Watch:
    """The watchers of one runner."""

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        """From the next step on, tell this one too."""
        self.watchers = (*self.watchers, watcher)

    def remove(self, watcher: Watcher) -> None:
        """Tell this one no more."""
        self.watchers = tuple(one for one in self.watchers if one is not watcher)

    def fill(self, fill: Callable[[], V], batch: Any, side: Side) -> V:
        """Fill, and tell of it."""
        with self._failures():
            for watcher in self.watchers:
                watcher.before_fill(batch, side)
            view = fill()
            for watcher in self.watchers:
                watcher.filled(view)
        return view

    def replay(self, replay: Callable[[], Any], view: Inputs) -> Any:
        """Run the step, and tell of it."""
        with self._failures():
            for watcher in self.watchers:
                watcher.before_replay(view)
            outputs = replay()
            for watcher in self.watchers:
                outputs = watcher.replayed(view, outputs)
        return outputs

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            for watcher in self.watchers:
                watcher.failed(error)
            raise
