"""State: memory outside of slots that a step changes, such as a KV cache, and tensors that it uses, such as weights.

Warm-ups, captures, checks and debug modes run a step without a request of the user, and restore its state. The state is
found by running the step once and recording what its operators write. Python objects are not found, nor is what a
kernel writes that is launched outside torch's dispatcher: give `state=` for those.
"""

import contextlib
import copyreg
import functools
import random
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter, itemgetter
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends import choose
from ...backends.base import Backend
from ...dataflow.buffers import Buffer, Buffers, overlaps, span
from ...dataflow.errors import CaptureError, CheckError, place_now
from ...dataflow.guard import outside_inference
from ...dataflow.inputs import Inputs
from ...dataflow.slots import BY_STEP
from ...dataflow.views import ordinary_alias
from .bits import bits, first_unequal, text_of
from .current import current_step
from .statistics import human_bytes
from .traffic import Traffic, run_seen

COPY_SHARE: Final = 0.5  # copies of a state may take this share of a device's free memory
ELEMENT: Final = 16  # bytes of the largest element, a complex number
MOST_CALLS: Final = 12  # the most calls that lead from the step to a tensor
MOST_OBJECTS: Final = 200_000  # the most objects that are searched
CLOSED: Final = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    torch.dtype,
    Inputs,
)
"""Types whose objects are not searched."""
_LOST: Final = (AttributeError, LookupError, TypeError, ValueError)
"""What is raised if a path to a tensor no longer exists."""
_MODULE: Final = ("_parameters", "_buffers", "_modules")
Spans = Sequence[tuple[int, int]]
CopiedPieces = Sequence[torch.Tensor]
"""Copies of a state's pieces, or masks of the words in which they differ."""
Touched = Mapping[int, AbstractSet[str]]
Index = tuple[Any, ...]
Leads = tuple[Callable[[Any], Any], ...]


@attrs.frozen(eq=False, slots=False)
class Piece:
    """Memory that a step changes or uses.

    Attributes:
        memory: The tensor.
        label: Its name in messages.
        index: The index of the elements that the step changes; empty for all elements.
        given: Whether it comes from the user's `state=`.
        kind: "parameter" or "buffer" of a module, or "tensor".
    """

    memory: torch.Tensor
    label: str
    index: Index = ()
    given: bool = False
    kind: str = "tensor"

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of one copy."""
        return self.memory[self.index].nbytes

    def copy(self) -> torch.Tensor:
        """Return a copy of its present contents."""
        self._check_size()
        return self.memory[self.index].clone()

    def restore(self, before: torch.Tensor) -> None:
        """Write earlier contents back."""
        self._check_size()
        self.memory[self.index] = before

    def _check_size(self) -> None:
        """Raise CheckError if its memory has become smaller."""
        end = self.memory.storage_offset() * self.memory.itemsize + span(self.memory)[1] - self.memory.data_ptr()
        if self.memory.untyped_storage().nbytes() < end:
            raise CheckError(f"{self.label} has become smaller since it was found: a check cannot restore it")


def _free_on(backend: Backend, device: torch.device) -> int:
    return (backend if backend.device.type == device.type else choose("cpu")).memory().free


@attrs.frozen(eq=False)
class State:
    """The memory outside of its slots that a step changes, together with the state of random generators.

    Attributes:
        backend: The device of the step.
        pieces: The memory that it changes.
        taken: Storages that the run used in which the state was found, each with the operators that read or wrote it.
        free: Reads how much memory of a device is free.
        holder: The object from which the pieces are reached, for their names in errors.
    """

    backend: Backend
    pieces: tuple[Piece, ...] = ()
    taken: Touched = attrs.field(factory=dict)
    free: Callable[[Backend, torch.device], int] | None = None
    holder: Callable[..., Any] | None = None

    @classmethod
    def of(cls, backend: Backend, tensors: Iterable[torch.Tensor], slots: Iterable[Buffer] = ()) -> "State":
        """Make a state of the given tensors, or parts of them, and of slots that are state.

        Other memory that the step changes is not restored.
        """
        found = [(f"the given {_text(one)}", one) for one in tensors]
        found += [(f"slot {one.name!r}", one.tensor) for one in slots if one.slot.is_state]
        return cls(backend, tuple(Piece(ordinary_alias(one), label, given=True) for label, one in found if one.numel()))

    @classmethod
    def found(
        cls,
        backend: Backend,
        slots: Spans,
        run: Callable[[], object],
        *,
        exact: bool = False,
        holder: Callable[..., Any] | None = None,
        inside: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> "State":
        """Run a step once, record what it changes, and restore it. Raise CheckError if there is no room for copies.

        Args:
            backend: The device of the step.
            slots: The memory of slots, which does not count as state.
            run: Runs the step.
            exact: Whether to keep only the elements that this run writes, not whole storages.
            holder: The object from which the pieces are reached, for their names in errors.
            inside: Called before an operator writes a part of a slot.
        """
        pieces = list[Piece]()
        copies = list[torch.Tensor]()
        known = set[Hashable]()
        refused = list[CheckError]()
        free = functools.cache(_free_on)

        def note(tensor: torch.Tensor, operator: str, args: Sequence[Any]) -> None:
            low, high = span(tensor)
            if low == high:
                return
            if any(start <= low and high <= stop for start, stop in slots):
                inside(tensor)
                return
            with outside_inference(), torch.no_grad():  # make ordinary tensors, whatever modes are on
                index = _written_index(operator, args) if exact else ()
                view: Hashable = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                key = view if exact else tensor.untyped_storage()._cdata  # noqa: SLF001 - torch compares storages by it
                if not index and key in known:
                    return
                known.update(() if index else (key,))
                for memory in [ordinary_alias(tensor)] if exact else _without(tensor, sorted(slots)):
                    piece = Piece(memory, f"the {_text(tensor)} that {operator} writes", index)
                    try:
                        cls(backend, (*pieces, piece), {}, free, holder).check_room()
                    except CheckError as error:  # raise it even if the step caught it
                        refused.append(error)
                        raise
                    pieces.append(piece)
                    copies.append(piece.copy())

        traffic = Traffic(writes=note)
        with _random_kept(backend):
            try:
                run_seen(traffic, run)
            finally:  # the last piece first, since pieces may overlap
                cls(backend, tuple(pieces[::-1])).restore(copies[::-1])
        if refused:
            raise refused[0]
        return cls(backend, tuple(pieces), traffic.found)

    def joined(self, other: "State") -> "State":
        """Return both states as one."""
        known = {span(piece.memory) for piece in self.pieces}
        pieces = (*self.pieces, *(one for one in other.pieces if span(one.memory) not in known))
        taken = {key: {*self.taken.get(key, ()), *other.taken.get(key, ())} for key in {**self.taken, **other.taken}}
        return State(self.backend, pieces, taken)

    def check_room(self, copies: int = 1) -> None:
        """Raise CheckError if so many copies at once would take more than a share of the free memory."""
        for device in {piece.memory.device for piece in self.pieces}:
            nbytes = sum(piece.nbytes for piece in self.pieces if piece.memory.device == device)
            room = (self.free or _free_on)(self.backend, device)
            if copies * nbytes > COPY_SHARE * room:
                them = "a copy" if copies == 1 else f"{copies} copies"
                names = {
                    one.untyped_storage().data_ptr(): f"{name}: "
                    for name, _, one in reached(self.holder)
                    if _address(one)
                }
                labels = (names.get(one.memory.untyped_storage().data_ptr(), "") + one.label for one in self.pieces)
                named = "; ".join(dict.fromkeys(labels))
                raise CheckError(
                    f"the step changes {human_bytes(nbytes)} on {device} besides its slots ({named}), of which {them} "
                    f"would take more than {COPY_SHARE:.0%} of the {human_bytes(room)} that are free: give state= with "
                    "those tensors, or parts of them, that must be restored after warm-ups and checks"
                )

    def copy(self) -> CopiedPieces:
        """Return copies of the present contents. Raise CheckError if some memory has become smaller."""
        with outside_inference(), torch.no_grad():  # make ordinary tensors, whatever modes are on
            return [piece.copy() for piece in self.pieces]

    def restore(self, copies: CopiedPieces) -> None:
        """Write earlier contents back. An interrupt takes effect after all are written."""
        with outside_inference(), torch.no_grad():  # make ordinary tensors, whatever modes are on
            pairs = list(zip(self.pieces, copies, strict=True))
            try:
                for piece, before in pairs:
                    piece.restore(before)
            except BaseException:
                for piece, before in pairs:
                    piece.restore(before)
                raise

    def apart(self, copies: CopiedPieces) -> CopiedPieces:
        """Return masks of the words in which each piece differs from its copy.

        A word has the size of the largest element. The masks take a few percent of a copy's memory.
        """
        found = list[torch.Tensor]()
        for piece, was in zip(self.pieces, copies, strict=True):
            unlike = (bits(piece.memory) != bits(was)).reshape(-1)
            words = torch.nn.functional.pad(unlike, (0, -len(unlike) % ELEMENT)).view(-1, ELEMENT)
            found.append(words.any(1))
        return found

    def labels(self, apart: CopiedPieces, besides: Sequence[CopiedPieces] = ()) -> list[str]:
        """Return the names of the pieces that differ in some word. Words in `besides` do not count."""
        found = zip(self.pieces, apart, *besides, strict=True)
        return [piece.label for piece, *words in found if functools.reduce(lambda left, one: left & ~one, words).any()]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Run a block, and restore the state. Raise CheckError if a copy would take too much memory."""
        self.check_room()
        before = self.copy()
        with _random_kept(self.backend):
            try:
                yield
            finally:
                self.restore(before)


def check_writes(step: Callable[[Callable[[torch.Tensor], None]], Any], buffers: Buffers) -> None:
    """Run a step once. Raise CaptureError if it writes a slot that it may only read, since later fills keep its tail.

    step: Gets a function to call before an operator writes a part of a slot, which finds the line for the error.
    """
    read = [one for one in buffers if not (one.slot.rewritten or one.slot.computes() or one.slot.writers == BY_STEP)]
    before = {buffer.name: buffer.tensor.clone() for buffer in read}
    places = dict[str, str]()

    def note(tensor: torch.Tensor) -> None:
        for buffer in read if current_step() is not None else ():  # the fill inside the graph also writes slots
            if buffer.nbytes and overlaps(tensor, [span(buffer.tensor)]):
                places.setdefault(buffer.name, place_now())

    step(note)
    changed = [name for name, kept in before.items() if first_unequal(buffers[name].tensor, kept) is not None]
    for name in changed:
        buffers[name].tensor.copy_(before[name])
    if changed:
        names = ", ".join(f"slot {name!r}{places.get(name, '')}" for name in changed)
        raise CaptureError(
            f"the step writes {names}: write to a tensor of its own, or declare what it writes with rewritten=True, "
            "or as staged() or output()"
        )


def _written_index(operator: str, args: Sequence[Any]) -> Index:
    """Return the index of the elements that an operator writes.

    It is empty if the operator may write all of its tensor.
    """
    if operator in {"aten::index_put_", "aten::_index_put_impl_"}:
        return tuple(slice(None) if one is None else one.clone() for one in args[1])
    if (
        operator in {"aten::index_copy_", "aten::index_fill_", "aten::index_add_", "aten::index_reduce_"}
        and args[0].dim()
    ):
        return (..., args[2].clone().reshape(-1), *[slice(None)] * (args[0].dim() - args[1] % args[0].dim() - 1))
    return ()


def _without(tensor: torch.Tensor, slots: Spans) -> list[torch.Tensor]:
    """Return a tensor's whole storage as bytes, without the parts that are slots."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    begin = whole.data_ptr()
    pieces = []
    at = begin
    end = begin + whole.numel()
    for low, high in slots:
        if low < end and high > at:
            pieces.append(whole[at - begin : max(low, at) - begin])
            at = high
    pieces.append(whole[min(at, end) - begin :])
    return [piece for piece in pieces if piece.numel()]


@contextlib.contextmanager
def _random_kept(backend: Backend) -> Iterator[None]:
    """Run a block, and restore the random generators of torch, Python and NumPy."""
    device = backend.device
    python = random.getstate()
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - a step may draw by these
    with torch.random.fork_rng(() if device.type == "cpu" else (device,), device_type=device.type):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002 - as above


def draw_on(backend: Backend) -> None:
    """Draw a few random numbers, so that the next draws differ."""
    random.random()
    np.random.rand()  # noqa: NPY002 - as above
    for device in {torch.device("cpu"), backend.device}:
        torch.rand((), device=device)


def _text(tensor: torch.Tensor) -> str:
    return text_of(tensor).replace(" ", " tensor ", 1)


@attrs.frozen(eq=False)
class Holding:
    """A tensor that a step reaches without its view, with a weak reference to its storage.

    Attributes:
        name: The tensor's name in the code of the step's author.
        leads: The path to it: calls that each return the next object.
        same: Its identity and its address, to notice changes.
        storage: Its storage, as a weak reference.
        place: The address and bytes of the storage.
        text: Its dtype and shape in words.
    """

    name: str
    leads: Leads
    same: tuple[int, int]
    storage: StorageWeakRef
    place: tuple[int, int]
    text: str

    @property
    def is_freed(self) -> bool:
        """Whether nothing refers to its memory any more."""
        return bool(self.storage.expired())

    def moved(self, step: Callable[..., Any] | None) -> torch.Tensor | None:
        """Return the tensor that the step now reaches by the same path, if its memory is different, else None."""
        try:
            now = functools.reduce(lambda one, lead: lead(one), self.leads, step)
        except _LOST:
            return None
        if not isinstance(now, torch.Tensor) or (id(now), _address(now)) == self.same or not _address(now):
            return None
        storage = now.untyped_storage()
        is_same = storage._cdata == self.storage.cdata and _place(storage) == self.place  # noqa: SLF001 - as torch does
        return None if is_same else now


Change = tuple[Holding, torch.Tensor]
"""A tensor whose memory has moved, and the one that the step now reaches in its place."""


class Holdings:
    """All tensors that a step reached once without its view (closures, globals, attributes), by name."""

    def __init__(self, step: Callable[..., Any] | None) -> None:
        self._step = step
        self.found: dict[str, Holding] = {}

    def look(self) -> None:
        """Add tensors that the step now reaches by new paths."""
        for name, leads, tensor in reached(self._step):
            if address := _address(tensor):
                storage = tensor.untyped_storage()
                kept_by_others = StorageWeakRef(storage)
                place = _place(storage)
                text = text_of(tensor)
                self.found.setdefault(name, Holding(name, leads, (id(tensor), address), kept_by_others, place, text))

    def changed(self) -> list[Change]:
        """Return the tensors whose memory has moved and that the step still reaches by the same path."""
        pairs = ((one, one.moved(self._step)) for one in self.found.values())
        return [(one, now) for one, now in pairs if now is not None]


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _address(tensor: torch.Tensor) -> int:
    """Return a tensor's address, or 0 if it has none."""
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return tensor.data_ptr() if plain and tensor.numel() else 0


def reached(
    holder: Any, closed: tuple[type, ...] = CLOSED, depth: int = MOST_CALLS
) -> Iterator[tuple[str, Leads, torch.Tensor]]:
    """Find the tensors that are reachable from an object, with names and paths. Do not enter `closed` objects."""
    seen = set[int]()
    todo = [(holder, "", Leads())]
    while todo and len(seen) < MOST_OBJECTS:
        one, name, leads = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield name.removeprefix("."), leads, one
        elif len(leads) < depth:
            for part, lead in _leads(one):
                with contextlib.suppress(*_LOST):  # such as an empty cell of a closure
                    if not isinstance(inner := lead(one), closed):
                        todo.append((inner, name + part, (*leads, lead)))


def _leads(one: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield what an object refers to: the name in the author's code, and a call that returns the other object."""
    if isinstance(one, types.FunctionType):
        for place, name in enumerate(one.__code__.co_freevars):
            yield f".{name}", functools.partial(lambda at, one: one.__closure__[at].cell_contents, place)
        for name in one.__code__.co_names:
            yield f".{name}", functools.partial(lambda at, one: one.__globals__[at], name)
        yield "", attrgetter("__wrapped__")
    elif isinstance(one, types.MethodType):
        yield from ((".self", attrgetter("__self__")), ("", attrgetter("__func__")))
    elif isinstance(one, functools.partial):
        yield from (("", attrgetter(name)) for name in ("func", "args", "keywords"))
    elif isinstance(one, Mapping | list | tuple):
        keys = list(one) if isinstance(one, Mapping) else range(len(one))
        yield from ((f"[{key!r}]", itemgetter(key)) for key in keys if isinstance(key, str | int))
    else:
        slots = copyreg._slotnames(type(one))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle has them
        names = list[str](slots)
        is_module = isinstance(one, nn.Module)
        for name, value in getattr(one, "__dict__", {}).items():
            names += value if is_module and name in _MODULE else [] if is_module and name.startswith("_") else [name]
        yield from ((f".{name}", attrgetter(name)) for name in names)
