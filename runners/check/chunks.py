"""Check of chunks: graphs of several steps do what single steps do, and requests write and read what is theirs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...dataflow.done import is_reset
from ...dataflow.errors import ConfigError
from ...dataflow.sources import SETTINGS, Compute
from ...dataflow.tails import Once, Pad, resolve_value
from ...dataflow.transition import rows_of_requests
from ..engine.sampling import Sample
from ..engine.state import CopiedPieces
from .trial import Leaves, Tensors, Trial, copies, live_part, mismatches

Faults = Iterator[tuple[str | None, str]]
"""What is wrong, and the slot that causes it, if one does."""


def chunk_faults(trial: Trial, one: Sample) -> Faults:
    """Run chunks of steps from a batch, and as many single steps, and compare outputs, slots and state."""
    chunks = trial.graphs.chunks
    state = trial.state
    for count in chunks.counts if chunks is not None else ():
        with state.kept():
            single = _run(trial, one, count, 1)
            left = state.copy()
        try:
            with state.kept():
                several = _run(trial, one, count, count)
                labels = state.labels(state.apart(left))
        except ConfigError as error:
            trial.notes[f"no graph of several steps was checked: {error}"] = None
            return
        apart = next(mismatches(single, several, names=("one by one", "in one launch")), None)
        if apart is not None or labels:
            what = apart or f"other bytes are left in {labels[0]}"
            why = "something happens between single steps that no rule and no step does"
            yield None if apart is None else apart.slot, f"{what}, in a graph of {count} steps: {why}"


def _run(trial: Trial, one: Sample, count: int, chunk: int) -> Leaves:
    """Run one step and a chunk, and return all that the steps returned, and what slots hold behind them."""
    runner: Any = trial.runner  # only a DecodeRunner has `steps`
    found = dict[str, torch.Tensor]()
    for step in runner.steps(one.batch, chunk=chunk):
        found.update(copies(step.outputs, f"outputs of step {step.number}"))
        if step.number == count:
            break
    trial.backend.synchronize()
    absent = runner.stage.absent_in(trial.view)
    for name, slot in trial.slots.items():
        if name not in absent:
            view = trial.buffers[name].view(trial.step.padded_sizes)
            found[f"slot {name!r}"] = live_part(slot, view, trial.step).clone()
    return found


def ended_faults(trial: Trial) -> Faults:
    """Find slots by which requests that are done decide where the filled step writes state."""
    declaration = trial.declaration
    tails = dict[str, torch.Tensor]()
    for name, filled in trial.filled.items() if declaration.done else ():
        slot = trial.slots[name]
        rule = slot.rule()
        sizes = trial.step.padded_sizes
        has_rows = rows_of_requests(slot, sizes) is not None
        if has_rows and isinstance(rule, Pad | Once) and not is_reset(slot, sizes) and trial.is_filled(name):
            number = resolve_value(rule.value, trial.backend.capabilities, sizes)
            tails[name] = torch.full_like(filled, number)
    ended = {declaration.done: torch.ones_like(trial.filled[declaration.done])} if tails else {}
    written = _written(trial, ended) if tails else None
    for name, tail in tails.items() if written is not None else ():
        padded = _written(trial, {**ended, name: tail})
        labels = [] if written is None or padded is None else trial.state.labels(written, [padded])
        if labels:
            message = (
                f"requests that are done go on to write {labels[0]}, by slot {name!r}: only slots on the device "
                "with pad=value hold the tail where a request is done; declare it so"
            )
            yield name, message


def _written(trial: Trial, put: Tensors) -> CopiedPieces | None:
    """Run the step on these slots, and return masks of the state that it changes, or None if it raised."""
    before = trial.state.copy()
    return trial.run(lambda _: trial.state.apart(before), put)


def reserved_faults(trial: Trial) -> Faults:
    """Find ragged slots whose rows the filled step uses beyond what their `ragged=` says that it needs."""
    for name, slot in trial.slots.items():
        length = slot.ragged
        pad = slot.pad
        if name not in trial.filled or not (isinstance(length, Compute) and isinstance(pad, Pad)):
            continue
        used = trial.filled[name].clone()
        unused = trial.filled[name].clone()
        number = resolve_value(pad.value, trial.backend.capabilities, trial.step.padded_sizes)
        beyond = _beyond(trial, length, used)
        live_part(slot, used, trial.step)[beyond] = used.max()
        live_part(slot, unused, trial.step)[beyond] = number
        fault = _difference(trial, name, used, unused)
        if fault:
            message = (
                f"requests need more of slot {name!r} than its ragged= says, which is all that `needs` reserves: "
                f"{fault}, if the rest of each row holds {number}; let ragged= return more"
            )
            yield name, message


def _beyond(trial: Trial, length: Compute, filled: torch.Tensor) -> torch.Tensor:
    """Return a mask of what live rows do not need, as `ragged=` says."""
    given = dict[str, Any]()
    for need in length.needs:
        given[need] = trial.declaration.settings
        if need != SETTINGS:
            given[need] = live_part(trial.slots[need], trial.filled[need], trial.step).cpu().numpy()
    counts = torch.as_tensor(np.asarray(length.function(**given)), device=filled.device)
    return torch.arange(filled.shape[1], device=filled.device) >= counts[:, None]


def _difference(trial: Trial, name: str, before: torch.Tensor, after: torch.Tensor) -> str:
    """Return what changes in outputs or state if a slot holds something else, or ""."""
    state = trial.state
    usual = trial.run(lambda outputs: (copies(outputs, "output"), state.copy()), {name: before})
    if usual is None:  # other checks report the error
        return ""
    outputs, left = usual
    found = trial.run(lambda others: (copies(others, "output"), state.apart(left)), {name: after})
    if found is None:
        return f"the step raises {trial.error}"
    labels = [f"other bytes are left in {label}" for label in state.labels(found[1])]
    every = [*map(str, mismatches(outputs, found[0], names=("with more", "without"))), *labels]
    return next(iter(every), "")
