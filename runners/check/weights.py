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
from ..comparison import USUAL, graph_of, mismatches, seen, spans_of_slots
from ..engine.capture import with_own_casts
from ..engine.graphs import Captured
from ..engine.runner import Runner
from ..engine.sampling import Sample
from ..engine.state import CLOSED, Piece, State, reached
from ..engine.traffic import Traffic, run_seen
from .replays import COPIES, operators_of, parity_fault
from .trial import Finding, Subject, Trial

WEIGHTS: Final = "weights"
CHUNK: Final = 1 << 24
"""Elements that are changed at once, to limit the temporary memory."""


@attrs.define(eq=False)
class Changes:
    """Which words of one tensor second replays of a batch change.

    Attributes:
        some: Words that change in some batch.
        each: Words that change in each batch.
        first: Whether some first replay changed the tensor.
        rows: Whether it had as many rows as the bucket in each batch.
    """

    some: Any = False
    each: Any = True
    first: bool = False
    rows: bool = True

    def add(self, first: torch.Tensor, second: torch.Tensor, *, rows: bool) -> None:
        """Add what two successive replays of one batch changed."""
        self.first |= bool(first.any())
        self.rows &= rows
        self.some = second | self.some
        self.each = second & self.each

    @property
    def drifts(self) -> bool:
        """Whether each replay changes most of it, and the same words whatever the batch: it has no row of a request."""
        if self.some is False or self.rows:
            return False
        return torch.equal(self.some, self.each) and 2 * int(self.each.sum()) >= self.each.numel()


def check_weights(subject: Subject, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Replay batches twice in a row. Then change weights, compare a replay with the step, and put the weights back."""
    subject.state.check_room(COPIES)
    held = weights_of(subject.runner)
    written = _written(subject, held)
    places = [span(piece.memory) for piece in subject.state.pieces]
    floats = [one for one in held if one.memory.dtype in USUAL and not overlaps(one.memory, places)]
    steady = list(_owned(floats))
    for left in floats[:1] if len(steady) < len(floats) else ():
        subject.notes[
            f"{len(floats) - len(steady)} of {len(floats)} tensors that the step holds, such as {left.label}, were not "
            "changed: others share their memory, or it cannot be written"
        ] = None
    changes = [Changes() for _ in written.pieces]
    sizes, looked, trial = set[object](), set[int](), None
    for one in batches:
        trial = subject.trial(one)
        sizes.add(tuple(trial.step.live_sizes.items()))
        if subject.together.any(written.pieces):
            _replay_twice(trial, written, changes)
        captured = graph_of(trial.runner, trial.view)
        if captured is not None and captured.graph.is_recorded and id(captured) not in looked:
            looked.add(id(captured))
            yield from _taken_at_capture(subject, trial, captured, steady)
            yield from _frozen(subject, trial, steady)
    if trial is not None and subject.together.any(written.pieces):
        yield from _changed(trial, written, changes, varied=len(sizes) > 1)


def weights_of(runner: Runner[Any]) -> list[Piece]:
    """Return the tensors that a step reaches without its view, each once, except slots and tensors of other runners."""
    step, found, slots = runner.stage.step, dict[object, Piece](), spans_of_slots(runner)
    for name, leads, tensor in reached(step, (*CLOSED, Runner)):
        is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or not tensor.numel() or overlaps(tensor, slots):
            continue
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        holder = functools.reduce(lambda one, lead: lead(one), leads[:-1], step)
        is_buffer = isinstance(holder, nn.Module) and any(one is tensor for one in holder.buffers(recurse=False))
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer" if is_buffer else "tensor"
        once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())  # one of several expanded rows
        found.setdefault(key, Piece(ordinary_alias(tensor)[once], f"{kind} {name!r}", kind=kind))
    return list(found.values())


def _owned(weights: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the weights whose memory can be written and is this process's alone. It may be that of a file."""
    maps, private = Path("/proc/self/maps"), list[tuple[int, int]]()
    for line in maps.read_text(encoding="utf-8").splitlines() if maps.is_file() else ():
        place, modes, *_ = line.split()
        low, high = (int(end, 16) for end in place.split("-"))
        if modes == "rw-p":
            private += [(private.pop()[0] if private and private[-1][1] == low else low, high)]
    for one in weights:
        low, high = span(one.memory)
        storage = one.memory.untyped_storage()
        is_own = storage.resizable() and not (one.memory.is_cpu and storage.is_shared())
        if one.memory.is_cpu and private:
            is_own = any(start <= low and high <= stop for start, stop in private)
        if is_own:
            yield one


def _written(subject: Subject, held: Sequence[Piece]) -> State:
    """Return what the step changes and nobody named as its state: tensors that it reaches, or else unnamed memory."""
    pieces = dict[int, Piece]()
    for piece in subject.state.pieces:
        place = [span(piece.memory)]
        named = [one for one in held if overlaps(one.memory, place)] or [piece]
        pieces.update({id(one): one for one in named if not piece.given})
    return State(subject.state.backend, tuple(pieces.values()))


def _replay_twice(trial: Trial, written: State, changes: Sequence[Changes]) -> None:
    """Replay a batch, and again on the state that this has left. Note which words change."""

    def twice() -> Any:
        before = written.copy()
        trial.runner.replay(trial.view)
        first, before = written.apart(before), written.copy()
        trial.write(trial.filled)
        trial.runner.replay(trial.view)
        return first, written.apart(before)

    found = trial.run(lambda pair: pair, by=twice)
    if isinstance(found, Exception):  # other checks find it
        return
    padded = {size for axis, size in trial.step.padded_sizes.items() if not axis.fixed}
    for piece, change, first, second in zip(written.pieces, changes, *found, strict=True):
        change.add(first, second, rows=piece.memory.dim() > 0 and piece.memory.shape[0] in padded)


def _changed(trial: Trial, written: State, changes: Sequence[Changes], *, varied: bool) -> Iterator[Finding]:
    """Find weights that the step changes, and other tensors that it changes and that later steps use."""
    guilty, loose = list[Piece](), list[Piece]()
    for piece, change in zip(written.pieces, changes, strict=True):
        if piece.kind == "parameter" and change.first:
            guilty.append(piece)
        elif varied and change.drifts:  # with batches of one size, rows of requests look the same
            (guilty if piece.kind == "buffer" else loose).append(piece)
    if trial.together.any(loose) and _reaches_outputs(trial, State(written.backend, tuple(loose))):
        guilty += loose
    writers = dict[int, str]()

    def note(tensor: torch.Tensor, operator: str, _: object) -> None:
        for piece in guilty:
            if overlaps(tensor, [span(piece.memory)]):
                writers.setdefault(id(piece), f" ({operator}{place_now()})")

    if trial.together.any(guilty):
        trial.run(id, by=lambda: run_seen(Traffic(writes=note), trial.eagerly))
    for piece in guilty:
        message = (
            f"the step changes {piece.label} itself{writers.get(id(piece), '')}, and later steps go on with what it "
            "left: write into a tensor of the step's own; if that is what it is for, declare it: state=[...] names all "
            "that the step changes"
        )
        yield Finding(WEIGHTS, None, message)


def _reaches_outputs(trial: Trial, loose: State) -> bool:
    """Return whether a step gives other outputs on what an earlier one left in some tensors."""
    first = trial.run(lambda made: (loose.copy(), seen(trial.view, made).outputs))
    if trial.raised or isinstance(first, Exception):
        return False
    left, usual = first

    def go_on() -> Any:
        loose.restore(left)
        return trial.runner.replay(trial.view)

    later = trial.run(lambda made: seen(trial.view, made).outputs, by=go_on)
    apart = not isinstance(later, Exception) and any(mismatches(usual, later, step=trial.step))
    return trial.together.any(apart)


def _taken_at_capture(subject: Subject, trial: Trial, captured: Captured, steady: Sequence[Piece]) -> Iterator[Finding]:
    """Find weights that operators used only in the first run of the step, which has kept what it made of them."""
    if not subject.runner.is_whole:  # around a stack a step may run other code for each batch
        return
    traffic = Traffic()
    raised = with_own_casts(lambda: trial.run(id, by=lambda: run_seen(traffic, trial.eagerly)))
    if isinstance(raised, Exception):
        return
    known = {holding.storage.cdata for holding in subject.graphs.holdings.found.values() if not holding.is_freed}
    for one in steady:
        key = storage_key(one.memory)
        if key not in known or one.memory.device != subject.backend.device:
            continue
        known.remove(key)
        again = traffic.found.get(key, set()) | subject.state.taken.get(key, set())
        operators = ", ".join(sorted(captured.taken.get(key, set()) - again))
        if operators:
            message = (
                f"{one.label} was taken by {operators} in the first run of the step alone: graphs keep what was made "
                "of it then, whatever it holds later; make that by operators in each step, or before the runner is "
                "made, and capture anew where it changes"
            )
            yield Finding(WEIGHTS, None, message)


def _frozen(subject: Subject, trial: Trial, steady: Sequence[Piece]) -> Iterator[Finding]:
    """Find the weight of which a graph keeps something, other than its memory, while the step sees each change."""
    together, parts, found = subject.together, [list(steady)], None
    if together.any(parity_fault(trial)):  # the parity check finds faults without a change
        return
    while parts:
        part = parts.pop()
        halves = [part[: len(part) // 2], part[len(part) // 2 :]]
        state = State(subject.state.backend, tuple(part))
        is_several, is_full = together.any(len(part) > 1), False
        try:
            state.check_room()
        except CheckError:
            is_full = True
        if together.any(is_full):
            parts += halves if is_several else ()
            for one in () if is_several else part:
                subject.notes[f"{one.label} was not changed: there is no room for a copy"] = None
            continue
        with state.kept():
            for one in part:
                _change(one.memory, subject.seed)
            fault = with_own_casts(lambda: parity_fault(trial))
        if trial.raised or not together.any(fault):
            continue
        found = part, fault
        parts = halves if is_several else []
    if found is None:
        return
    reads = operators_of(trial, torch.Tag.data_dependent_output)
    guilty, fault = found
    if fault is not None:
        names = ", ".join(one.label for one in guilty)
        message = (
            f"{fault.message.partition('; ')[0]}, after a change of {names}: the graph goes on with what the step "
            f"made of it at capture, such as a number on the host{''.join(f' ({one})' for one in reads[:1])} or a "
            "tensor that no operator of the graph makes; make it by operators in the step, or capture anew where it "
            "changes"
        )
        yield Finding(WEIGHTS, None, message)


def _change(tensor: torch.Tensor, seed: int) -> None:
    """Write other numbers: smaller ones of the same sign, which stay within any bounds, and small ones for zeros."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    rows = max(1, CHUNK * len(tensor) // tensor.numel()) if tensor.dim() else 0
    with torch.no_grad():
        for part in torch.split(tensor, rows) if rows else [tensor]:
            noise = torch.rand(part.shape, device=part.device, generator=generator)
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            part.copy_(torch.where(wide == 0, noise / 8, wide * (noise + 1) / 2))
