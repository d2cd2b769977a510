"""What a recorded file says: its steps and their values, the runner and its declaration, as records and plain data."""

import importlib.metadata
import json
import platform
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import attrs
import numpy as np
import torch

from ...dataflow.capabilities import dtype_text
from ...dataflow.errors import RecordingError
from ...dataflow.explain import explain_declaration
from ...dataflow.hostdata import array_dtype
from ..ranks.group import Ranks
from ..runner import Parts
from ..statistics import Why

FORMAT: Final = 3
"""The number of this format. A file of another number is refused."""
MOST: Final = 1 << 20
"""The values, and the letters of their text, that one piece of plain data may have."""
DEPTH: Final = 32
"""How deep plain data may be nested."""
_BITS: Final = 1 << 13
"""The bits of an integer that is kept: Python does not read longer ones from text."""
_WHY: Final = 300
"""The letters of why a value is not kept."""
_FACTS: Final = ("tail", "source", "function", "optional")
_PARTS: Final = ("slots", "fields", "staged", "outputs")


@attrs.define(kw_only=True)
class Value:
    """One value of a step. A tensor or an array has its elements in a tensor of the file.

    Fields without an `init` are not in the file's header.
    """

    name: str
    kind: Literal["tensor", "array", "plain", "other"]  # "other" cannot be kept
    dtype: str = ""
    shape: tuple[int, ...] = ()
    where: Literal["device", "host"] = "host"  # of a tensor
    dense: bool = True  # whether a tensor was contiguous
    data: str = ""  # of plain data
    why: str = ""  # why the file does not have the value
    elements: torch.Tensor | None = attrs.field(default=None, init=False, eq=False, repr=False)
    nbytes: int = attrs.field(default=0, init=False, eq=False)  # of memory, while it is kept
    arrived: torch.Tensor | None = attrs.field(default=None, init=False, eq=False)  # set once the device has copied it

    @classmethod
    def of(cls, name: str, source: Any, device: torch.device) -> "Value":
        """What a source is, for a recording on a device. A tensor is not copied yet. Never raises."""
        try:
            return cls._found(name, source, device)
        except NotPlainError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - a source may be anything, and a recording must not end a step
            why = f"{type(error).__name__}: {error}"
        return cls(name=name, kind="other", why=why[:_WHY])

    @classmethod
    def _found(cls, name: str, source: Any, device: torch.device) -> "Value":
        if isinstance(source, torch.Tensor):
            if source.is_meta or source.layout != torch.strided:
                raise NotPlainError(
                    f"a {'meta' if source.is_meta else source.layout} tensor of shape {list(source.shape)}"
                )
            found, tensor = cls(name=name, kind="tensor"), source
            found.where = "device" if source.device.type == device.type else "host"
            found.dense = source.is_contiguous() and not source.is_neg() and not source.is_conj()
        elif isinstance(source, np.ndarray):
            if array_dtype(source) is None:
                raise NotPlainError(f"an array of {source.dtype}, which torch has no dtype for")
            found, tensor = cls(name=name, kind="array"), torch.from_numpy(np.array(source, order="C"))
        else:
            found = cls(name=name, kind="plain", data=plain_to_text(source))
            found.nbytes = len(found.data)
            return found
        found.dtype, found.shape, found.elements = dtype_text(tensor.dtype), tuple(tensor.shape), tensor
        found.nbytes = tensor.numel() * tensor.element_size()
        return found

    @property
    def has_elements(self) -> bool:
        """Whether its elements are a tensor of the file."""
        return not self.why and self.kind in ("tensor", "array")

    def lose(self, why: str) -> None:
        """Keep nothing of it but what it was."""
        if self.kind != "other":
            self.data, self.elements, self.nbytes, self.why = "", None, 0, why

    def __str__(self) -> str:
        """What it is, in a word or two."""
        if self.kind == "other":
            return self.why
        what = "plain data" if self.kind == "plain" else f"{self.dtype} {[*self.shape]}, {self.kind}"
        place = " on the device" if self.where == "device" else ""
        return f"{what}{place}; not kept: {self.why}" if self.why else what + place


@attrs.frozen(kw_only=True)
class Raised:
    """The error that ended a step."""

    kind: str
    message: str
    traceback: str = ""


@attrs.frozen(kw_only=True)
class RanksRecord:
    """The ranks that ran each step together: which one this is, of how many; equal and shards as in `Ranks`."""

    rank: int
    size: int
    equal: bool
    shards: int

    def __str__(self) -> str:
        """The ranks in a sentence."""
        shards = f", {self.shards} shards" if self.shards > 1 else ""
        return f"rank {self.rank} of {self.size}{shards}{', known to get the same batches' if self.equal else ''}"


@attrs.frozen(kw_only=True)
class StepRanks:
    """What the ranks told each other before a step."""

    live: tuple[tuple[str, tuple[int, ...]], ...]  # the live rows of each rank, by varying axis
    forced: int | None = None  # the rank whose needs decided; None if nothing was exchanged
    why: Why = "fits"  # its reason
    alone: str = ""  # what this rank would have done by itself, in a sentence


@attrs.define(kw_only=True)
class StepRecord:
    """One step."""

    number: int  # in the recording, from 0
    path: str = ""  # the decision of the runner, or of all ranks
    bucket: int | None = None
    reason: str = ""  # of the decision, or why there was none
    live: tuple[tuple[str, int], ...] = ()  # rows by varying axis
    slots: tuple[Value, ...] = ()  # what the batch brought for copied slots
    absent: tuple[str, ...] = ()  # optional slots that it did not bring
    fields: tuple[Value, ...] = ()
    staged: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] | None = None  # the tensors that it returned, if they were asked for
    replays: int = 0
    raised: Raised | None = None
    notes: tuple[str, ...] = ()  # what is missing from the file, and why
    ranks: StepRanks | None = None  # None without ranks, or if the step ended before they exchanged anything

    def values(self) -> Iterator[tuple[str, Value]]:
        """All values, each with the name of its elements in the file."""
        return ((f"{self.number}.{part}.{one.name}", one) for part in _PARTS for one in getattr(self, part) or ())

    @property
    def nbytes(self) -> int:
        """How much memory its values take."""
        return sum(value.nbytes for _, value in self.values())

    def note(self, text: str) -> None:
        """Say what is missing from the file."""
        self.notes = (*self.notes, text)

    def missing(self) -> list[str]:
        """The inputs that the file does not have, a line each. Without them the step cannot run."""
        return [f"slot {one.name!r}: {one.why}" for one in (*self.slots, *self.staged) if one.why]


@attrs.frozen(kw_only=True)
class RunnerRecord:
    """The runner that was recorded: facts in text, by subject."""

    facts: dict[str, str]
    ranks: RanksRecord | None = None

    @classmethod
    def of(cls, parts: Parts[Any]) -> "RunnerRecord":
        """A runner as it is now."""
        stage, declaration, config = parts.stage, parts.stage.declaration, parts.config.as_data()
        ranks: Ranks | None = declaration.ranks
        record = None
        if ranks is not None:
            record = RanksRecord(rank=ranks.rank, size=ranks.size, equal=ranks.equal, shards=ranks.shards)
        facts = {
            "kind": parts.name,
            "inputs": declaration.name,
            "backend": stage.backend.name,
            "lowering": "" if parts.graphs is None else parts.graphs.filler.lowering,
            "buckets": ", ".join(map(str, sorted(parts.sizes))),
            "disabled": ", ".join(declaration.disabled),
            "fields": ", ".join(declaration.fields),
            "ranks": str(record or ""),
        }
        for what, given in (("config", config), ("settings", _named_in(declaration.settings))):
            found = (Value.of(name, value, stage.backend.device) for name, value in given.items())
            facts |= {f"{what} {one.name!r}": one.why or one.data for one in found}
        facts |= {f"size of {axis}": str(size) for axis, size in stage.sizes.items() if axis.fixed}
        for slot in explain_declaration(declaration, stage.backend.capabilities, stage.backend.name).slots:
            dtype, shape = slot.role or slot.dtype, ", ".join(slot.shape)
            facts[f"slot {slot.name!r}"] = f"{slot.kind} {dtype} [{shape}] on {slot.placement}"
            facts |= {f"slot {slot.name!r}: {fact}": str(getattr(slot, fact) or "") for fact in _FACTS}
        return cls(facts=facts, ranks=record)


def _named_in(settings: Any) -> Mapping[str, Any]:
    """Settings by name: those of a mapping, or of an object's fields or attributes."""
    if isinstance(settings, Mapping):
        return settings
    return attrs.asdict(settings, recurse=False) if attrs.has(type(settings)) else getattr(settings, "__dict__", {})


@attrs.frozen(kw_only=True)
class Header:
    """All that a file says beside the elements of its values."""

    format: int = FORMAT
    versions: tuple[tuple[str, str], ...]
    runner: RunnerRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()


def versions() -> tuple[tuple[str, str], ...]:
    """What this process runs on."""
    try:
        own = importlib.metadata.version("slotgraph")
    except importlib.metadata.PackageNotFoundError:  # copied into another package
        own = "unknown"
    found = {
        "slotgraph": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    return (*((name, str(one)) for name, one in found.items() if one), ("platform", platform.platform()))


class NotPlainError(TypeError):
    """A value is not plain data. The message says what it is."""


def plain_to_text(value: Any) -> str:
    """None, bools, numbers, text, and lists, tuples and dicts of them, as JSON, in which NaN and infinity stand.

    Raises:
        NotPlainError: It is anything else, or too large or too deep.
    """
    return json.dumps(_tagged(value, [MOST], DEPTH))


def _tagged(value: Any, room: list[int], depth: int) -> Any:
    """Plain data in JSON's words. room: the number of values and letters, and depth: the levels, that it may have."""
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    room[0] -= 1 + len(value) if kind is str else 1
    if room[0] < 0 or depth == 0:
        raise NotPlainError(f"more than {MOST:,} values and letters" if depth else f"more than {DEPTH} levels deep")
    if kind in (list, tuple):
        if len(value) < room[0] and set(map(type, value)) == {int} and max(map(int.bit_length, value)) < _BITS:
            room[0] -= len(value)  # at once, since batches have long lists of integers
            inner = list(value)
        else:
            inner = [_tagged(one, room, depth - 1) for one in value]
        return inner if kind is list else {"tuple": inner}
    if kind is dict:
        return {"dict": [[_tagged(one, room, depth - 1) for one in item] for item in value.items()]}
    if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() < _BITS):
        return value
    raise NotPlainError("an integer with too many digits" if kind is int else f"{kind.__module__}.{kind.__qualname__}")


def plain_from_text(text: str) -> Any:
    """What `plain_to_text` was given. RecordingError if it never writes such text."""
    try:
        return json.loads(text, object_hook=_untagged)
    except (ValueError, TypeError, RecursionError) as error:
        raise RecordingError(
            f"plain data is nested too deeply, or has words that no recording has: {error!s:.200}"
        ) from error


def _untagged(data: dict[str, Any]) -> Any:
    match data:
        case {"tuple": list(inner), **rest} if not rest:
            return tuple(inner)
        case {"dict": list(items), **rest} if not rest:
            return dict(items)
    raise ValueError(reprlib.repr(data))
