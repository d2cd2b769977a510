"""Checks of memory: nothing has moved since capture, each slot is written and read, no source is overwritten early."""

import collections
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...backends.operators import run_under
from ...backends.ring import ENTRIES, SEGMENT
from ...dataflow.buffers import overlaps, span
from ...dataflow.capabilities import HOST
from ...dataflow.declaration import LIVE_ROWS
from ...dataflow.errors import RecordingError, ReplayError
from ...dataflow.slots import BY_STEP
from ...dataflow.sources import look_up
from ...dataflow.tails import Once
from ..engine.bits import garbage, unequal_rows
from ..engine.current import current_step
from ..engine.sampling import Sample, rebuilt
from ..engine.state import Change
from ..engine.traffic import Traffic, run_seen
from ..testing.timing import occupier
from .trial import Finding, Tensors, Trial, copies, error_text, live_part, mismatches, named

RACE_STEPS: Final = ENTRIES + SEGMENT  # steps in flight: more than a ring has entries
FREE_SHARE: Final = 0.25
"""The share of the device's free memory that the outputs of all these steps may take."""
UNREAD: Final = "nothing reads slot"
"""How a finding of a slot that nothing reads begins."""
Span = tuple[int, int]
_BY_HOST: Final = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})


def check_moves(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Find slots whose buffers have moved, and other memory that has moved and that the step reads."""
    for name in trial.buffers.moved():
        message = f"the buffer of slot {name!r} has moved since capture: its graphs read and write what was there"
        yield Finding("addresses", name, message)
    faults = collections.defaultdict[str, list[str]](list)
    for (bucket, *_), captured in trial.graphs.captured.items():
        try:
            for graph in captured.graphs:
                graph.check_addresses()
        except ReplayError as error:
            faults[str(error)].append(str(bucket))
    for fault, buckets in faults.items():
        yield Finding("addresses", None, f"bucket {', '.join(buckets)}: {fault}")
    changes = trial.graphs.holdings.changed()
    for one in batches if trial.any(changes) else ():
        trial.fill(one)
        found = readers(trial, changes)
        yield from found.values()
        changes = [change for change in changes if change[0].name not in found]


def readers(trial: Trial, changes: Sequence[Change]) -> dict[str, Finding]:
    """Return a finding for each tensor that has moved and that the step reads, by its name."""
    found = dict[str, Finding]()
    places = {holding.name: span(now) for holding, now in changes}
    readings = users(trial, places, in_breaks=False)  # breaks run anew in each step, and read current addresses
    for holding, _ in changes:
        if holding.name in readings:
            is_freed = holding.is_freed
            what = "the memory of the capture is freed" if is_freed else "it is other memory than at capture"
            message = (
                f"{readings[holding.name]} reads {holding.name}, and {what} ({holding.text}): graphs read where it "
                "was; write into the tensor of the capture (copy_), or capture again"
            )
            found[holding.name] = Finding("addresses", None, message)
    return found


def users(trial: Trial, places: Mapping[str, Span], *, in_breaks: bool = True) -> dict[str, str]:
    """Run the step without its graph, and return the first reader of each piece of memory: an operator or its caller.

    Making a view reads nothing. An error of the step is raised on all ranks.
    """
    found: dict[str, str] = {}

    def note(user: str, taken: Iterable[torch.Tensor], _: object = None) -> None:
        step = current_step()
        if in_breaks or step is None or step.inside is None:
            for tensor in taken:
                for name, place in places.items():
                    if tensor.numel() and overlaps(tensor, [place]):
                        found.setdefault(name, user)

    class TakenByHost(TorchFunctionMode):
        """Records tensors whose values the host reads. On the CPU no operator runs for that."""

        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            del types
            if getattr(func, "__name__", "") in _BY_HOST:
                note("the host", args[:1])
            return func(*args, **(kwargs or {}))

    trial.run(
        lambda outputs: note("the caller", (tensor for _, tensor in named(outputs))),
        by=lambda: run_under(TakenByHost(), lambda: run_seen(Traffic(done=note), trial.eagerly)),
    )
    with trial.raising("the look at what a step reads"):
        if trial.error is not None:
            raise trial.error
    return found


def check_coverage(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run each batch over two kinds of garbage, and find slots that nothing writes or no operator reads."""
    is_unwritten = False
    present = set[str]()
    stale = set[str]()
    read = {*trial.read_outside, *(need for slot in trial.slots.values() for need in slot.needs)}
    read.update(name for name in trial.slots if name.startswith(LIVE_ROWS))  # tails of computed slots depend on these
    for number, one in enumerate(batches):
        trial.fill(one)
        found = [*_unwritten(trial, number)]
        yield from found
        is_unwritten = trial.any(is_unwritten or found)
        if not is_unwritten:  # otherwise the step would run on slots that nothing has written
            views = {name: vars(trial.view)[name] for name in trial.slots}
            spans = {name: span(view) for name, view in views.items() if view is not None}
            present.update(spans)
            absent = {one.name: span(one.tensor) for one in trial.buffers if views[one.name] is None and one.nbytes}
            readers_of = users(trial, {**spans, **absent})
            read.update(readers_of.keys() - absent.keys())
            for name in [name for name in absent if name in readers_of and name not in stale]:
                stale.add(name)
                message = (
                    f"slot {name!r} is absent in this batch, and {readers_of[name]} reads its memory, which holds an "
                    "earlier batch: keep no slot beyond its step, and take each from the view"
                )
                yield Finding("coverage", name, message)
    for name, slot in trial.slots.items():
        if is_unwritten or name not in present - read or slot.writers == BY_STEP or slot.argument is not None:
            continue
        reasons = {
            "it is optional": slot.optional,
            "it is constant": not slot.writers,
            "it is written once": isinstance(slot.rule(), Once),
            "it is on the host, where it may be read before the replay": slot.placement == HOST,
            "a kernel that is launched by itself may": trial.backend.device.type != "cpu",
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason is not None:
            trial.notes[f"no operator of the step reads slot {name!r}: {reason}"] = None
            continue
        message = (
            f"{UNREAD} {name!r}: no operator of the step takes it, and no computed slot needs it; leave it "
            f"out of the declaration, drop=[{name!r}], or name it in read_outside= if it is read between fill and "
            "replay"
        )
        yield Finding("coverage", name, message)


def _unwritten(trial: Trial, number: int) -> Iterator[Finding]:
    """Find outputs, and slots of functions on the device, that a step leaves unwritten over two kinds of garbage."""
    names = [name for name in trial.filled if not trial.is_filled(name)]
    pair = list[Tensors]()
    readers = _readers_in_chunks(trial)
    for flipped in (False, True):
        generator = torch.Generator().manual_seed(trial.seed + number)
        put = {name: garbage(trial.filled[name], generator, flipped=flipped) for name in names}
        put |= {name: torch.full_like(trial.filled[name], flipped) for name in readers}
        held = trial.run(lambda _: {name: vars(trial.view)[name].clone() for name in (*names, *readers)}, put)
        if held is None:
            yield from _reads_garbage(trial, put)
            return
        pair.append(held)
    for name in (*names, *readers):
        slot = trial.slots[name]
        one, other = (held[name] for held in pair)
        what = f"slot {name!r} is not written by its function"
        must = "a function that takes `out` must fill all of it, padded rows too"
        if slot.writers == BY_STEP:
            one, other = (live_part(slot, tensor, trial.step) for tensor in (one, other))
            what = f"output slot {name!r} is not written by the step"
            must = "write every live row in each step, or leave the slot out of the declaration"
        elif name in readers:
            one, other = (live_part(slot, tensor, trial.step) for tensor in (one, other))
            what = f"slot {name!r} is not written by the step, and then= of {readers[name]!r} reads it"
            must = "nobody else writes it between the steps of one launch; write it in the step, or leave out chunks="
        if rows := unequal_rows(one, other):
            yield Finding("coverage", name, f"{what}: {rows} still hold what lay there before; {must}")


def _reads_garbage(trial: Trial, put: Tensors) -> Iterator[Finding]:
    """Find slots whose garbage makes the step raise, and which the step or their function so has not written."""
    for name, tensor in put.items():
        trial.run(lambda _: None, {name: tensor})
        if trial.error is not None:
            message = (
                f"the step raised {error_text(trial.error)} because of what lay in slot {name!r} before, which nothing "
                "has written: a function that takes `out` must fill all of it, padded rows too"
            )
            yield Finding("coverage", name, message)


def _readers_in_chunks(trial: Trial) -> dict[str, str]:
    """Return slots that producers write, each with a slot whose rule reads it, if a launch has several steps."""
    rules = trial.declaration.rules.items() if trial.graphs.chunks is not None else ()
    found = dict[str, str]()
    for reader, rule in rules:
        for need in rule.needs:
            slot = trial.slots.get(need)
            if need in trial.filled and slot is not None and "producer" in slot.writers and not slot.is_state:
                found[need] = reader
    return found


def check_races(trial: Trial, batches: Iterable[Sample]) -> Iterator[Finding]:
    """Run batches in flight, with sources overwritten after each call, and each alone, and compare."""
    drawn = list(batches)
    with trial.state.kept():
        nbytes = sum(tensor.nbytes for part in _call(trial, drawn[0]) for tensor in part.values())
    room = int(FREE_SHARE * trial.backend.memory().free / max(2 * nbytes, 1))
    rooms = trial.ranks.gather("how many steps there is room for", "", min(RACE_STEPS, room))
    wanted = list(itertools.islice(itertools.cycle(drawn), max(2, min(steps for _, steps in rooms))))
    try:
        given = [_copied(trial, one) for one in wanted]
    except RecordingError as error:
        trial.notes[f"races were left out: {error}"] = None
        return
    alone = _calls(trial, wanted, flight=False)
    flight = _calls(trial, given, flight=True)
    for number, (one, other) in enumerate(zip(alone, flight, strict=True)):
        output, slot = (
            next(mismatches(*both, names=("alone", "in flight")), None) for both in zip(one, other, strict=True)
        )
        if output is None:
            continue
        name = None
        why = "no slot explains it: it came through an upload, an output, or other memory"
        if slot is not None:
            name = slot.slot
            why = f"{slot}: the fill read its source, or what carries it to the device, after that was overwritten"
        elif late := next(iter(trial.graphs.filler.hosts.slots.items()), None):
            name, operator = late
            copies_late = f"{operator} copies from slot {name!r} in host memory when the device gets there"
            why = f"{copies_late}, and the next fill came first"
        yield Finding("races", name, f"step {number} of {len(wanted)} in flight: {output}; {why}")
        return


def _copied(trial: Trial, one: Sample) -> Sample:
    """Make a batch with the same values in memory of its own."""
    values = trial.sources(one)
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            made = value.detach().clone()
            values[name] = made.pin_memory() if value.is_pinned() else made
        else:
            values[name] = copy.deepcopy(value)
    return rebuilt(trial.declaration, values, {name: look_up(one.batch, name) for name in trial.declaration.fields})


def _calls(trial: Trial, batches: Sequence[Sample], *, flight: bool) -> list[tuple[Tensors, Tensors]]:
    """Run steps, alone or in flight, and return the results of each.

    In flight, sources are overwritten after each call.
    """
    backend = trial.backend
    runs = []
    with trial.state.kept(), trial.slots_kept():
        if flight and backend.device.type != "cpu":
            occupier(backend)(30_000)  # work of some microseconds, so that the host runs ahead of the device
        for one in batches:
            values = trial.sources(one).values() if flight else ()
            runs.append(_call(trial, one))
            for value in values:  # zeros are in the range of each index
                if isinstance(value, torch.Tensor):
                    value.zero_()
                elif isinstance(value, np.ndarray):
                    value[...] = 0
                elif isinstance(value, list):
                    value[:] = [[0] * len(row) if isinstance(row, list) else 0 for row in value]
            if not flight:
                backend.synchronize()
    return runs


def _call(trial: Trial, one: Sample) -> tuple[Tensors, Tensors]:
    """Run a step, and return copies of its outputs and of its copied slots on the device."""
    live = trial.runner.size(one.batch, one.side)
    held = dict[str, torch.Tensor]()
    sizes = {**trial.runner.stage.sizes, **dict(zip(trial.declaration.varying, live, strict=False))}
    outputs = copies(trial.runner(one.batch, **one.side), "output")
    for name, source in trial.sources(one).items():
        if trial.slots[name].placement != HOST and source is not None:
            held[f"slot {name!r}"] = trial.buffers[name].view(sizes).clone()
    return outputs, held
