"""Fingerprints: a runner and its declaration as a file remembers them, and where another runner differs."""

import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch

from ...dataflow.roles import Role, dtype_text
from ...dataflow.slots import Slot
from ..parts import Parts
from .plain import NotPlainError, plain_to_data
from .ranks import ranks_record
from .records import RanksRecord, RunnerRecord, SlotRecord

_NEEDED = ("shape", "dtype", "placement")
"""What of a copied slot must be as it was, for its recorded value to fit."""


def versions() -> tuple[tuple[str, str], ...]:
    """What the process runs on."""
    try:
        own = importlib.metadata.version("slotgraph")
    except importlib.metadata.PackageNotFoundError:  # copied into another package
        own = "unknown"
    found = {
        "slotgraph": own,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return tuple(found.items())


def runner_record(parts: Parts[Any]) -> RunnerRecord:
    """A runner as it is now."""
    stage, graphs = parts.stage, parts.graphs
    declaration = stage.declaration
    return RunnerRecord(
        kind=parts.name,
        inputs=declaration.name,
        backend=stage.backend.name,
        lowering="" if graphs is None else graphs.filler.lowering,
        config=_as_plain(parts.config.as_data()),
        settings=_as_plain(_named_in(declaration.settings)),
        sizes=tuple(sorted((axis.name, size) for axis, size in stage.sizes.items())),
        buckets=tuple(sorted(parts.sizes)),
        slots=tuple(slot_record(name, slot) for name, slot in declaration.slots.items()),
        fields=tuple(declaration.fields),
        disabled=declaration.disabled,
        fixed=tuple(axis.name for axis in declaration.axes if axis.fixed),
        ranks=ranks_record(declaration.ranks),
    )


def slot_record(name: str, slot: Slot) -> SlotRecord:
    """A slot as it is declared, in text."""
    source, rule, compute = slot.reads(name), slot.rule(), slot.computes()
    came = str(source) if source is not None else "" if compute is None else compute.name
    dtype = f"{slot.dtype.name} (role)" if isinstance(slot.dtype, Role) else dtype_text(slot.dtype)
    return SlotRecord(
        name=name,
        kind=slot.kind,
        shape=tuple(map(str, slot.shape)),
        dtype=dtype,
        placement=slot.placement,
        tail="" if rule is None else str(rule),
        source=came,
        optional=slot.optional,
    )


def _named_in(settings: object) -> Mapping[str, Any]:
    """Settings by name, of a mapping or an object."""
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        return {str(name): value for name, value in settings.items()}
    kind = type(settings)
    names = [one.name for one in attrs.fields(kind)] if attrs.has(kind) else list(getattr(settings, "__dict__", {}))
    return {name: getattr(settings, name) for name in names}


def _as_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that are plain data; of others what they are."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = plain_to_data(value)
        except NotPlainError as error:
            found[name] = f"left out: {error}"
    return found


@attrs.frozen
class Differences:
    """Where a runner differs from the recorded one: what keeps its steps from being run, and what is worth knowing."""

    refused: tuple[str, ...]
    noted: tuple[str, ...]


def differences(theirs: RunnerRecord, parts: Parts[Any]) -> Differences:
    """Each difference of two runners in a line that says what the file has, and what the runner has."""
    ours = runner_record(parts)
    refused, noted = [*_sizes(theirs, ours), *_ranks(theirs.ranks, ours.ranks)], [*_runners(theirs, ours)]
    known = {slot.name: slot for slot in ours.slots}
    recorded = {slot.name: slot for slot in theirs.slots}
    copied = {name for name, slot in parts.stage.declaration.slots.items() if slot.reads(name) is not None}
    for name, slot in recorded.items():
        if name not in known:
            noted.append(f"slot {name!r}: the file has {_said(slot)}, the runner no such slot")
            continue
        for field, line in _fields(slot, known[name]):
            (refused if name in copied and field in _NEEDED else noted).append(line)
    for name in (one for one in known if one not in recorded):
        line = f"slot {name!r}: the file has no such slot, the runner {_said(known[name])}"
        (refused if name in copied and not known[name].optional else noted).append(line)
    return Differences(tuple(refused), tuple(noted))


def _fields(theirs: SlotRecord, ours: SlotRecord) -> Iterator[tuple[str, str]]:
    for field in ("kind", "shape", "dtype", "placement", "tail", "source", "optional"):
        one, other = getattr(theirs, field), getattr(ours, field)
        if one != other:
            texts = [f"[{', '.join(value)}]" if isinstance(value, tuple) else value for value in (one, other)]
            name = f"slot {theirs.name!r}: {field}"
            yield field, f"{name}: the file has {texts[0] or 'none'}, the runner {texts[1] or 'none'}"


def _said(slot: SlotRecord) -> str:
    return f"{slot.kind} {slot.dtype} [{', '.join(slot.shape)}]"


def _sizes(theirs: RunnerRecord, ours: RunnerRecord) -> Iterator[str]:
    """Fixed axes of other sizes, by which every shape differs."""
    now = dict(ours.sizes)
    for axis, size in theirs.sizes:
        if axis in ours.fixed and axis in theirs.fixed and now.get(axis, size) != size:
            yield f"size of {axis}: the file has {size}, the runner {now[axis]}"


def _ranks(theirs: RanksRecord | None, ours: RanksRecord | None) -> Iterator[str]:
    """Other ranks, by which all that is computed from them, and what they agree on, differs."""
    if theirs == ours or (theirs is None and ours is not None and ours.size == 1):
        return
    way_out = "" if theirs is None else "; make it of ranks=RecordedRanks.of(file), without a process group"
    yield f"ranks: the file has {_rank(theirs)}, the runner {_rank(ours)}{way_out}"


def _rank(one: RanksRecord | None) -> str:
    if one is None:
        return "none"
    shards = f", {one.shards} shards" if one.shards > 1 else ""
    return f"rank {one.rank} of {one.size}{shards}{', known to get the same batches' if one.equal else ''}"


def _runners(theirs: RunnerRecord, ours: RunnerRecord) -> Iterator[str]:
    for field in ("kind", "inputs", "backend", "lowering", "buckets", "config", "settings", "disabled", "fields"):
        one, other = getattr(theirs, field), getattr(ours, field)
        if isinstance(one, dict) and isinstance(other, dict):
            for key in sorted(one.keys() | other.keys()):
                if one.get(key) != other.get(key):
                    yield f"{field} {key!r}: the file has {one.get(key)!r}, the runner {other.get(key)!r}"
        elif one != other:
            yield f"{field}: the file has {_plainly(one)}, the runner {_plainly(other)}"


def _plainly(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
