"""Addresses: whether everything that graphs read still lies where it lay when they were captured."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from ...dataflow.errors import ReplayError
from ...dataflow.inputs import Inputs
from ..holdings import Change
from ..parts import Parts
from ..runner import Runner
from ..running import running
from ..state import State
from ..traffic import Traffic, run_seen
from .eagerly import ran_eagerly
from .parity import buffers_in, written_slots_kept
from .report import Case, Finding
from .together import Together

NAME: Final = "addresses"


def check(runner: Runner[Any], cases: Sequence[Case], state: State) -> list[Finding]:
    """Slots whose buffer has moved, memory that has which a graph is known to read, and what has that the step holds.

    Of what the step holds (closures, globals, attributes, a model's weights) only what it reads on one of the batches
    is told, with the operator that reads it.
    """
    parts = runner.parts
    if parts.graphs is None:
        return []
    found = [Finding(NAME, name, _moved(name)) for name in parts.graphs.buffers.moved()]
    found += _of_graphs(parts)
    changes = parts.graphs.holdings.changed()
    for case in cases if Together(parts).any(bool(changes)) else ():
        view = runner.fill(case.batch, **case.side)
        told = readers(parts, view, state, changes)
        found += [Finding(NAME, None, message) for message in told.values()]
        changes = [one for one in changes if one.holding.name not in told]
    return found


def _of_graphs(parts: Parts[Any]) -> Iterator[Finding]:
    """What the device can tell of its graphs, each fault once."""
    said: dict[str, list[str]] = {}
    for (rows, _), captured in parts.graphs.captured.items() if parts.graphs is not None else ():
        try:
            captured.graph.check_addresses()
        except ReplayError as error:
            said.setdefault(str(error), []).append(str(rows))
    return (Finding(NAME, None, f"bucket {', '.join(rows)}: {message}") for message, rows in said.items())


def _moved(slot: str) -> str:
    return f"the buffer of slot {slot!r} has moved since capture: its graphs read and write what was there"


def readers(parts: Parts[Any], view: Inputs, state: State, changes: Sequence[Change]) -> dict[str, str]:
    """What is to be said of tensors that have moved, by their name, where the step reads them on a filled view."""
    by_storage = {one.now.untyped_storage()._cdata: one for one in changes}  # noqa: SLF001 - torch compares them by it
    told: dict[str, str] = {}

    def note(tensor: torch.Tensor, operator: str) -> None:
        step = running()
        if step is not None and step.inside is not None:  # a break, which runs anew in each step
            return
        change = by_storage.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - as above
        if change is not None:
            name = change.holding.name
            told.setdefault(
                name,
                f"{operator} reads {name}, and {change.what} ({change.holding.text}): graphs read where it was; "
                "write into the tensor of the capture (copy_), or capture again",
            )

    with state.kept(), written_slots_kept(buffers_in(parts)):
        run_seen(Traffic(reads=note), lambda: ran_eagerly(parts, view))
    return told
