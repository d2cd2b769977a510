"""Trials: runs of a step to examine it, on all ranks at once. They put slots and state back."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar

import attrs
import torch

from ...dataflow.axes import Step
from ...dataflow.capabilities import DEVICE
from ...dataflow.errors import RankError, ReplayError
from ...dataflow.slots import BY_STEP
from ..comparison import info_of, ran_eagerly
from ..engine.graphs import GraphSet
from ..engine.hooks import Coordinator, Watch
from ..engine.runner import Runner
from ..engine.sampling import Sample
from ..engine.state import State, draw_on

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
NOTHING: Final[Tensors] = {}


@attrs.frozen
class Together:
    """What ranks exchange, so that all run the same. Its methods raise RankError if ranks do something else.

    Attributes:
        ranks: Coordinates the ranks.
    """

    ranks: Coordinator

    def any(self, one: object) -> bool:
        """Return whether a value is true on some rank."""
        return bool(self.first("yes" if one else ""))

    def first(self, text: str, number: int = 0) -> tuple[int, str, int] | None:
        """Return the first rank that gives a text, the text, and its number, or None if none does."""
        texts = self.ranks.gather("a look at a step, of a check or a debug mode", text, number)
        return next(((rank, *one) for rank, one in enumerate(texts) if one[0]), None)

    @contextlib.contextmanager
    def raising(self, what: str) -> Iterator[None]:
        """Run a block on all ranks. Raise an error of one rank on it, and as RankError on the others."""
        raised: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know
            raised = error
        first = self.first("" if raised is None else error_text(raised))
        if raised is not None:
            raise raised
        if first is not None:
            raise RankError(f"{what} raised on rank {first[0]}: {first[1]}")


def error_text(error: BaseException) -> str:
    """Return the first line of a step's error, with its type."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextlib.contextmanager
def unwatched(watch: Watch) -> Iterator[None]:
    """Run a block whose steps no watcher sees."""
    watchers, watch.watchers = watch.watchers, ()
    try:
        yield
    finally:
        watch.watchers = (*watchers, *watch.watchers)


@attrs.define(eq=False, slots=False)
class Trial:
    """The step filled last, run again and again from the same slots and state. Watchers must not see it.

    Attributes:
        runner: The runner of the step.
        view: The filled view.
        state: What the step changes besides its slots.
        one: Its batch, to fill it anew after a step raised.
        raised: Whether the last run raised on some rank.
        lost: Whether a step raised and nothing can be replayed since.
        filled: The contents of slots that are not constant, after the fill.
    """

    runner: Runner[Any]
    view: Any
    state: State
    one: Sample | None = None
    raised: bool = False
    lost: bool = False

    def __attrs_post_init__(self) -> None:
        """Keep the filled contents."""
        stage = self.runner.stage
        self.together, self.backend = Together(self.runner.coordinator), stage.backend
        self.declared, self.step = stage.declaration.slots, info_of(self.view).step
        self.backend.synchronize()
        self.filled = {name: tensor.clone() for name, tensor in self.slots.items()}

    @property
    def slots(self) -> dict[str, torch.Tensor]:
        """The view's tensors of slots that are not constant."""
        names = [name for name, slot in self.declared.items() if slot.writers]
        values = vars(self.view)
        return {name: values[name] for name in names if values[name] is not None}

    def redrawn(self, by: Callable[[], Any] | None = None, times: int = 1) -> Any:
        """Run the step, or its graph, with other random numbers: those that follow after so many draws."""
        for _ in range(times):
            draw_on(self.backend)
        return self.runner.replay(self.view) if by is None else by()

    def eagerly(self) -> Any:
        """Run the step as it is written."""
        return ran_eagerly(self.runner, self.view)

    def run(
        self, look: Callable[[Any], T], put: Tensors = NOTHING, by: Callable[[], Any] | None = None
    ) -> T | Exception:
        """Run the step once more, and return what `look` makes of its outputs, or what it raised on this rank.

        Args:
            look: Called with the outputs, before slots and state are put back.
            put: Contents of slots in place of the filled ones.
            by: Runs the step. By default its graph is replayed.
        """
        self.write(put)
        found: T | Exception
        try:
            with self.state.kept(), self.together.ranks.reporting():
                found = look(self.redrawn(by, 0))
                self.backend.synchronize()
        except Exception as error:  # noqa: BLE001 - an error of a step on these slots is a result
            found = error
        self.raised = self.together.any(isinstance(found, Exception))
        try:
            if self.raised and by is None:  # fill again, for a view that can be replayed
                self.lost = self.one is None
                if self.one is not None:
                    self.view = self.runner.fill(self.one.batch, **self.one.side)
            self.write(self.filled)
        except Exception:  # a device that stopped at a fault raises its own errors
            if not self.raised:
                raise
            self.lost = True
        return found

    def write(self, values: Tensors) -> None:
        """Write these values into slots."""
        self.backend.synchronize()  # a replay may still read slots in host memory
        slots = self.slots
        with torch.no_grad():
            for name, value in values.items():
                slots[name].copy_(value)


@attrs.frozen
class Finding:
    """Something wrong.

    Attributes:
        check: The check that found it.
        slot: The slot through which it came, if one is to blame.
        message: What is wrong, and what to do.
    """

    check: str
    slot: str | None
    message: str

    def __str__(self) -> str:
        """Return it on one line."""
        return f"{self.check}: {self.message}"


@attrs.define(eq=False, slots=False)
class Subject:
    """A captured runner that is checked.

    Attributes:
        runner: The runner.
        graphs: Its graphs.
        state: What its step changes besides its slots.
        seed: The seed of random values.
        read_outside: Slots that are read between fill and replay.
        random: Whether the step draws random numbers on purpose.
        produce: Writes what producers write.
        signed: Slots that may also have any number below 0.
        notes: What was not checked, and why.
        slots: The slots of its declaration.
        buffers: Their memory, as its graphs read it.
        together: Its ranks.
    """

    runner: Runner[Any]
    graphs: GraphSet[Any]
    state: State
    seed: int = 0
    read_outside: Collection[str] = ()
    random: bool = False
    produce: Callable[[Any], object] = id
    signed: Collection[str] = ()
    notes: dict[str, None] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Set fields that checks often use."""
        self.declaration, self.backend = self.runner.stage.declaration, self.runner.stage.backend
        self.slots, self.buffers = self.declaration.slots, self.graphs.buffers
        self.together = Together(self.runner.coordinator)

    def sources(self, one: Sample) -> dict[str, Any]:
        """Return a batch's values for slots."""
        return {name: source.read(one.batch, one.side) for name, source in self.declaration.sources.items()}

    def step_of(self, one: Sample) -> Step:
        """Return the sizes of a batch in its bucket. Only batches that a graph takes are checked."""
        runner = self.runner
        bucket = runner.decide(one.batch, **one.side).bucket or 0
        return self.declaration.step(runner.size(one.batch, one.side)[:-1], runner.sizes[bucket])

    def fill(self, one: Sample) -> Any:
        """Fill from a batch, and return the view."""
        view = self.runner.fill(one.batch, **one.side)
        self.produce(view)
        return view

    def trial(self, one: Sample) -> Trial:
        """Fill from a batch, to run that step again and again."""
        return Trial(self.runner, self.fill(one), self.state, one)

    def is_filled(self, name: str) -> bool:
        """Return whether a fill writes all of a slot.

        If not, the step does, or its graph by a function on the device.
        """
        late = self.declaration.side(name) == DEVICE and self.runner.is_whole
        return not (late or self.slots[name].writers == BY_STEP)
