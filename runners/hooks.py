"""Hooks: what watches the steps of a runner, and what coordinates them with the same runner on other ranks."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, TypeVar

import attrs
import torch

from ..backends.base import Backend, Event
from ..dataflow.axes import Axis, Live
from ..dataflow.inputs import Inputs
from ..dataflow.sources import Side
from .sampling import Sample
from .statistics import Decision, RanksData

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


@attrs.define(eq=False)
class Loop:
    """A loop of steps that ranks run together.

    Attributes:
        every: After how many steps they agree on a bucket.
        bit: The bit by which all ranks know it; 0 where no other rank does.
    """

    every: int
    bit: int = 0


T = TypeVar("T")
Step = Callable[[], Any]


class Coordinator:
    """Coordinates one runner's steps with the same runner on other ranks.

    This class is for a single rank, which asks no other; `Agreement` is for a process group.

    Attributes:
        axes: Those of live sizes, the axis of the buckets last.
        agreed: What all ranks did in the last step that they agreed on.
        empty: An idle rank's batch, once there was one.
        alone: Whether there are no ranks: nothing is asked, and nothing told. A process group of one rank is told.
        rank: Which rank this is.
        size: How many ranks there are.
        quiet: Whether nothing is exchanged before a step: there is one rank, or all are known to get the same batches.
        timeout: Seconds that this rank waits for the others before a step.
    """

    axes: tuple[Axis, ...] = ()
    agreed: Decision | None = None
    empty: Sample | None = None
    alone: bool = True
    rank: int = 0
    size: int = 1
    quiet: bool = True
    timeout: float = 0.0

    def begin(self) -> None:
        """A fill begins."""

    def settle(self, own: Decision, live: Live, admit: Callable[[], None]) -> Decision:
        """What all ranks do, where this one would do `own`. admit: raises what the fill to come would raise."""
        del live, admit
        return own

    def refuse(self, error: BaseException) -> None:
        """This rank's fill ends in an error."""

    def run(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step that all ranks run. Ranks that wait for this one are told if it raises."""
        return step(*args)

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """A block whose errors the caller reports to the other ranks itself."""
        return contextlib.nullcontext()

    def before(self) -> contextlib.AbstractContextManager[None]:
        """A block that looks at a batch before its fill. Ranks that wait for this one are told if it is refused."""
        return contextlib.nullcontext()

    def ahead(self, own: Decision, live: Live) -> None:
        """Tell the other ranks now what `settle` will be asked for next."""

    def idle(self, own: Decision, live: Live) -> bool:
        """Whether all ranks are idle, as this one is, so that none runs a step."""
        del own, live
        return True

    def tell(self, what: str, text: str = "", number: int = 0, *, capturing: bool = False) -> list[tuple[str, int]]:
        """What each rank says at one place beside the steps, this one a text and a number."""
        del what, capturing
        return [(text, number)]

    def meet(self, what: str, error: Exception | None = None) -> tuple[int, str] | None:
        """Wait until all ranks are done with a part of a capture. The first that failed and its error, if any did."""
        told = self.tell(what, "" if error is None else str(error), int(error is not None), capturing=True)
        return next(((rank, text) for rank, (text, failed) in enumerate(told) if failed), None)

    def warm_up(self, step: Step, backend: Backend) -> Step:
        """A step as warm-ups run it: it raises RankError once a rank is lost."""
        del backend
        return step

    def loop(self, every: int) -> contextlib.AbstractContextManager[Loop]:
        """A block that prepares steps which follow one another, of which ranks agree on each `every`th."""
        return contextlib.nullcontext(Loop(every))

    def looping(self, loop: Loop) -> contextlib.AbstractContextManager[None]:
        """A block that hands out a loop's steps. Ranks that go on with the loop are told if it ends early."""
        del loop
        return contextlib.nullcontext()

    def within(self, loop: Loop) -> contextlib.AbstractContextManager[None]:
        """A block in which a loop calls its runner: any other call of the runner ends the loop."""
        del loop
        return contextlib.nullcontext()

    def follow(self, own: Decision, live: Live, loop: Loop, *, idle: bool) -> Decision | None:
        """What all ranks do in a step of a loop, where this one would do `own`.

        idle: whether this rank has no request. None where all ranks are idle, so that none runs the step.
        """
        del live, loop
        return None if idle else own

    def wait(self, event: Event, device: torch.device, *, read: bool = False) -> None:
        """Wait until a device is past an event. read: the end of a step, whose outputs only this rank may read."""
        del device, read
        event.synchronize()

    def as_data(self) -> RanksData:
        """The books, as plain data."""
        return {"rank": self.rank, "size": self.size, "quiet": self.quiet, "over": None, "exchanges": 0, "forced": {}}
