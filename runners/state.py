"""State: what a step changes beside its slots, such as a KV cache, kept while the step runs more often than asked.

Warm-ups, captures, checks and debug modes run a step without being asked to by the user, and put its state back.
The state is found by running the step once and looking at what its operators write. A kernel that is launched without
torch's dispatcher, and objects of Python, are not seen: give `state=` for those.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ..backends.base import Backend
from ..backends.registry import choose
from ..dataflow.binding import span
from ..dataflow.errors import CheckError
from .bits import bits
from .capture import human_bytes
from .holdings import Holdings
from .traffic import Traffic, run_seen

_ATEN: Final[Any] = torch.ops.aten
SHARE: Final = 0.5
"""Of a device's free memory, what copies of a state may take at most."""
WORD: Final = 16
"""Bytes of the largest element, a complex number's."""
Spans = Sequence[tuple[int, int]]
Apart = Sequence[torch.Tensor]
Room = Callable[[torch.device], int]


@attrs.frozen(eq=False)
class Piece:
    """Memory that a step changes, and what is said of it.

    part: reads and writes the elements that the step changes, where it changes only some.
    """

    memory: torch.Tensor
    told: str
    part: "Part | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes that one copy takes."""
        return self.memory.numel() * self.memory.itemsize if self.part is None else self.part.nbytes

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies."""
        return span(self.memory)

    def copy(self) -> torch.Tensor:
        """What it holds now."""
        return self.memory.clone() if self.part is None else self.part.read(self.memory)

    def restore(self, before: torch.Tensor) -> None:
        """Have it hold what it held. CheckError where someone has made its memory smaller."""
        _check_size(self)
        if self.part is None:
            self.memory.copy_(before)
        else:
            self.part.write(self.memory, before)


@attrs.frozen
class Part:
    """Some elements of a tensor: how they are read, how they are written, and how many bytes they take."""

    read: Callable[[torch.Tensor], torch.Tensor]
    write: Callable[[torch.Tensor, torch.Tensor], object]
    nbytes: int


@attrs.frozen(eq=False)
class Copies:
    """What a state was at one moment, and the random numbers to come."""

    pieces: Sequence[torch.Tensor]
    random: Mapping[torch.device, torch.Tensor]


@attrs.frozen(eq=False)
class State:
    """What a step changes outside of its slots: memory, and where random numbers stand.

    pieces: the memory. Copies of it are made where they take a share of the free memory at most.
    """

    backend: Backend
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, backend: Backend, tensors: Iterable[torch.Tensor]) -> "State":
        """A state that is known: these tensors, or parts of them, whatever else a step may change."""
        return cls(backend, tuple(Piece(_plain(one), f"the given {_text(one)}") for one in tensors if one.numel()))

    @classmethod
    def found(
        cls,
        backend: Backend,
        slots: Spans,
        run: Callable[[], object],
        *,
        exact: bool = False,
        holder: Callable[..., Any] | None = None,
    ) -> "State":
        """Run a step once, note what it changes, and put that back. slots: addresses that are no state.

        exact: keep the elements that this very run writes, for runs that write the same; else the whole storages that
        it writes to. holder: what reaches the state's tensors, for their names in an error.
        CheckError, with all put back, where copies would take too much memory.
        """
        random = _random_states(backend)
        finder = (_ExactFinder if exact else _Finder)(backend, slots, holder)
        try:
            run_seen(Traffic(writes=finder.note), run)
        finally:
            finder.restore()
            _restore_random(random)
        if finder.refused is not None:  # which the step may have caught
            raise finder.refused
        return cls(backend, tuple(finder.pieces))

    def joined(self, other: "State") -> "State":
        """Both states."""
        known = {piece.place for piece in self.pieces}
        return State(self.backend, (*self.pieces, *(one for one in other.pieces if one.place not in known)))

    @property
    def nbytes(self) -> int:
        """Bytes that one copy takes."""
        return sum(piece.nbytes for piece in self.pieces)

    def check_room(self, copies: int = 1) -> None:
        """CheckError where so many copies at once would take more than a share of the memory that is free."""
        rooms: dict[torch.device, int] = {}
        for piece in self.pieces:
            device = piece.memory.device
            rooms[device] = rooms.get(device, 0) + piece.nbytes
        for device, nbytes in rooms.items():
            _check_room(nbytes, device, _free_on(self.backend, device), copies)

    def copy(self) -> Copies:
        """What it is now. CheckError where someone has made its memory smaller."""
        with _as_it_is():
            for piece in self.pieces:
                _check_size(piece)
            return Copies([piece.copy() for piece in self.pieces], _random_states(self.backend))

    def restore(self, copies: Copies) -> None:
        """Have it be what it was. CheckError where someone has made its memory smaller."""
        with _as_it_is():
            for piece, before in zip(self.pieces, copies.pieces, strict=True):
                piece.restore(before)
        _restore_random(copies.random)

    def apart(self, copies: Copies) -> Apart:
        """In which words of each piece it is not what it was: some hundredths of a copy's memory."""
        return [_unlike(piece.memory, was) for piece, was in zip(self.pieces, copies.pieces, strict=True)]

    def told(self, apart: Apart, besides: Sequence[Apart] = ()) -> list[str]:
        """What is said of the pieces with such words, but for words that are among `besides`."""
        others = zip(*besides, strict=True) if besides else ((),) * len(self.pieces)
        triples = zip(self.pieces, apart, others, strict=True)
        return [piece.told for piece, words, known in triples if _left_over(words, known)]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Afterwards it is what it was before. CheckError where a copy would take too much memory."""
        self.check_room()
        before = self.copy()
        try:
            yield
        finally:
            self.restore(before)


class _Finder:
    """Copies each storage before an operator first writes it."""

    def __init__(self, backend: Backend, slots: Spans, holder: Callable[..., Any] | None) -> None:
        self.pieces: list[Piece] = []
        self.refused: CheckError | None = None
        self._backend = backend
        self._slots = sorted(slots)
        self._holder = holder
        self._before: list[torch.Tensor] = []
        self._known: set[Hashable] = set()
        self._taken: dict[torch.device, int] = {}
        self._free: dict[torch.device, int] = {}

    def note(self, tensor: torch.Tensor, operator: str, args: Sequence[Any]) -> None:
        """An operator is about to write a tensor."""
        low, high = span(tensor)
        inside = any(start <= low and high <= stop for start, stop in self._slots)
        if not inside and low != high:
            for piece in self._pieces(tensor, operator, args):
                with _as_it_is():
                    before = piece.copy()
                self.pieces.append(piece)
                self._before.append(before)

    def _pieces(self, tensor: torch.Tensor, operator: str, args: Sequence[Any]) -> Iterator[Piece]:
        """What to keep of a tensor: its whole storage, once, but for the slots in it."""
        del args
        if self._is_new(tensor.untyped_storage()._cdata):  # noqa: SLF001 - torch compares storages by it
            self._take(tensor.untyped_storage().nbytes(), tensor, operator)
            for memory in _without(tensor, self._slots):
                yield Piece(memory, f"the {_text(tensor)} that {operator} writes")

    def _is_new(self, key: Hashable) -> bool:
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def _take(self, nbytes: int, tensor: torch.Tensor, operator: str) -> None:
        """Account for a copy. CheckError, which names the tensors, where copies would take too much memory."""
        device = tensor.device
        taken = self._taken[device] = self._taken.get(device, 0) + nbytes
        if device not in self._free:
            self._free[device] = _free_on(self._backend, device)
        try:
            _check_room(taken, device, self._free[device], names=lambda: self._names(tensor, operator))
        except CheckError as error:
            self.refused = self.refused or error
            raise

    def _names(self, last: torch.Tensor, operator: str) -> list[str]:
        """The tensors that were found, those that the step's variables name by these names."""
        held = [] if self._holder is None else Holdings.of(self._holder).found
        names = {one.place[0]: one.name for one in held}
        told = [(piece.memory, piece.told) for piece in self.pieces]
        told.append((last, f"the {_text(last)} that {operator} writes"))
        found = [(names.get(tensor.untyped_storage().data_ptr()), text) for tensor, text in told]
        return list(dict.fromkeys(text if name is None else f"{name}: {text}" for name, text in found))

    def restore(self) -> None:
        """Put all of it back, what was noted last first: what was noted before it may lie in it, too."""
        with _as_it_is():
            for piece, before in zip(reversed(self.pieces), reversed(self._before), strict=True):
                piece.restore(before)


class _ExactFinder(_Finder):
    """Copies the elements that an operator writes, before it does: of a large KV cache, a few rows."""

    def _pieces(self, tensor: torch.Tensor, operator: str, args: Sequence[Any]) -> Iterator[Piece]:
        """What to keep of a tensor: the elements that the operator names by indices, or else all of its view."""
        memory, told = _plain(tensor), f"the {_text(tensor)} that {operator} writes"
        part = _part_of(memory, operator, args)
        if part is not None:
            self._take(part.nbytes, tensor, operator)
            yield Piece(memory, told, part)
        elif self._is_new((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())):
            self._take(tensor.numel() * tensor.itemsize, tensor, operator)
            yield Piece(memory, told)


def _part_of(memory: torch.Tensor, operator: str, args: Sequence[Any]) -> Part | None:
    """The elements that an operator with indices writes; None of one that may write all of its tensor."""
    with _as_it_is():
        if operator in {"aten::index_put_", "aten::_index_put_impl_"}:
            indices = [None if one is None else one.clone() for one in args[1]]
            read, write = functools.partial(_get, indices), functools.partial(_put, indices)
        elif operator in {"aten::index_copy_", "aten::index_fill_", "aten::index_add_", "aten::index_reduce_"}:
            dim, index = args[1], args[2].clone()
            read, write = functools.partial(_select, dim, index), functools.partial(_copy, dim, index)
        else:
            return None
        return Part(read, write, read(memory).nbytes)


def _get(indices: Sequence[torch.Tensor | None], tensor: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = _ATEN.index(tensor, indices)
    return rows


def _put(indices: Sequence[torch.Tensor | None], tensor: torch.Tensor, before: torch.Tensor) -> None:
    _ATEN.index_put_(tensor, indices, before)


def _select(dim: int, index: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(dim, index)


def _copy(dim: int, index: torch.Tensor, tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.index_copy_(dim, index, before)


def _without(tensor: torch.Tensor, slots: Spans) -> list[torch.Tensor]:
    """A tensor's whole storage as bytes, but for the parts that slots lie in."""
    with _as_it_is():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        begin, pieces = whole.data_ptr(), []
        at, end = begin, begin + whole.numel()
        for low, high in slots:
            if low < end and high > at:
                pieces.append(whole[at - begin : max(low, at) - begin])
                at = high
        pieces.append(whole[min(at, end) - begin :])
        return [piece for piece in pieces if piece.numel()]


def _left_over(words: torch.Tensor, known: Sequence[torch.Tensor]) -> bool:
    """Whether one of these words is not known."""
    for other in known:
        words = words & ~other
    return bool(words.any())


def _unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which words of two pieces of memory differ, a word being as long as any element."""
    unlike = bits(one) != bits(other)
    spare = -unlike.numel() % WORD
    return torch.nn.functional.pad(unlike.reshape(-1), (0, spare)).view(-1, WORD).any(1)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a tensor that may be written in any mode."""
    with _as_it_is():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


class _as_it_is:  # noqa: N801 - a context; a generator that an interrupt leaves would end it late, inside of others
    """Make and write ordinary tensors, whatever modes are on.

    torch's own guard, in C, ends where it should: one of Python that an interrupt leaves is undone when the error is
    forgotten, and then brings back the dispatch keys of modes that are gone.
    """

    def __enter__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._guard: Any = torch._C._InferenceMode(False)  # noqa: FBT003, SLF001
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        torch.set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(None, None, None)
        torch.set_grad_enabled(self._gradients)


def _check_size(piece: Piece) -> None:
    memory = piece.memory
    end = memory.storage_offset() * memory.itemsize + span(memory)[1] - memory.data_ptr()
    if memory.untyped_storage().nbytes() < end:
        message = f"{piece.told} has been made smaller since it was looked at: it cannot be kept while a check runs"
        raise CheckError(message)


def _check_room(
    nbytes: int, device: torch.device, free: int, copies: int = 1, names: Callable[[], Sequence[str]] = list
) -> None:
    if copies * nbytes > SHARE * free:
        them = "a copy" if copies == 1 else f"{copies} copies"
        named = "; ".join(names())
        message = (
            f"the step changes {human_bytes(nbytes)} on {device} beside its slots{f' ({named})' if named else ''}, of "
            f"which {them} would take more than {SHARE:.0%} of the {human_bytes(free)} that are free: give state= with "
            "those tensors, or parts of them, that must be put back after runs that nobody asked for"
        )
        raise CheckError(message)


def _free_on(backend: Backend, device: torch.device) -> int:
    return (backend if backend.device.type == device.type else choose("cpu")).memory().free


def _random_states(backend: Backend) -> dict[torch.device, torch.Tensor]:
    """Where random numbers stand, on the host and on the device."""
    states = {torch.device("cpu"): torch.get_rng_state()}
    if backend.device.type != "cpu":
        states[backend.device] = torch.get_device_module(backend.device).get_rng_state(backend.device)
    return states


def _restore_random(states: Mapping[torch.device, torch.Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape {list(tensor.shape)}"
