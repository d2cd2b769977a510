"""Races: steps in flight one behind the other, their sources overwritten right after the call, against each alone."""

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import nn

from ...backends.base import Backend
from ...backends.ring import ENTRIES, SEGMENT
from ...dataflow.capabilities import HOST
from ...dataflow.slots import Output
from ..runner import Runner
from ..stacked.watch import parts_of, tensors_within
from ..state import State
from .parity import buffers_in, written_slots_kept
from .replays import Leaves, difference, named, step_of, unwatched
from .report import Case, Finding
from .tails import live_part
from .together import Together

NAME: Final = "races"
STEPS: Final = ENTRIES + SEGMENT
"""Steps in flight: more than a ring has entries."""
SHARE: Final = 0.25
"""Of the device's free memory, what the outputs of all these steps may take."""
_DATA: Final = (torch.Tensor, np.ndarray, str, bytes, int, float, complex, type)
_BUSY, _MOST, _SIDE = 0.03, 500, 1024
"""Seconds of products of square matrices that a device is given first, so that the host runs ahead; how many at most
(a queue has an end, too), and their rows."""


def check(runner: Runner[Any], cases: Sequence[Case], state: State) -> list[Finding]:
    """Run batches one behind the other without waiting, and each by itself; a finding where a step differs.

    Host sources are overwritten as soon as the call returns, device sources in stream order; outputs are copied in
    stream order. Raises CheckError where there is no room to keep the state.
    """
    with unwatched(runner.watch):
        wanted = _sequence(runner, cases, state)
        if not wanted:
            return []
        alone, flight = _alone(runner, wanted, state), _in_flight(runner, wanted, state)
        apart = _first_apart(alone, flight)
        if not Together(runner.parts).any(apart is not None):
            return []
        number, told = (0, "") if apart is None else apart
        finding = _named(runner, wanted, state, number, told)
        return [] if apart is None else [finding]


def _first_apart(alone: "Sequence[Run]", flight: "Sequence[Run]") -> tuple[int, str] | None:
    """The first step that differs, and how; None where none does."""
    for number, (one, other) in enumerate(zip(alone, flight, strict=True)):
        apart = difference(one.outputs, other.outputs)
        if apart is not None:
            told = f"output{apart.output}{'' if apart.row is None else f' row {apart.row}'}"
            return number, f"{told}: alone {apart.before}, in flight {apart.after}"
    return None


@attrs.frozen
class Run:
    """What one step gave, and what its device slots held, where somebody asked."""

    outputs: Leaves
    slots: Leaves


def _sequence(runner: Runner[Any], cases: Sequence[Case], state: State) -> list[Case]:
    """Cases in turn, as many as there is memory for the outputs of, but two; those that a graph takes, if any does."""
    by_graph = [case for case in cases if runner.decide(case.batch, **case.side).path != "eager"] or list(cases)
    if not by_graph:
        return []
    with state.kept():
        first = by_graph[0]
        nbytes = sum(t.nbytes for _, t in named(runner(first.batch, **first.side)))
    free = runner.parts.stage.backend.memory().free
    most = int(SHARE * free / (2 * nbytes)) if nbytes else STEPS
    most = Together(runner.parts).least(min(STEPS, most))
    return list(itertools.islice(itertools.cycle(by_graph), max(2, most)))


def _alone(runner: Runner[Any], cases: Sequence[Case], state: State, asked: int | None = None) -> list[Run]:
    """Each step by itself: the device has done it before the next begins, and nothing is overwritten.

    asked: the step of which slots are looked at; then all are filled by themselves.
    """
    backend, runs = runner.parts.stage.backend, []
    with state.kept(), written_slots_kept(buffers_in(runner.parts)):
        for number, case in enumerate(cases):
            runs.append(_run(runner, case.batch, case.side, number, asked))
            backend.synchronize()
    return runs


def _in_flight(runner: Runner[Any], cases: Sequence[Case], state: State, asked: int | None = None) -> list[Run]:
    """All steps one behind the other, likewise."""
    backend, runs = runner.parts.stage.backend, []
    batches = [(_fresh(case.batch), _fresh(case.side)) for case in cases]
    with state.kept(), written_slots_kept(buffers_in(runner.parts)):
        backend.synchronize()
        _keep_busy(backend)
        for number, (batch, side) in enumerate(batches):
            runs.append(_run(runner, batch, side, number, asked))
            _spoil(batch)
            _spoil(side)
        backend.synchronize()
    return runs


def _run(runner: Runner[Any], batch: Any, side: Any, number: int, asked: int | None) -> Run:
    if asked is None:
        return Run(_copies(runner(batch, **side)), {})
    view = runner.fill(batch, **side)
    held = _device_slots(runner, view) if number == asked else {}
    return Run(_copies(runner.replay(view)), held)


def _copies(outputs: Any) -> Leaves:
    return {place: tensor.detach().clone() for place, tensor in named(outputs)}


def _device_slots(runner: Runner[Any], view: Any) -> Leaves:
    """The live rows of copied slots on the device, as a fill leaves them."""
    declared, step = runner.parts.stage.declaration.slots, step_of(view)
    held = ((name, slot, view.__dict__[name]) for name, slot in declared.items() if slot.reads(name) is not None)
    return {
        name: live_part(slot, tensor, step).clone()
        for name, slot, tensor in held
        if tensor is not None and slot.placement != HOST and not isinstance(slot, Output)
    }


def _named(runner: Runner[Any], cases: Sequence[Case], state: State, number: int, what: str) -> Finding:
    """The slot through which a difference of one step came: of both ways once more, now with what slots held."""
    what = f"step {number} of {len(cases)} in flight: {what}"
    alone, flight = _alone(runner, cases, state, number)[number], _in_flight(runner, cases, state, number)[number]
    apart = difference(alone.slots, flight.slots)
    if apart is None:
        return _of_host_slots(runner, what)
    place = f"slot {apart.output!r}{'' if apart.row is None else f' row {apart.row}'}"
    why = "the fill read its source, or what carries it to the device, after that was overwritten"
    held = f"{place}: alone {apart.before}, in flight {apart.after}"
    return Finding(NAME, apart.output, f"{what}; {held}: {why}")


def _of_host_slots(runner: Runner[Any], what: str) -> Finding:
    graphs = runner.parts.graphs
    read = {} if graphs is None else graphs.filler.hosts.slots
    for slot, operator in read.items():
        why = f"{operator} copies from slot {slot!r} in host memory when the device gets there"
        return Finding(NAME, slot, f"{what}; {why}, and the next fill came first")
    return Finding(NAME, None, f"{what}; no slot tells why: it came through an upload, an output, or other memory")


def _fresh(batch: Any) -> Any:
    """A copy of a batch in memory of its own, of the same kind; modules in it, and what cannot be copied, stay."""
    made: dict[int, Any] = {id(one): one for one in _uncopied(batch)}
    for tensor in tensors_within(batch):
        copied = tensor.detach().clone()
        made[id(tensor)] = copied.pin_memory() if tensor.is_pinned() else copied
    return copy.deepcopy(batch, made)


def _uncopied(batch: Any) -> Iterator[Any]:
    """What of a batch is no data: modules, and what no copy can be made of, such as locks."""
    seen, todo = set[int](), [batch]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _DATA):
            continue
        seen.add(id(one))
        parts = [] if isinstance(one, nn.Module) else list(parts_of(one))
        todo += parts
        if not parts and not _can_be_copied(one):
            yield one


def _can_be_copied(one: Any) -> bool:
    if isinstance(one, nn.Module):
        return False
    try:
        copy.deepcopy(one)
    except Exception:  # noqa: BLE001 - each kind of object has reasons of its own
        return False
    return True


def _spoil(batch: Any) -> None:
    """Overwrite all that a batch holds with other numbers, none of which is out of an index's range."""
    for tensor in tensors_within(batch):
        with contextlib.suppress(RuntimeError), torch.no_grad():  # of memory that is expanded, nothing can be written
            _overwrite(tensor)
    for values in _host_data(batch):
        values[...] = 0


def _overwrite(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(-1).sub_(1)
    else:
        tensor.zero_()


def _host_data(batch: Any, depth: int = 5) -> Iterator[Any]:
    """Arrays, once lists of numbers have been overwritten."""
    values = batch.values() if isinstance(batch, dict) else vars(batch).values() if hasattr(batch, "__dict__") else ()
    for value in values if depth else ():
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, list):
            value[:] = [0] * len(value) if not value or not isinstance(value[0], list) else value[::-1]
        elif not isinstance(value, torch.Tensor):
            yield from _host_data(value, depth - 1)


def _keep_busy(backend: Backend) -> None:
    """Give the device something to do first, so that steps stand in a queue behind it."""
    if backend.device.type == "cpu":
        return
    block = torch.full((_SIDE, _SIDE), 1 / _SIDE, device=backend.device)  # no random numbers, which steps may draw
    block = block @ block  # the first may load a library
    backend.synchronize()
    begun = time.perf_counter()
    block = block @ block
    backend.synchronize()
    for _ in range(min(_MOST, math.ceil(_BUSY / (time.perf_counter() - begun)))):
        block = block @ block
