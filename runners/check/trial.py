"""Trials: runs of a step for a look, not for a batch, by all ranks at once; slots and state are as they were after."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.capabilities import DEVICE
from ...dataflow.errors import RankError, ReplayError
from ...dataflow.slots import Constant, Output, Slot
from ..comparison import info_of, ran_eagerly
from ..graphs import GraphSet
from ..hooks import Coordinator, Watch
from ..runner import Runner
from ..sampling import Sample
from ..stage import V
from ..state import State, draw_on

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
NOTHING: Final[Tensors] = {}


@attrs.frozen
class Together:
    """What ranks tell each other, so that all run the same. RankError names ranks that do something else."""

    ranks: Coordinator

    def any(self, one: object) -> bool:
        """Whether it is so on some rank."""
        return bool(self.first("yes" if one else ""))

    def first(self, text: str, number: int = 0) -> tuple[int, str, int] | None:
        """The first rank that has something to say, what, and its number. None if none has."""
        told = self.ranks.gather("a look at a step, of a check or a debug mode", text, number)
        return next(((rank, *one) for rank, one in enumerate(told) if one[0]), None)

    @contextlib.contextmanager
    def raising(self, what: str) -> Iterator[None]:
        """A block that all ranks run. An error of one of them is raised on it, and told to the others as RankError."""
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, once it is told
            raised = error
        first = self.first("" if raised is None else error_text(raised))
        if raised is not None:
            raise raised
        if first is not None:
            raise RankError(f"{what} raised on rank {first[0]}: {first[1]}")


def error_text(error: BaseException) -> str:
    """What a step raised, in a line."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextlib.contextmanager
def unwatched(watch: Watch) -> Iterator[None]:
    """A block whose steps no watcher is told of."""
    watchers, watch.watchers = watch.watchers, ()
    try:
        yield
    finally:
        watch.watchers = (*watchers, *watch.watchers)


class Trial(Generic[V]):
    """The step filled last, run again and again from the same slots and state; watchers are to be told of nothing.

    one: its batch, to fill it anew after a step raised. filled: what slots that are not constant held after the fill.
    raised: whether the last run raised on some rank. lost: whether a step raised and nothing can be replayed since.
    """

    def __init__(self, runner: Runner[V], view: V, state: State, one: Sample | None = None) -> None:
        self.runner, self.view, self.state, self.one = runner, view, state, one
        self.together = Together(runner.coordinator)
        self.step, self.declared = info_of(view).step, runner.stage.declaration.slots
        self.raised = self.lost = False
        self._wait = self.runner.stage.backend.synchronize
        self._wait()
        self.filled = {name: tensor.clone() for name, tensor in self.slots.items()}

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """What the view has of slots that are not constant."""
        values = vars(self.view)
        return {
            name: values[name]
            for name, slot in self.declared.items()
            if not isinstance(slot, Constant) and values[name] is not None
        }

    def redrawn(self, by: Callable[[], Any] | None = None, times: int = 1) -> Any:
        """Run the step, or its graph, with other random numbers, which follow after others were drawn so many times."""
        for _ in range(times):
            draw_on(self.runner.stage.backend)
        return self.runner.replay(self.view) if by is None else by()

    def eagerly(self) -> Any:
        """Run the step as it is written."""
        return ran_eagerly(self.runner, self.view)

    def run(
        self, look: Callable[[Any], T], put: Tensors = NOTHING, by: Callable[[], Any] | None = None
    ) -> T | Exception:
        """Run the step once more: what `look` makes of the outputs, before all is put back, or what it raised here.

        put: what slots hold instead of what was filled. by: runs the step; by default its graph is replayed.
        """
        self.write(put)
        found: T | Exception
        try:
            with self.state.kept(), self.together.ranks.reporting():
                found = look(self.runner.replay(self.view) if by is None else by())
                self._wait()
        except Exception as error:  # noqa: BLE001 - whatever a step makes of its slots is a result
            found = error
        self.raised = self.together.any(isinstance(found, Exception))
        try:
            if self.raised and by is None:  # slots as they were, and a view that can be replayed
                self.lost = self.one is None
                if self.one is not None:
                    self.view = self.runner.fill(self.one.batch, **self.one.side)
            self.write(self.filled)
        except Exception:  # a device that a fault has stopped says so in words of its own
            if not self.raised:
                raise
            self.lost = True
        return found

    def write(self, values: Tensors) -> None:
        """Have slots hold these values."""
        self._wait()  # a replay may still read slots in host memory
        slots = self.slots
        with torch.no_grad():
            for name, value in values.items():
                slots[name].copy_(value)


@attrs.frozen
class Finding:
    """Something wrong."""

    check: str  # the check that found it
    slot: str | None  # the slot through which it came, if one is to blame
    message: str

    def __str__(self) -> str:
        """On one line."""
        return f"{self.check}: {self.message}"


@attrs.frozen(eq=False)
class Subject(Generic[V]):
    """A captured runner that is checked.

    produce: writes what producers write. random: whether the step draws random numbers on purpose. signed: slots that
    may hold any number below 0, too. notes: what was left out, and why.
    """

    runner: Runner[V]
    graphs: GraphSet[V]
    state: State
    seed: int = 0
    read_outside: tuple[str, ...] = ()
    random: bool = False
    produce: Callable[[V], object] = id
    signed: Collection[str] = ()
    notes: dict[str, None] = attrs.field(factory=dict)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The slots that its declaration has."""
        return self.runner.stage.declaration.slots

    @property
    def together(self) -> Together:
        """The runner's ranks."""
        return Together(self.runner.coordinator)

    def sources(self, one: Sample) -> dict[str, Any]:
        """What a batch brings for slots."""
        sources = self.runner.stage.declaration.sources
        return {name: source.read(one.batch, one.side) for name, source in sources.items()}

    def step_of(self, one: Sample) -> Step:
        """The sizes of a batch in the bucket that takes it."""
        runner, bucket = self.runner, self.runner.decide(one.batch, **one.side).bucket
        if bucket is None:
            raise ValueError("no bucket takes this batch")
        return runner.stage.declaration.step(runner.size(one.batch, one.side)[:-1], runner.sizes[bucket])

    def fill(self, one: Sample) -> V:
        """The view of a fill."""
        view = self.runner.fill(one.batch, **one.side)
        self.produce(view)
        return view

    def trial(self, one: Sample) -> Trial[V]:
        """Fill, to run that step again and again."""
        return Trial(self.runner, self.fill(one), self.state, one)

    def is_filled(self, name: str) -> bool:
        """Whether a fill writes all of a slot. Else the step does, or its graph by a function on the device."""
        late = self.runner.stage.declaration.side(name) == DEVICE and self.runner.is_whole
        return not (late or isinstance(self.slots[name], Output))
