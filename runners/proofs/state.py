"""State: what a step changes outside of its slots, such as a KV cache, kept while the step runs more often than asked.

It is found by running the step once and looking at what its operators write. Not seen is what does not go through
torch's dispatcher: a kernel that is launched as it is, and objects of Python. Such a state is to be given.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...backends.registry import choose
from ...dataflow.binding import span
from ...dataflow.errors import CheckError
from ..bits import bits
from ..capture import human_bytes
from ..runner import Runner
from ..traffic import Traffic, seen_by
from .eagerly import ran_eagerly, slot_spans
from .report import Case
from .together import Together

SHARE: Final = 0.5
"""Of a device's free memory, what copies of a state may take at most."""
WORD: Final = 16
"""Bytes of the largest element, a complex number's."""
Spans = Sequence[tuple[int, int]]
Apart = Sequence[torch.Tensor]
Room = Callable[[torch.device], int]


@attrs.frozen(eq=False)
class Piece:
    """Memory that a step changes, as bytes, and what is said of it."""

    memory: torch.Tensor
    told: str

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies."""
        return span(self.memory)


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
    def found(cls, backend: Backend, slots: Spans, run: Callable[[], object]) -> "State":
        """Run a step once, note what it changes, and put that back. slots: addresses that are no state.

        CheckError, with all put back, where copies would take too much memory.
        """
        random, finder = _random_states(backend), _Finder(backend, slots)
        try:
            with seen_by(Traffic(writes=finder.note)):
                run()
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
        return sum(piece.memory.nbytes for piece in self.pieces)

    def check_room(self, copies: int = 1) -> None:
        """CheckError where so many copies at once would take more than a share of the memory that is free."""
        rooms: dict[torch.device, int] = {}
        for piece in self.pieces:
            device = piece.memory.device
            rooms[device] = rooms.get(device, 0) + piece.memory.nbytes
        for device, nbytes in rooms.items():
            _check_room(nbytes, device, _free_on(self.backend, device), copies)

    def copy(self) -> Copies:
        """What it is now. CheckError where someone has made its memory smaller."""
        with _as_it_is():
            for piece in self.pieces:
                _check_size(piece)
            return Copies([piece.memory.clone() for piece in self.pieces], _random_states(self.backend))

    def restore(self, copies: Copies) -> None:
        """Have it be what it was. CheckError where someone has made its memory smaller."""
        with _as_it_is():
            for piece, before in zip(self.pieces, copies.pieces, strict=True):
                _check_size(piece)
                piece.memory.copy_(before)
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


def state_of(runner: Runner[Any], cases: Iterable[Case], tensors: Iterable[torch.Tensor] | None = None) -> State:
    """The state of a runner's step: the one that is given, or what its operators write on some batches.

    CheckError where it is too large to be copied.
    """
    parts = runner.parts
    if tensors is not None:
        return State.of(parts.stage.backend, tensors)
    found, together = State(parts.stage.backend), Together(parts)
    for case in cases:
        view = runner.fill(case.batch, **case.side)
        with together.raising("the look at what a step changes"):
            found = found.joined(state_on(runner, view))
    return found


def state_on(runner: Runner[Any], view: Any) -> State:
    """What a runner's step changes on the view that was filled last, whose slots it leaves as it writes them."""
    parts = runner.parts
    return State.found(parts.stage.backend, slot_spans(parts), lambda: ran_eagerly(parts, view))


class _Finder:
    """Copies each storage before an operator first writes it."""

    def __init__(self, backend: Backend, slots: Spans) -> None:
        self.pieces: list[Piece] = []
        self.refused: CheckError | None = None
        self._backend = backend
        self._slots = sorted(slots)
        self._before: list[torch.Tensor] = []
        self._known: set[int] = set()
        self._taken: dict[torch.device, int] = {}
        self._free: dict[torch.device, int] = {}

    def note(self, tensor: torch.Tensor, operator: str) -> None:
        """An operator is about to write a tensor."""
        storage = tensor.untyped_storage()
        low, high = span(tensor)
        inside = any(start <= low and high <= stop for start, stop in self._slots)
        if inside or low == high or storage._cdata in self._known:  # noqa: SLF001 - torch compares storages by it
            return
        device = tensor.device
        try:
            taken = self._taken[device] = self._taken.get(device, 0) + storage.nbytes()
            if device not in self._free:
                self._free[device] = _free_on(self._backend, device)
            _check_room(taken, device, self._free[device])
        except CheckError as error:
            self.refused = self.refused or error
            raise
        self._known.add(storage._cdata)  # noqa: SLF001 - as above
        for memory in _without(tensor, self._slots):
            self.pieces.append(Piece(memory, f"the {_text(tensor)} that {operator} writes"))
            self._before.append(memory.clone())

    def restore(self) -> None:
        """Put all of it back."""
        with _as_it_is():
            for piece, before in zip(self.pieces, self._before, strict=True):
                _check_size(piece)
                piece.memory.copy_(before)


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


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Make and write ordinary tensors, whatever modes are on."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def _check_size(piece: Piece) -> None:
    memory = piece.memory
    end = memory.storage_offset() * memory.itemsize + span(memory)[1] - memory.data_ptr()
    if memory.untyped_storage().nbytes() < end:
        message = f"{piece.told} has been made smaller since it was looked at: it cannot be kept while a check runs"
        raise CheckError(message)


def _check_room(nbytes: int, device: torch.device, free: int, copies: int = 1) -> None:
    if copies * nbytes > SHARE * free:
        them = "a copy" if copies == 1 else f"{copies} copies"
        message = (
            f"the step changes {human_bytes(nbytes)} on {device} outside of its slots, of which {them} would take more "
            f"than {SHARE:.0%} of the {human_bytes(free)} that are free: give state= with those tensors, or parts of "
            "them, that the checked steps change"
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
