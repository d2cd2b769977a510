"""Hooks: watchers of a runner's steps, and what coordinates the steps with the same runner on other ranks."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeVar

import attrs
import torch

from ...backends.base import Backend, Event
from ...dataflow.axes import Axis, Live
from ...dataflow.inputs import Inputs, V
from ...dataflow.sources import Side
from .statistics import Decision, RanksData


class Watcher:
    """Watches each step of a runner. The methods are called in this order, and their errors go to the caller."""

    def before_fill(self, batch: Any, side: Side) -> None:
        """Called with a batch before its sources are read and slots are written."""

    def filled(self, view: Inputs) -> None:
        """Called with the view of the filled slots. `runner.agreed` has the decision of all ranks."""

    def before_replay(self, view: Inputs) -> None:
        """Called with the view before the step runs on it, by a graph or eagerly."""

    def replayed(self, view: Inputs, outputs: Any) -> Any:
        """Called with the outputs of the step. Return the outputs for the caller."""
        del view
        return outputs

    def failed(self, error: BaseException) -> None:
        """Called with the error of a fill or step before the caller gets it."""


T = TypeVar("T")
WATCHERS: Final[dict[str, Callable[..., Watcher]]] = {}
"""How to make the watcher of each debug mode, in the order in which they watch. `debug` fills it."""


def watchers_of(runner: object, modes: Collection[str], *given: object) -> list[Watcher]:
    """Make watchers of a runner's steps: one for each of these debug modes that watches steps."""
    return [make(runner, *given) for mode, make in WATCHERS.items() if mode in modes]


class Watch:
    """The watchers of one runner."""

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()

    def add(self, watcher: Watcher) -> None:
        """Add a watcher, from the next step on."""
        self.watchers = (*self.watchers, watcher)

    def remove(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self.watchers = tuple(one for one in self.watchers if one is not watcher)

    def fill(self, fill: Callable[[], V], batch: Any, side: Side) -> V:
        """Fill, and call the watchers before and after."""
        with self._failures():
            for watcher in self.watchers:
                watcher.before_fill(batch, side)
            view = fill()
            for watcher in self.watchers:
                watcher.filled(view)
        return view

    def replay(self, replay: Callable[[], T], view: Inputs) -> T:
        """Run the step, and call the watchers before and after."""
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


@attrs.define(eq=False)
class Loop:
    """A loop of steps that ranks run together.

    Attributes:
        bit: Its bit in the messages of ranks, or 0 if no other rank knows it.
    """

    bit: int = 0


RunStep = Callable[[], Any]


class Coordinator:
    """Coordinates one runner's steps with the same runner on other ranks.

    This class is for a single rank, which exchanges nothing; `Agreement` is for a process group.

    Attributes:
        axes: The axes of live sizes, the axis of the buckets last.
        agreed: What all ranks did in the last step that they agreed on.
        alone: Whether there are no ranks. A process group of one rank has an `Agreement`, too.
        rank: Which rank this is.
        size: How many ranks there are.
        quiet: Whether nothing is exchanged before a step: there is one rank, or all are known to get the same batches.
        timeout: Seconds that this rank waits for the others before a step.
    """

    axes: tuple[Axis, ...] = ()
    agreed: Decision | None = None
    alone: bool = True
    rank: int = 0
    size: int = 1
    quiet: bool = True
    timeout: float = 0.0

    def begin(self) -> None:
        """Begin a step."""

    def agree(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """Return the common decision of all ranks. own: This rank's choice. admit: Raises the errors of the fill."""
        del live, admit
        return own

    def refuse(self, error: BaseException) -> None:
        """Notify the other ranks that this rank's fill ends in an error."""

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step that all ranks run. If it raises, notify the others."""
        return step(*args)

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors are not sent to other ranks, since the caller does that."""
        return contextlib.nullcontext()

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for checks of a batch before its step. It sends their errors to the other ranks."""
        return contextlib.nullcontext()

    def agree_ahead(self, own: Decision, live: Live) -> None:
        """Send the arguments of the next `agree` to the other ranks now."""

    def idle(self, own: Decision, live: Live) -> bool:
        """Return whether all ranks are idle, as this one is, so that none runs a step."""
        del own, live
        return True

    def gather(self, what: str, text: str = "", number: int = 0, *, capturing: bool = False) -> list[tuple[str, int]]:
        """Gather a text and a number from each rank, outside of a step."""
        del what, capturing
        return [(text, number)]

    def barrier(self, what: str, error: Exception | None = None) -> tuple[int, str] | None:
        """Wait until all ranks have finished a part of a capture. Return the first failed rank and its error, or None.

        Args:
            what: The part.
            error: This rank's error, if it failed.
        """
        gathered = self.gather(what, "" if error is None else str(error), int(error is not None), capturing=True)
        return next(((rank, text) for rank, (text, failed) in enumerate(gathered) if failed), None)

    def warm_up(self, step: RunStep, backend: Backend) -> RunStep:
        """Wrap a step for warm-ups, so that it raises RankError if another rank is lost."""
        del backend
        return step

    def loop(self) -> contextlib.AbstractContextManager[Loop]:
        """Return a context that prepares a loop of steps. Ranks agree before each of them."""
        return contextlib.nullcontext(Loop())

    def looping(self, loop: Loop) -> contextlib.AbstractContextManager[None]:
        """Return a context that hands out a loop's steps. If it ends early, ranks still in the loop are notified."""
        del loop
        return contextlib.nullcontext()

    def within(self, loop: Loop) -> contextlib.AbstractContextManager[None]:
        """Return a context in which calls of the runner belong to a loop. Any other call ends the loop."""
        del loop
        return contextlib.nullcontext()

    def agree_in_loop(self, own: Decision, live: Live, loop: Loop, *, idle: bool) -> Decision | None:
        """Return the common decision of all ranks for a step of a loop, or None if all are idle. own: This rank's.

        idle: Whether this rank has no request.
        """
        with self.within(loop):
            return None if idle and self.idle(own, live) else self.agree(own, live, lambda: None)

    def wait(self, event: Event, device: torch.device, *, read: bool = False) -> None:
        """Wait until a device has passed an event.

        read: Whether the event ends a step whose outputs perhaps only this rank reads.
        """
        del device, read
        event.synchronize()

    def as_data(self) -> RanksData:
        """Return the statistics as plain data."""
        return {"rank": self.rank, "size": self.size, "quiet": self.quiet, "over": None, "exchanges": 0, "forced": {}}
