"""Check of weights: a step changes none of them, and its graphs see each later change."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import nn

from ...backends.operators import storage_key
from ...dataflow.buffers import overlaps, span
from ...dataflow.errors import CheckError, place_now
from ...dataflow.views import ordinary_alias
from ..engine.capture import with_own_casts
from ..engine.graphs import Captured
from ..engine.runner import Runner
from ..engine.sampling import Sample
from ..engine.state import CLOSED, Piece, State, reached
from ..engine.traffic import Traffic
from .replays import COPIES, parity_fault
from .trial import USUAL, Finding, Trial, mismatches

WEIGHTS: Final = "weights"
CHUNK: Final = 1 << 24
"""Elements that are changed at once, to limit the temporary memory."""


@attrs.define(eq=False)
class Changes:
    """Changes of one piece of memory by the second of two replays of each batch.

    Attributes:
        piece: The memory.
        words: The words that the second replay of the first batch changed.
        is_first: Whether some first replay changed it.
        is_same: Whether second replays changed the same words, whatever the batch.
        has_rows: Whether it had as many rows as the bucket in each batch.
    """

    piece: Piece
    words: torch.Tensor | None = None
    is_first: bool = False
    is_same: bool = True
    has_rows: bool = True

    def add(self, first: torch.Tensor, second: torch.Tensor, padded: Iterable[int]) -> None:
        """Add what two successive replays of one batch changed. padded: The varying sizes of the bucket."""
        self.is_first |= bool(first.any())
        self.words = second if self.words is None else self.words
        self.is_same &= torch.equal(self.words, second)
        self.has_rows &= self.piece.memory.dim() > 0 and self.piece.memory.shape[0] in padded

    @property
    def drifts(self) -> bool:
        """Whether each replay changes most of it, and always the same words, so that it has no rows of requests."""
        if self.words is None or self.has_rows or not self.is_same:
            return False
        return 2 * int(self.words.sum()) >= self.words.numel()


def check_weights(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Replay batches twice in a row. Then change weights, compare a replay with the step, and put the weights back."""
    trial.state.check_room(COPIES)
    held = weights_of(trial)
    changes = [Changes(piece) for piece in _written(trial.state, held)]
    places = [span(piece.memory) for piece in trial.state.pieces]
    floats = [one for one in held if one.memory.dtype in USUAL and not overlaps(one.memory, places)]
    private = _private_memory()
    steady = [one for one in floats if _is_owned(one.memory, private)]
    others = [one for one in floats if one not in steady]
    if others:
        trial.notes[
            f"{len(others)} of {len(floats)} tensors that the step holds, such as {others[0].label}, were not "
            "changed: others share their memory, or it cannot be written"
        ] = None
    sizes = set[object]()
    looked = set[int]()
    is_written = trial.any(changes)
    for one in batches:
        trial.fill(one)
        sizes.add(tuple(trial.step.live_sizes.items()))
        if is_written:
            _replay_twice(trial, changes)
        captured = trial.graph
        if captured is not None and captured.graph.is_recorded and id(captured) not in looked:
            looked.add(id(captured))
            yield from _taken_at_capture(trial, captured, steady)
            yield from _frozen(trial, steady)
    if is_written:
        yield from _changed(trial, changes, varied=len(sizes) > 1)


def weights_of(trial: Trial) -> list[Piece]:
    """Return the tensors that a step reaches without its view, each once, except slots and tensors of other runners."""
    step = trial.runner.stage.step
    found = dict[object, Piece]()
    slots = trial.spans()
    for name, leads, tensor in reached(step, (*CLOSED, Runner)):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or not tensor.numel() or overlaps(tensor, slots):
            continue
        holder = functools.reduce(lambda one, lead: lead(one), leads[:-1], step)
        is_buffer = isinstance(holder, nn.Module) and any(one is tensor for one in holder.buffers(recurse=False))
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if is_buffer else "tensor"
        once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())  # one of equal expanded rows
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        found.setdefault(key, Piece(ordinary_alias(tensor)[once], f"{kind} {name!r}", kind=kind))
    return list(found.values())


def _is_owned(weight: torch.Tensor, private: Sequence[tuple[int, int]]) -> bool:
    """Return whether a weight's memory can be written and belongs to this process alone, not to a mapped file."""
    low, high = span(weight)
    if weight.is_cpu and private:
        return any(start <= low and high <= stop for start, stop in private)
    storage = weight.untyped_storage()
    return storage.resizable() and not (weight.is_cpu and storage.is_shared())


def _private_memory() -> list[tuple[int, int]]:
    """Return the address ranges that only this process writes, as far as the system reports them."""
    maps = Path("/proc/self/maps")
    private = list[tuple[int, int]]()
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else ():
        place, modes, *_ = line.split()
        low, high = (int(end, 16) for end in place.split("-"))
        if modes == "rw-p":
            private += [(private.pop()[0] if private and private[-1][1] == low else low, high)]
    return private


def _written(state: State, held: Sequence[Piece]) -> list[Piece]:
    """Return memory that the step changes and `state=` does not name: tensors that it reaches, else other memory."""
    pieces = dict[int, Piece]()
    for piece in state.pieces:
        place = [span(piece.memory)]
        named = [one for one in held if overlaps(one.memory, place)] or [piece]
        pieces.update({id(one): one for one in named if not piece.given})
    return list(pieces.values())


def _replay_twice(trial: Trial, changes: Sequence[Changes]) -> None:
    """Replay a batch twice, the second time on the state that the first has left, and record which words change."""
    written = State(trial.backend, tuple(one.piece for one in changes))

    def twice() -> Any:
        before = written.copy()
        trial.runner.replay(trial.view)
        first = written.apart(before)
        before = written.copy()
        trial.write(trial.filled)
        trial.runner.replay(trial.view)
        return zip(changes, first, written.apart(before), strict=True)

    padded = {size for axis, size in trial.step.padded_sizes.items() if not axis.fixed}
    for change, first, second in trial.run(tuple, by=twice) or ():  # other checks report the error
        change.add(first, second, padded)


def _changed(trial: Trial, changes: Sequence[Changes], *, varied: bool) -> Iterator[Finding]:
    """Find weights that the step changes, and other tensors that it changes and that later steps use."""
    guilty = list[Piece]()
    loose = list[Piece]()
    for one in changes:
        if one.piece.kind == "parameter" and one.is_first:
            guilty.append(one.piece)
        elif varied and one.drifts:  # batches of one size cannot tell rows of requests from other memory
            (guilty if one.piece.kind == "buffer" else loose).append(one.piece)
    if trial.any(loose) and _reaches_outputs(trial, State(trial.backend, tuple(loose))):
        guilty += loose
    writers = dict[int, str]()

    def note(tensor: torch.Tensor, operator: str, _: object) -> None:
        for piece in guilty:
            if overlaps(tensor, [span(piece.memory)]):
                writers.setdefault(id(piece), f" ({operator}{place_now()})")

    if trial.any(guilty):
        trial.watch(Traffic(writes=note))
    for piece in guilty:
        message = (
            f"the step changes {piece.label} itself{writers.get(id(piece), '')}, and later steps go on with what it "
            "left: write into a tensor of the step's own; if that is what it is for, declare it: state=[...] names all "
            "that the step changes"
        )
        yield Finding(WEIGHTS, None, message)


def _reaches_outputs(trial: Trial, loose: State) -> bool:
    """Return whether the outputs of a step depend on the values that an earlier step left in some tensors."""
    first = trial.run(lambda made: (loose.copy(), trial.seen(made)))
    if first is None:
        return False
    left, usual = first

    def go_on() -> Any:
        loose.restore(left)
        return trial.runner.replay(trial.view)

    later = trial.run(trial.seen, by=go_on)
    return trial.any(later is not None and any(mismatches(usual, later, step=trial.step)))


def _taken_at_capture(trial: Trial, captured: Captured, steady: Sequence[Piece]) -> Iterator[Finding]:
    """Find weights that operators read only in the first run of the step, which has cached their values."""
    if not trial.runner.is_whole:  # outside of a stack, a step may run other code for each batch
        return
    traffic = Traffic()
    with_own_casts(lambda: trial.watch(traffic))
    if trial.error is not None:
        return
    known = {holding.storage.cdata for holding in trial.graphs.holdings.found.values() if not holding.is_freed}
    for one in steady:
        key = storage_key(one.memory)
        if key not in known or one.memory.device != trial.backend.device:
            continue
        known.remove(key)
        again = traffic.found.get(key, set()) | trial.state.taken.get(key, set())
        operators = ", ".join(sorted(captured.taken.get(key, set()) - again))
        if operators:
            message = (
                f"{one.label} was taken by {operators} in the first run of the step alone: graphs keep what was made "
                "of it then, whatever it holds later; make that by operators in each step, or before the runner is "
                "made, and capture anew where it changes"
            )
            yield Finding(WEIGHTS, None, message)


def _frozen(trial: Trial, steady: Sequence[Piece]) -> Iterator[Finding]:
    """Find the weight whose changes the step sees and its graph does not, because it has a value computed from it."""
    parts = [list(steady)]
    guilty = list[Piece]()
    fault = None
    if trial.any(parity_fault(trial)):  # without a change, the parity check reports it
        return
    while parts:
        part = parts.pop()
        halves = [part[: len(part) // 2], part[len(part) // 2 :]] if trial.any(len(part) > 1) else []
        state = State(trial.backend, tuple(part))
        if trial.any(not _fits(state)):
            parts += halves
            for one in () if halves else part:
                trial.notes[f"{one.label} was not changed: there is no room for a copy"] = None
            continue
        with state.kept():
            for one in part:
                _change(one.memory, trial.seed)
            found = with_own_casts(lambda: parity_fault(trial))
        if trial.any(found) and not trial.any(trial.error is not None):  # changed weights may cause this error
            guilty = part
            fault = found
            parts = halves
    if fault is not None:
        names = ", ".join(one.label for one in guilty)
        message = (
            f"{fault.message.partition('; ')[0]}, after a change of {names}: the graph goes on with what the step "
            "made of it at capture, such as a number on the host or a tensor that no operator of the graph makes; make "
            "it by operators in the step, or capture anew where it changes"
        )
        yield Finding(WEIGHTS, None, message)


def _fits(state: State) -> bool:
    """Return whether there is room for a copy of a state."""
    try:
        state.check_room()
    except CheckError:
        return False
    return True


def _change(tensor: torch.Tensor, seed: int) -> None:
    """Write other numbers: smaller ones of the same sign, so that they stay within bounds, and small ones for zeros."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    whole = tensor if tensor.dim() else tensor[None]
    with torch.no_grad():
        for part in torch.split(whole, max(1, CHUNK * len(whole) // whole.numel())):
            noise = torch.rand(part.shape, device=part.device, generator=generator)
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            part.copy_(torch.where(wide == 0, noise / 8, wide * (noise + 1) / 2))
