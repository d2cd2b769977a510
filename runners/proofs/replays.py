"""Replays of one filled step, each from the same slots and state, with what comes out of them to compare."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Generic

import attrs
import torch
from torch.nn import Module

from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.inputs import Inputs
from ...dataflow.slots import Constant, Slot
from ..bits import first_unequal
from ..runner import Runner
from ..stacked.runner import StackRunner
from ..stage import V
from ..state import State
from ..watching import Watch
from .report import Case
from .together import Together

DEPTH: Final = 4
"""Objects within objects in which outputs are looked for."""
Leaves = Mapping[str, torch.Tensor]
"""Outputs by where they stand in what a step returns, live rows alone, in memory of their own."""


@attrs.frozen
class Difference:
    """Where two replays differ: the output, the row of it, or None where it has none, and both values."""

    output: str
    row: int | None
    before: Any
    after: Any

    def __str__(self) -> str:
        """What changed, as the subject of a sentence."""
        where = f"live row {self.row} of the output" if self.row is not None else "the output"
        return f"{where}{self.output}"


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


def step_of(view: Inputs) -> Step:
    """The sizes of a view that a fill made."""
    info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
    if info is None:
        message = "only a view that a fill handed out has sizes"
        raise ValueError(message)
    return info.step


class Replays(Generic[V]):
    """Replays of the view that was filled last, which begin with the same slots and state each time.

    slots: what the view has of slots that are no constants, by name. step: the view's sizes. case: the batch that it
    was filled from, to fill it anew where a step raised. lost: whether a step raised and nothing can be replayed since.
    """

    def __init__(self, runner: Runner[V], view: V, state: State, case: Case | None = None) -> None:
        self.runner = runner
        self.view = view
        self.step = step_of(view)
        self.declared: Mapping[str, Slot] = runner.parts.stage.declaration.slots
        self.case = case
        self.lost = False
        self._together = Together(runner.parts)
        self._state = state
        self._sync = runner.parts.stage.backend.synchronize
        self.slots = self._present()
        self._sync()
        self.filled = {name: tensor.clone() for name, tensor in self.slots.items()}

    def _present(self) -> dict[str, torch.Tensor]:
        values = vars(self.view)
        held = ((name, values[name]) for name, slot in self.declared.items() if not isinstance(slot, Constant))
        return {name: tensor for name, tensor in held if tensor is not None}

    def restore(self) -> None:
        """Have all slots as the fill left them."""
        self._sync()  # a replay may still read slots in host memory
        with torch.no_grad():
            for name, tensor in self.slots.items():
                tensor.copy_(self.filled[name])

    def run(self, change: Callable[[], None] | None = None) -> Leaves | Exception:
        """The outputs of a replay after a change of slots, or what it raised; all is then as before."""
        return self._run(change, self._leaves)

    def left(self, names: Collection[str], change: Callable[[], None]) -> Leaves | Exception:
        """The same, but what the replay left in slots."""
        return self._run(change, lambda _: {name: self.slots[name].clone() for name in names})

    def _run(self, change: Callable[[], None] | None, look: Callable[[Any], Leaves]) -> Leaves | Exception:
        self.restore()
        if change is not None:
            with torch.no_grad():
                change()
        found: Leaves | Exception
        try:
            with self._state.kept():
                found = look(self.runner.replay(self.view))
                self._sync()
        except Exception as error:  # noqa: BLE001 - whatever a step makes of a poison is a result
            found = error
        if self._together.any(isinstance(found, Exception)):
            self.lost = not self._fill_again()
        else:
            self.restore()
        return found

    def _fill_again(self) -> bool:
        """Have all slots as they were, and a view that the runner believes after a step that raised; whether so."""
        try:
            if self.case is not None:
                self.view = self.runner.fill(self.case.batch, **self.case.side)
                self.slots = self._present()
            self.restore()
        except Exception:  # noqa: BLE001 - a device that a fault has stopped says so in words of its own
            return False
        return self.case is not None

    def _leaves(self, outputs: Any) -> Leaves:
        return {name: self._live(tensor).detach().clone() for name, tensor in named(outputs)}

    def _live(self, tensor: torch.Tensor) -> torch.Tensor:
        """The live rows of an output that is handed out whole, as far as its size tells that it has padded ones."""
        if tensor.dim() == 0 or not self._whole:
            return tensor
        live, padded = self.step.live_sizes, self.step.padded_sizes
        for axis in (TOKENS, BATCH):
            if axis in padded and tensor.shape[0] == padded[axis]:
                return tensor[: live[axis]]
        return tensor

    @property
    def _whole(self) -> bool:
        """Whether the runner hands outputs out with their padded rows."""
        runner = self.runner
        if isinstance(runner, StackRunner):
            return runner.output_rows is None
        graphs = runner.parts.graphs
        return graphs is not None and graphs.rows_each is None


def named(outputs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of what a step returned, each with where it stands in it, as one writes it."""
    yield from _named(outputs, "", DEPTH, set())


def _named(value: Any, place: str, depth: int, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same further in. seen: objects that were looked into, some of which may hold themselves."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(inner, f"{place}[{key!r}]", depth, seen)
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", None)
        for index, inner in enumerate(value):
            where = f"{place}[{index}]" if fields is None else f"{place}.{fields[index]}"
            yield from _named(inner, where, depth, seen)
    elif depth and id(value) not in seen and not isinstance(value, Inputs | type | Module):
        seen.add(id(value))
        for name in _fields_of(value):
            yield from _named(getattr(value, name), f"{place}.{name}", depth - 1, seen)


def _fields_of(value: Any) -> list[str]:
    """The fields of an attrs or data class; of anything else its attributes, as far as it keeps them."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if attrs.has(type(value)):
        return [field.name for field in attrs.fields(type(value))]
    return list(getattr(value, "__dict__", ()))


def difference(before: Leaves, after: Leaves) -> Difference | None:
    """The first place in which two outputs differ by a bit; NaN equals itself."""
    for name, one in before.items():
        other = after.get(name)
        if other is None or other.shape != one.shape or other.dtype != one.dtype:
            return Difference(name, None, list(one.shape), None if other is None else list(other.shape))
        place = first_unequal(one, other)
        if place is not None:
            return Difference(name, place[0] if place else None, one[place].item(), other[place].item())
    return None
