"""What every runner stands on: a declaration under its settings, a backend, the step, and its sizes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, TypeVar

import attrs
import torch

from ..backends import choose
from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, Axis, Dim, Sizes
from ..dataflow.bucket import absent_from
from ..dataflow.buffers import Bound, Buffers, SharedMemory, allocate, overlaps, span
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError
from ..dataflow.inputs import Inputs
from ..dataflow.ready import Ready
from ..dataflow.sources import Side
from ..dataflow.views import ViewInfo, viewer
from .config import check_step, checked, checked_names, checked_relations, checked_sizes, declaration_of
from .outputs import map_tensors

V = TypeVar("V", bound=Inputs)
NO_SIZES: Final[Sizes] = {}
NO_BINDINGS: Final[Mapping[str, Bound]] = {}
Lend: TypeAlias = Callable[[torch.Tensor | None], object]
"""Who gets a slot's view before the step's code runs (at capture, and in eager runs), and None after it."""
NO_LOANS: Final[Mapping[str, Lend]] = {}


_STAGED: Final = ("backend", "sizes", "settings", "lend", "ranks", "state")


def staged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of a runner's arguments those that `Stage.of` takes."""
    return {name: options[name] for name in _STAGED if name in options}


def joined(inputs: type[Inputs], sizes: Sizes, known: Sizes) -> Sizes:
    """Sizes, and of those that a runner knows the ones that a declaration asks for.

    ConfigError where another size was given for one that is known.
    """
    axes, sizes = declaration_of(inputs).axes, checked_sizes(sizes)
    for axis, size in known.items():
        if sizes.get(axis, size) != size:
            option = axis.name.lower()
            raise ConfigError(f"sizes of {axis} is {sizes[axis]}, and {option}= is {size}: give {option}= alone")
    return {**sizes, **{axis: size for axis, size in known.items() if axis in axes}}


@attrs.frozen(eq=False)
class Stage(Generic[V]):
    """A declaration class made ready to run: what its settings enable, where it runs, and what runs on its views.

    sizes: sizes of the fixed axes, and capacities of further varying ones. relations: axes that follow from others.
    lend: by slot, who gets its view while the step's code runs. restored: slots that the step writes, to be put back.
    state: the tensors beside slots that are put back after warm-ups, captures and checks; None to find them.
    """

    inputs: type[V]
    declaration: Declaration
    backend: Backend
    step: Callable[[V], Any]
    sizes: Sizes
    relations: Mapping[Axis, Dim]
    lend: Mapping[str, Lend]
    restored: tuple[str, ...]
    state: tuple[torch.Tensor, ...] | None

    @classmethod
    def of(
        cls,
        inputs: type[V],
        step: Callable[[V], Any],
        backend: str | Backend = "auto",
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        relations: Mapping[Axis, Dim] | None = None,
        *,
        carry: tuple[str, ...] = (),
        lend: Mapping[str, Lend] = NO_LOANS,
        ranks: Any = None,
        state: Iterable[torch.Tensor] | None = None,
    ) -> "Stage[V]":
        """Check what a runner is given.

        Raises DeclarationError, ConfigError or BackendUnavailableError, which say what does not fit.
        """
        whole, carry, sizes = declaration_of(inputs), checked_names("carry", carry), checked_sizes(sizes)
        check_step("step", step)
        follow = checked_relations(relations)
        declaration = whole.under(settings, carry, ranks).related(follow)
        known = {axis for name in carry for axis in whole.slots[name].axes}.union(declaration.axes)
        unknown = sorted(axis.name for axis in set(sizes) - known)
        if unknown:
            raise ConfigError(f"sizes names {unknown[0]!r}, an axis that no slot of {declaration.name} has")
        unsized = [axis.name for axis in declaration.axes if axis.fixed and axis not in sizes]
        if unsized:
            raise ConfigError(f"{declaration.name} needs sizes= for its fixed axes {', '.join(unsized)}")
        lend = _checked_loans(declaration, lend)
        slots = declaration.slots
        restored = tuple(name for name in slots if slots[name].restored)
        kept = _checked_state(state)
        return cls(inputs, declaration, choose(backend), step, sizes, follow, lend, restored, kept)

    def allocate(
        self,
        capacity: Sizes,
        bind: Mapping[str, Bound] = NO_BINDINGS,
        shared: SharedMemory | None = None,
        *,
        keep_bound: bool = False,
    ) -> Buffers:
        """Buffers of a given capacity on the backend; shared: what a pool gives of them."""
        backend = self.backend
        made = backend.capabilities, backend.empty, bind, shared
        return allocate(self.declaration, capacity, *made, keep_bound=keep_bound)

    def padded(self, counts: Sizes, said: str) -> Sizes:
        """The padded size of every axis in a bucket, given those of BATCH and TOKENS, which the options `said` decide.

        ConfigError where sizes= has one of these, or lacks that of another varying axis.
        """
        if BATCH in self.sizes or TOKENS in self.sizes:
            raise ConfigError(f"sizes of BATCH and TOKENS follow from {said}: give those")
        padded = {**counts, **self.sizes}
        missing = [axis.name for axis in self.declaration.axes if axis not in padded]
        if missing:
            name = self.declaration.name
            raise ConfigError(f"{name} needs sizes= for {', '.join(missing)}: the most rows that a batch brings")
        return padded

    def absent(self, batch: Any, side: Side) -> frozenset[str]:
        """Optional slots that a batch comes without."""
        return absent_from(self.declaration, batch, side) if self.declaration.optional else frozenset()

    def view(self, ready: Ready, batch: Any) -> V:
        """The view of a fill."""
        return self.viewer(ready)(batch)

    def viewer(self, ready: Ready) -> Callable[[Any], V]:
        """A call that makes the view of a batch that was filled."""
        made: Callable[[Any], V] | None = ready.notes.get("viewer")
        if made is None:
            info = ViewInfo(ready.step, self.relations, self.declaration, exact=ready.exact)
            made = ready.notes["viewer"] = viewer(self.inputs, ready.shown, self.declaration.fields, info)
        return made

    def run(self, view: V, step: Callable[[V], Any] | None = None) -> Any:
        """Run the step, or another in its place.

        Slots are lent before it, and taken back; those that it writes on the way are put back. What it returns of the
        latter is a copy, made before they are, as far as `map_tensors` finds it: inside of the view, or of an object
        that is no container, stands the slot itself, put back. A step that raises leaves them as they are then, so that
        whoever runs it on a padded view must distrust the buffers; live rows are written by every fill.
        """
        step = self.step if step is None else step
        if not self.lend and not self.restored:
            return step(view)
        slots = view.__dict__
        kept = [(slots[name], slots[name].clone()) for name in self.restored if slots[name] is not None]
        with self.lent(view):
            outputs = step(view)
        return _put_back(kept, outputs) if kept else outputs

    @contextlib.contextmanager
    def lent(self, view: Inputs) -> Iterator[None]:
        """While the step's code runs."""
        with contextlib.ExitStack() as loans:
            for name, take in self.lend.items():
                loans.callback(take, None)
                take(view.__dict__[name])
            yield

    def sealed(self, view: V) -> V:
        """The view, of which no micro-batch has what the host computes, nor a part of what replays hand over."""
        info = view._slotgraph_view  # noqa: SLF001 - what a fill leaves there for runners
        if info is not None:
            handed = self.backend.capabilities.host_parameters
            whole = frozenset(self.declaration.parameters.values() if handed else ())
            view._slotgraph_view = attrs.evolve(info, whole=whole, captured=True)  # noqa: SLF001 - as above
        return view


def _checked_state(state: Iterable[torch.Tensor] | None) -> tuple[torch.Tensor, ...] | None:
    """The tensors of `state=`. ConfigError where it is something else."""
    if state is None:
        return None
    strange: list[object] = [state]
    if isinstance(state, Iterable) and not isinstance(state, torch.Tensor | Mapping | str | bytes):
        tensors = tuple(state)
        strange = [one for one in tensors if not isinstance(one, torch.Tensor)]
        if not strange:
            return tensors
    raise ConfigError(
        f"state= is a list of the tensors that the step changes beside its slots, got {type(strange[0]).__name__}"
    )


def _checked_loans(declaration: Declaration, lend: Any) -> dict[str, Lend]:
    """What takes slots. ConfigError where a name is no slot's, or what is to take it cannot be called."""
    checked("lend", "a mapping of slots' names to functions that take their views", lend, Mapping)
    declaration.check_names("lend", lend)
    for name, take in lend.items():
        check_step(f"lend of slot {name!r}", take, "the slot's view")
    return dict(lend)


def _put_back(kept: Sequence[tuple[torch.Tensor, torch.Tensor]], outputs: Any) -> Any:
    """Restore slots to what they held before, and return the outputs, which keep what the step made of them."""
    spans = [span(slot) for slot, _ in kept if slot.numel()]

    def own(tensor: torch.Tensor) -> torch.Tensor:
        inside = tensor.layout == torch.strided and tensor.numel() and overlaps(tensor, spans)
        return tensor.clone() if inside else tensor

    outputs = map_tensors(outputs, own)
    for slot, before in kept:
        slot.copy_(before)
    return outputs
