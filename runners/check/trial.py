"""Trials: runs of a step that nobody asked for, by all ranks at once, which leave slots and state as they were."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.capabilities import DEVICE
from ...dataflow.errors import RankError
from ...dataflow.sampling import Sample
from ...dataflow.slots import Constant, Output, Slot
from ..comparison import info_of, ran_eagerly, state_on
from ..graphs import GraphSet
from ..hooks import Coordinator, Watch
from ..runner import Runner
from ..stage import V
from ..state import State

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
NOTHING: Final[Tensors] = {}


@attrs.frozen
class Together:
    """What the ranks of one runner tell each other, so that all of them run the same.

    Collectives of a step wait for every rank. So what a rank runs next may not depend on what it alone has found.
    Raises RankError, which names them, if ranks do something else, or do not come.
    """

    ranks: Coordinator

    def any(self, one: bool) -> bool:  # noqa: FBT001 - a vote
        """Whether it is so on some rank."""
        return bool(self.first("yes" if one else ""))

    def first(self, text: str, number: int = 0) -> tuple[int, str, int] | None:
        """The first rank that has something to say, what, and its number. None if none has."""
        told = self.ranks.tell("a look at a step, of a check or a debug mode", text, number)
        return next(((rank, *one) for rank, one in enumerate(told) if one[0]), None)

    def least(self, number: int) -> int:
        """The smallest number of all."""
        return min(one for _, one in self.ranks.tell("how many steps there is room for", "", number))

    @contextlib.contextmanager
    def raising(self, what: str) -> Iterator[None]:
        """A block that all ranks run. An error of one of them is raised on it, and told to the others as RankError."""
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, once it is told
            raised = error
        first = self.first("" if raised is None else f"{type(raised).__name__}: {raised}")
        if raised is not None:
            raise raised
        if first is not None:
            raise RankError(f"{what} raised on rank {first[0]}: {first[1]}")


@contextlib.contextmanager
def unwatched(watch: Watch) -> Iterator[None]:
    """Nobody is told of the steps in the block."""
    watchers = watch.watchers
    for watcher in watchers:
        watch.remove(watcher)
    try:
        yield
    finally:
        for watcher in watchers:
            watch.add(watcher)


class Trial(Generic[V]):
    """One filled step that is run again and again, each time from the same slots and state.

    Args:
        runner: The runner, whose watchers are to be told of nothing.
        view: The view that was filled last.
        state: What the step changes outside of its slots.
        one: The batch of the view, to fill it anew after a step raised.

    Attributes:
        slots: What the view has of slots that are not constant.
        filled: What they held after the fill.
        raised: Whether the last run raised on some rank.
        lost: Whether a step raised and nothing can be replayed since.
    """

    def __init__(self, runner: Runner[V], view: V, state: State, one: Sample | None = None) -> None:
        self.runner, self.view, self.state, self.one = runner, view, state, one
        self.runner, self.together = runner, Together(runner.coordinator)
        self.step, self.declared = info_of(view).step, runner.stage.declaration.slots
        self.raised = self.lost = False
        self._wait = runner.stage.backend.synchronize
        self._wait()
        self.filled = {name: tensor.clone() for name, tensor in self.slots.items()}

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """What the view has of slots that are not constant."""
        kept = [name for name, slot in self.declared.items() if not isinstance(slot, Constant)]
        return {name: tensor for name in kept if (tensor := vars(self.view)[name]) is not None}

    def eagerly(self) -> Any:
        """Run the step as it is written."""
        return ran_eagerly(self.runner, self.view)

    def run(
        self, look: Callable[[Any], T], put: Tensors = NOTHING, by: Callable[[], Any] | None = None
    ) -> T | Exception:
        """Run the step once more.

        Args:
            look: Is called with the outputs, before slots and state are put back.
            put: What slots hold instead of what was filled.
            by: Runs the step. By default its graph is replayed.

        Returns:
            What `look` returned, or what the step raised on this rank.
        """
        self._write(put)
        found: T | Exception
        try:
            with self.state.kept():
                found = look(self.runner.replay(self.view) if by is None else by())
                self._wait()
        except Exception as error:  # noqa: BLE001 - whatever a step makes of its slots is a result
            found = error
        self.raised = self.together.any(isinstance(found, Exception))
        if self.raised and by is None:
            self.lost = not self._fill_again()
        else:
            self._write(self.filled)
        return found

    def _write(self, values: Tensors) -> None:
        self._wait()  # a replay may still read slots in host memory
        slots = self.slots
        with torch.no_grad():
            for name, value in values.items():
                slots[name].copy_(value)

    def _fill_again(self) -> bool:
        """Have all slots as they were, and a view that the runner replays after a step that raised. Whether so."""
        try:
            if self.one is not None:
                self.view = self.runner.fill(self.one.batch, **self.one.side)
            self._write(self.filled)
        except Exception:  # noqa: BLE001 - a device that a fault has stopped says so in words of its own
            return False
        return self.one is not None


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
    """A captured runner that is checked. notes: what was left out, and why."""

    runner: Runner[V]
    graphs: GraphSet[V]
    state: State
    seed: int
    read_outside: tuple[str, ...]
    notes: dict[str, None] = attrs.field(factory=dict)

    @property
    def slots(self) -> Mapping[str, Slot]:
        """The slots that its declaration has."""
        return self.runner.stage.declaration.slots

    @property
    def together(self) -> Together:
        """The runner's ranks."""
        return Together(self.runner.coordinator)

    def sources(self, one: Sample) -> list[Any]:
        """What a batch brings for slots."""
        read = (slot.reads(name) for name, slot in self.slots.items())
        return [source.read(one.batch, one.side) for source in read if source is not None]

    def step_of(self, one: Sample) -> Step:
        """The sizes of a batch in the bucket that takes it."""
        runner, bucket = self.runner, self.runner.decide(one.batch, **one.side).bucket
        if bucket is None:
            raise ValueError("no bucket takes this batch")
        return runner.stage.declaration.step(runner.size(one.batch, one.side)[:-1], runner.sizes[bucket])

    def fill(self, one: Sample) -> V:
        """The view of a fill."""
        return self.runner.fill(one.batch, **one.side)

    def run(self, one: Sample) -> Any:
        """What the runner returns for a batch."""
        return self.runner(one.batch, **one.side)

    def trial(self, one: Sample) -> Trial[V]:
        """Fill, to run that step again and again."""
        return Trial(self.runner, self.fill(one), self.state, one)

    def is_filled(self, name: str) -> bool:
        """Whether a fill writes all of a slot. Else the step does, or its graph by a function on the device."""
        slot, declaration = self.slots[name], self.runner.stage.declaration
        late = slot.computes() is not None and declaration.side(name) == DEVICE and self.runner.is_whole
        return not (late or isinstance(slot, Output))


def state_of(runner: Runner[Any], batches: Iterable[Sample], tensors: Iterable[torch.Tensor] | None) -> State:
    """The state of a runner's step: the one given here or to the runner, or what its operators write on some batches.

    Raises:
        CheckError: It is too large to be copied.
    """
    stage, together = runner.stage, Together(runner.coordinator)
    tensors = stage.state if tensors is None else tensors
    if tensors is not None:
        return State.of(stage.backend, tensors)
    found = State(stage.backend)
    for one in batches:
        view = runner.fill(one.batch, **one.side)
        with together.raising("the look at what a step changes"):
            found = found.joined(state_on(runner, view))
    return found
