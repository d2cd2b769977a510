"""Addresses: whether everything that graphs read still lies where it lay when they were captured."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

from ...dataflow.errors import ReplayError
from ..holdings import Change
from ..running import running
from ..traffic import Traffic, run_seen
from .batches import CheckedBatch
from .comparison import named
from .report import Finding
from .trial import Subject, Trial

NAME: Final = "addresses"


def check(subject: Subject[Any], batches: Iterable[CheckedBatch]) -> list[Finding]:
    """Slots whose buffer has moved, and other memory that graphs read and that has moved.

    Of what the step holds (closures, globals, attributes, a model's weights) only what it reads on one of the batches
    is told, with the operator that reads it.
    """
    moved = "the buffer of slot {!r} has moved since capture: its graphs read and write what was there"
    found = [Finding(NAME, name, moved.format(name)) for name in subject.graphs.buffers.moved()]
    faults: dict[str, list[str]] = {}
    for (rows, _), captured in subject.graphs.captured.items():
        try:
            captured.graph.check_addresses()
        except ReplayError as error:
            faults.setdefault(str(error), []).append(str(rows))
    found += [Finding(NAME, None, f"bucket {', '.join(rows)}: {fault}") for fault, rows in faults.items()]
    changes = subject.graphs.holdings.changed()
    for one in batches if subject.together.any(bool(changes)) else ():
        told = readers(subject.trial(one), changes)
        found += [Finding(NAME, None, message) for message in told.values()]
        changes = [change for change in changes if change.holding.name not in told]
    return found


def readers(trial: Trial[Any], changes: Sequence[Change]) -> dict[str, str]:
    """What is to be said of tensors that have moved, by their name, if the step reads them."""
    by_storage = {_storage(change.now): change for change in changes}
    told: dict[str, str] = {}

    def note(operator: str, taken: Iterable[torch.Tensor], _: object = None) -> None:
        step = running()
        for tensor in taken if step is None or step.inside is None else ():  # breaks run anew in each step
            change = by_storage.get(_storage(tensor))
            if change is not None:
                name = change.holding.name
                told.setdefault(
                    name,
                    f"{operator} reads {name}, and {change.what} ({change.holding.text}): graphs read where it was; "
                    "write into the tensor of the capture (copy_), or capture again",
                )

    with trial.together.raising("the look at what a step reads"):
        raised = trial.run(
            lambda outputs: note("the caller", (tensor for _, tensor in named(outputs))),
            by=lambda: run_seen(Traffic(done=note), trial.eagerly),
        )
        if raised is not None:
            raise raised
    return told


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it
