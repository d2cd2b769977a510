"""Trials: run a runner's filled step again with a change, restore all memory, and compare the results.

Checks, debug modes and replays of recorded steps are built on trials.
"""

import contextlib
import copyreg
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.nn import Module

from ...backends.operators import OperatorWatch
from ...dataflow.axes import Step, extent
from ...dataflow.buffers import Buffers, SharedMemory, contents_kept, span
from ...dataflow.capabilities import DEVICE
from ...dataflow.done import resets
from ...dataflow.errors import RankError, ReplayError
from ...dataflow.fill.bucket import run_all
from ...dataflow.guard import outside_inference
from ...dataflow.inputs import Inputs
from ...dataflow.slots import BY_STEP, Slot
from ...dataflow.views import ViewInfo
from ..engine.bits import text_of, unequal
from ..engine.current import CurrentStep, with_current
from ..engine.graphs import Captured, GraphSet
from ..engine.hooks import Watch
from ..engine.runner import Runner
from ..engine.sampling import Sample
from ..engine.state import State, draw_on
from ..engine.traffic import run_seen

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
NOTHING: Final[Tensors] = {}
MOST_NESTED: Final = 4
"""How many objects within objects are searched for outputs."""
Leaves = Mapping[str, Any]
"""Tensors and values by their path in what a step returns, or by slot."""
Tolerances = Mapping[torch.dtype, tuple[float, float]]
"""By dtype how far numbers may be apart: by a share of the second one, and by an absolute amount. Others must be equal.

Complex numbers have the tolerance of their parts.
"""
BITWISE: Final[Tolerances] = {}
"""Equal bit for bit, except that all NaN are equal."""
USUAL: Final[Tolerances] = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
"""As `torch.testing.assert_close` documents its defaults."""
OTHER_SHAPES: Final[Tolerances] = {
    **USUAL,
    torch.float16: (1e-2, 1e-2),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float32: (1e-3, 1e-3),
}
"""How far a model's outputs for a padded batch may be from those for the batch alone.

Kernels for other shapes add in another order, layer after layer. The poison check, which asks for equal bits, finds
what padded rows do to live ones.
"""


@attrs.frozen
class Finding:
    """A fault that a check found.

    Attributes:
        check: The check that found it.
        slot: The slot that causes it, if one does.
        message: What is wrong, and what to do.
    """

    check: str
    slot: str | None
    message: str

    def __str__(self) -> str:
        """Return it on one line."""
        return f"{self.check}: {self.message}"


@attrs.define(eq=False, slots=False)
class Trial:
    """Runs the last filled step of a captured runner again, as often as needed.

    No watcher may see these runs.

    Attributes:
        runner: The runner.
        graphs: Its graphs.
        state: What its step changes besides its slots.
        seed: The seed of random values.
        read_outside: Slots that are read between fill and replay.
        random: Whether the step draws random numbers on purpose.
        signed: Slots of drawn batches that may also have any number below 0. None if batches are not drawn.
        produce: Writes slots in place of producers.
        notes: What was not checked, and why.
        declaration: Its declaration.
        slots: The slots of its declaration.
        backend: Its device.
        buffers: The memory of the slots, as its graphs read it.
        ranks: Coordinates its ranks.
        one: The batch, or None if the step cannot be filled again.
        view: The filled view.
        step: Its sizes.
        filled: The contents of slots that are not constant, after the fill.
        usual: The step's outputs without any change, to compare other runs with.
        error: The error of the last run on this rank.
        lost: Whether a step raised an error after which nothing can be replayed.
    """

    runner: Runner[Any]
    graphs: GraphSet[Any]
    state: State = attrs.field(default=attrs.Factory(lambda self: State(self.runner.stage.backend), takes_self=True))
    seed: int = 0
    read_outside: Collection[str] = ()
    random: bool = False
    signed: Collection[str] | None = None
    produce: Callable[[Any], object] = id
    notes: dict[str, None] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        """Set fields that checks often use."""
        self.declaration, self.backend = self.runner.stage.declaration, self.runner.stage.backend
        self.slots, self.buffers = self.declaration.slots, self.graphs.buffers
        self.ranks = self.runner.coordinator
        self.usual: Tensors = NOTHING

    # Ranks exchange these values, so that all run the same steps. RankError is raised if a rank does something else.

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

    # Filling and running the step.

    def fill(self, one: Sample) -> None:
        """Fill from a batch, to run that step."""
        view = self.runner.fill(one.batch, **one.side)
        self.produce(view)
        if self.produce is not id:
            view = self.runner.fill(one.batch, **one.side)  # functions on the host may read what producers wrote
        self.take(view, one)

    def take(self, view: Inputs, one: Sample | None) -> None:
        """Use the step that was filled last, by this trial or by the user."""
        self.view = view
        self.one = one
        self.lost = False
        self.step = info_of(view).step
        given = self.declaration, vars(view), self.step.padded_sizes, self.backend.capabilities
        run_all([*resets(*given)])  # the graph does it again
        self.backend.synchronize()
        self.filled: Tensors = {name: tensor.clone() for name, tensor in self._written().items()}

    def _written(self) -> dict[str, torch.Tensor]:
        """Return the view's tensors of slots that are not constant."""
        values = {name: vars(self.view)[name] for name, slot in self.slots.items() if slot.writers}
        return {name: tensor for name, tensor in values.items() if tensor is not None}

    def write(self, values: Tensors) -> None:
        """Write these values into slots."""
        self.backend.synchronize()  # a replay may still read slots in host memory
        slots = self._written()
        with torch.no_grad():
            for name, value in values.items():
                slots[name].copy_(value)

    def run(
        self, look: Callable[[Any], T], put: Tensors = NOTHING, by: Callable[[], Any] | None = None, draws: int = 0
    ) -> T | None:
        """Run the step once more, and put slots, state and random numbers back.

        Return the result of `look`, or None if the step raised on some rank; `error` then has the error of this rank.

        Args:
            look: Called with the outputs, before slots and state are put back.
            put: Contents of slots in place of the filled ones.
            by: Runs the step. By default it replays the graph.
            draws: The number of random numbers to draw first, so that the step draws others.
        """
        self.write(put)
        self.error: Exception | None = None
        found: T | None = None
        try:
            with self.state.kept(), self.ranks.reporting():
                for _ in range(draws):
                    draw_on(self.backend)
                found = look(self.runner.replay(self.view) if by is None else by())
                self.backend.synchronize()
        except Exception as error:  # noqa: BLE001 - an error of a step on these slots is a result
            self.error = error
        has_raised = self.any(self.error is not None)
        try:
            if has_raised and by is None:  # fill again, because the last view cannot be replayed
                self.lost = self.one is None
                if self.one is not None:
                    self.view = self.runner.fill(self.one.batch, **self.one.side)
            self.write(self.filled)
        except Exception:  # a device that has stopped raises errors of its own
            if not has_raised:
                raise
            self.lost = True
        return None if has_raised else found

    def seen(self, outputs: Any) -> Leaves:
        """Copy the live rows of slots, and outputs."""
        return seen(self.view, outputs)

    def eagerly(self) -> Any:
        """Run the step without its graph on the filled view, padded rows included."""
        captured = self.graph
        with torch.no_grad():
            if captured is not None and self.runner.is_whole:  # the fill left the functions on the device to the graph
                captured.filling.bucket.compute_on_device()
            return with_current(CurrentStep(self.view), self.runner.stage.run, self.view)

    def watch(self, watch: OperatorWatch, look: Callable[[Any], object] = id) -> None:
        """Run the step without its graph, while a watch sees its operators."""
        self.run(look, by=lambda: run_seen(watch, self.eagerly))

    @property
    def graph(self) -> Captured | None:
        """The graph of the filled view, or None if its bucket has none, or it runs eagerly."""
        return self.runner.graph_of(self.view)

    @property
    def frozen(self) -> Mapping[str, Any]:
        """The values of fields that the graph of the filled view has frozen."""
        return {} if self.graph is None else self.graph.filling.bucket.frozen

    @contextlib.contextmanager
    def slots_kept(self) -> Iterator[None]:
        """Run a block, and put the contents of all slots back. The next fill then resets their tails."""
        self.backend.synchronize()  # steps may still read slots in host memory
        with contents_kept(self.buffers):
            try:
                yield
            finally:
                self.backend.synchronize()

    def find_state(self) -> State:
        """Return the state that the step changes besides its slots, on the view that was filled last."""
        given = self.runner.stage.state
        state = State.of(self.backend, given or (), self.buffers)
        if given is not None:
            return state
        with self.slots_kept():
            return State.found(self.backend, self.spans(), self.eagerly).joined(state)

    def spans(self) -> list[tuple[int, int]]:
        """Return the address ranges of the slots."""
        every = [*self.buffers, *(self.runner.eager.buffers or ())]
        return [span(one.tensor) for one in every if one.nbytes]

    # Facts about batches.

    def sources(self, one: Sample) -> dict[str, Any]:
        """Return a batch's values for slots."""
        return {name: source.read(one.batch, one.side) for name, source in self.declaration.sources.items()}

    def is_filled(self, name: str) -> bool:
        """Return whether a fill writes all of a slot.

        If not, the step writes it, or the graph does by a function on the device.
        """
        late = self.declaration.side(name) == DEVICE and self.runner.is_whole
        return not (late or self.slots[name].writers == BY_STEP)


def error_text(error: BaseException) -> str:
    """Return the first line of a step's error, with its type."""
    if isinstance(error, ReplayError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextlib.contextmanager
def unwatched(watch: Watch) -> Iterator[None]:
    """Run a block whose steps no watcher sees."""
    watchers = watch.watchers
    watch.watchers = ()
    try:
        yield
    finally:
        watch.watchers = (*watchers, *watch.watchers)


def cloned(buffers: Buffers, device: torch.device | None = None) -> Buffers:
    """Return the same bytes in memory of their own, by default on the same device."""
    with outside_inference(), torch.no_grad():
        copied = {one.name: attrs.evolve(one, tensor=one.tensor.to(device, copy=True), owner=None) for one in buffers}
    return Buffers(copied, buffers.capacity, SharedMemory())


@attrs.frozen
class Mismatch:
    """The first difference between two runs in one leaf.

    Attributes:
        where: The slot, or the path in the outputs.
        index: The first element that differs. It is empty if there are no dims, or if shapes or values differ.
        values: The values of the two runs.
        names: The names of the two runs.
        count: How many elements differ.
    """

    where: str
    index: tuple[int, ...]
    values: tuple[Any, Any]
    names: tuple[str, str]
    count: int = 1

    @property
    def slot(self) -> str | None:
        """The slot, or None for an output."""
        return self.where[6:-1] if self.where.startswith("slot ") else None

    @property
    def row(self) -> int | None:
        """The row, or None if it has no rows."""
        return self.index[0] if self.index else None

    def __str__(self) -> str:
        """Return the difference, as `outputs[0] row 3: graph 1.5, eager 2.5`."""
        place = f" row {self.row}" if self.index else ""
        if len(self.index) > 1:
            place += f", at {[*self.index]}"
        more = f" ({self.count} elements differ)" if self.count > 1 else ""
        (one, other), (first, second) = self.values, self.names
        return f"{self.where}{place}: {first} {one}, {second} {other}{more}"


def info_of(view: Inputs) -> ViewInfo:
    """Return the sizes and the declaration of a view that a fill made."""
    info = view._slotgraph_view  # noqa: SLF001 - a fill sets it for runners
    if info is None:
        raise ValueError("only a view that a fill handed out has sizes")
    return info


def live_part(slot: Slot, tensor: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the live rows of a padded view."""
    return tensor[tuple(map(slice, extent(slot.shape, step.live_sizes)))]


def tails_of(slot: Slot, tensor: torch.Tensor, step: Step) -> Iterator[torch.Tensor]:
    """Return the parts of a padded view beyond the live rows, one along each varying dim. They may overlap."""
    for dim in slot.varying:
        live = slot.shape[dim].at(step.live_sizes)
        if live < tensor.shape[dim]:
            yield tensor.narrow(dim, live, tensor.shape[dim] - live)


def seen(view: Inputs, outputs: Any) -> Leaves:
    """Copy the results of a run: live rows of copied slots, outputs, output slots and computed slots."""
    info = info_of(view)
    copied = dict[str, Any]()
    written = dict[str, Any]()
    computed = dict[str, Any]()
    for name, slot in info.declaration.slots.items():
        tensor = vars(view)[name]
        kind = None
        if slot.writers == BY_STEP:
            kind = written
        elif name in info.declaration.functions:
            kind = computed
        elif name in info.declaration.sources and not slot.rewritten:
            kind = copied
        if kind is not None and tensor is not None:
            kind[f"slot {name!r}"] = live_part(slot, tensor, info.step).detach().clone()
    returned: dict[str, Any] = copies(outputs, "outputs")
    if not returned and not isinstance(outputs, Inputs):
        returned = {"outputs": outputs}
    return {**copied, **returned, **written, **computed}


def copies(outputs: Any, name: str) -> dict[str, torch.Tensor]:
    """Return copies of the tensors in a step's outputs, by path."""
    return {f"{name}{place}": tensor.detach().clone() for place, tensor in named(outputs)}


def named(
    value: Any, place: str = "", depth: int = MOST_NESTED, known: frozenset[int] = frozenset()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a step's outputs, each with its path. known: The containers of this part."""
    parts: dict[str, Any] = {}
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        parts = {f"[{key!r}]": inner for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        parts = {f"[{at}]" if fields is None else f".{fields[at]}": inner for at, inner in enumerate(value)}
    elif depth and id(value) not in known and not isinstance(value, Inputs | type | Module):
        depth = depth - 1
        known = known | {id(value)}
        slots: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle has them
        parts = {f".{name}": getattr(value, name, None) for name in (*slots, *getattr(value, "__dict__", ()))}
    for part, inner in parts.items():
        yield from named(inner, place + part, depth, known)


def mismatches(
    one: Leaves,
    other: Leaves,
    tolerance: Tolerances = BITWISE,
    names: tuple[str, str] = ("graph", "eager"),
    step: Step | None = None,
) -> Iterator[Mismatch]:
    """Yield the first difference of each leaf. step: The sizes of the step if only one of the runs may be padded."""
    for where in dict.fromkeys((*one, *other)):
        mine = one.get(where)
        others = other.get(where)
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor) and _comparable(mine, others, step):
            both = tuple(map(slice, map(min, mine.shape, others.shape)))
            mine, others = mine[both], others[both].to(mine.device)
            places = _apart(mine, others, tolerance).nonzero()
            if len(places):
                index = tuple(places[0].tolist())
                yield Mismatch(where, index, (mine[index].item(), others[index].item()), names, len(places))
        elif isinstance(mine, torch.Tensor) or not _same(mine, others):
            yield Mismatch(where, (), (text_of(mine), text_of(others)), names)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values that are not tensors are equal, if their type defines that. NaN equals itself."""
    if one is other or type(one) is not type(other) or getattr(type(one), "__eq__", None) is object.__eq__:
        return type(one) is type(other)
    return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - a test for NaN


def _comparable(one: torch.Tensor, other: torch.Tensor, step: Step | None) -> bool:
    """Return whether two tensors have the same dtype, and the same shape except for padding."""
    if one.dtype != other.dtype or step is None or one.dim() != other.dim():
        return (one.dtype, one.shape) == (other.dtype, other.shape)
    padding = [(padded, step.live_sizes[axis]) for axis, padded in step.padded_sizes.items()]
    pairs = [(max(pair), min(pair)) for pair in zip(one.shape[1:], other.shape[1:], strict=True)]
    return all(big == small or any(big * live == small * padded for padded, live in padding) for big, small in pairs)


def _apart(one: torch.Tensor, other: torch.Tensor, tolerance: Tolerances) -> torch.Tensor:
    """Return a mask of the elements that differ by more than the tolerance."""
    differs = unequal(one, other)
    if differs.any() and (one.is_floating_point() or one.is_complex()):
        wide = torch.complex128 if one.is_complex() else torch.float64
        mine = one.to(wide)
        others = other.to(wide)
        differs &= ~(mine.isnan() & others.isnan())
        near = tolerance.get(one.dtype.to_real())
        if near is not None:
            differs &= ~torch.isclose(mine, others, *near)
    return differs
