"""Recorded files: steps and their values, the runner and its declaration, as JSON in a safetensors file."""

import importlib.metadata
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Iterator
from typing import Any, Final, Literal, Self

import attrs
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...dataflow.capabilities import dtype_text
from ...dataflow.errors import RecordingError
from ...dataflow.ragged import Ragged, without_nesting
from ..engine.config import json_data
from ..engine.runner import Runner
from ..engine.statistics import Decision
from ..explained.declared import explain_declaration
from ..ranks.group import Message, Ranks
from ..serial import from_data, to_data

FORMAT: Final = 5
"""The number of this format. A file with another number is refused."""
MOST = 1 << 22
MOST_HEADER = 1 << 25
"""The most characters of one piece of plain data, and of a file's header."""
MOST_RANKS: Final = 1 << 20  # the largest number of ranks that a file may have
_WHY = 300
_LONGEST = 2000
"""The most characters of why a value was not kept, and of an error about a file."""
_KEY: Final = "slotgraph"
_PARTS: Final = ("slots", "fields", "staged", "outputs")
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
_DTYPES: Final = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_FLOATS}
"""The dtypes that every version of safetensors has."""


@attrs.define(kw_only=True)
class RecordedValue:
    """One value of a step. The elements of a tensor or an array are a tensor of the file.

    Fields without an `init` are not in the file's header.
    """

    name: str
    kind: Literal["tensor", "array", "plain", "other"]  # values of kind "other" are not recorded
    dtype: str = ""
    shape: tuple[int, ...] = ()
    where: Literal["device", "host"] = "host"  # where a tensor was
    data: str = ""  # plain data as JSON
    why: str = ""  # if the file lacks the value, the reason
    elements: torch.Tensor | None = attrs.field(default=None, init=False, eq=False, repr=False)
    arrived: torch.Tensor | None = attrs.field(default=None, init=False, eq=False)  # set when the copy is done

    @classmethod
    def of(cls, name: str, source: Any, device: torch.device) -> "RecordedValue":
        """Describe a source, for a recording on a device. A tensor is not copied yet. Never raises."""
        try:
            source = without_nesting(source)
            if isinstance(source, Ragged):
                source = source.tolist()
            if isinstance(source, torch.Tensor):
                is_plain = source.layout == torch.strided and not source.is_meta
                need(
                    is_plain and source.dtype in _DTYPES,
                    f"a {source.layout} tensor of {source.dtype} on {source.device}",
                )
                found = cls(name=name, kind="tensor")
                tensor = source
                found.where = "device" if source.device.type == device.type else "host"
            elif isinstance(source, np.ndarray):
                found = cls(name=name, kind="array")
                tensor = torch.from_numpy(np.array(source, order="C"))
            else:
                return cls(name=name, kind="plain", data=plain_to_text(source))
        except Exception as error:  # noqa: BLE001 - a source may be anything, and a recording must not end a step
            return cls(name=name, kind="other", why=f"{error}"[:_WHY] or type(error).__name__)
        found.dtype, found.shape, found.elements = dtype_text(tensor.dtype), tuple(tensor.shape), tensor
        return found

    @property
    def has_elements(self) -> bool:
        """Whether its elements are a tensor of the file."""
        return not self.why and self.kind in ("tensor", "array")

    def lose(self, why: str) -> None:
        """Drop the value, and keep only its description."""
        if self.kind != "other":
            self.data = ""
            self.elements = None
            self.why = why

    def __str__(self) -> str:
        """Return its description in a few words."""
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
    """The ranks that ran each step together.

    Attributes:
        rank: Which rank this is.
        size: How many there are.
        equal: As in `Ranks`.
        shards: As in `Ranks`.
    """

    rank: int
    size: int
    equal: bool
    shards: int

    @classmethod
    def of(cls, ranks: Ranks, **more: Any) -> Self:
        """Record the ranks of a declaration. more: The fields of a subclass."""
        return cls(rank=ranks.rank, size=ranks.size, equal=ranks.equal, shards=ranks.shards, **more)

    def __str__(self) -> str:
        """Return the ranks in a sentence."""
        shards = f", {self.shards} shards" if self.shards > 1 else ""
        return f"rank {self.rank} of {self.size}{shards}{', known to get the same batches' if self.equal else ''}"


@attrs.define(kw_only=True)
class StepRecord:
    """One step."""

    number: int  # its number in the recording, from 0
    decision: Decision | None = None  # the decision of the runner or of all ranks; None if there was none
    live: tuple[tuple[str, int], ...] = ()  # live rows by varying axis
    slots: tuple[RecordedValue, ...] = ()  # the batch's values of copied slots
    absent: tuple[str, ...] = ()  # optional slots that the batch lacked
    fields: tuple[RecordedValue, ...] = ()
    staged: tuple[RecordedValue, ...] = ()
    outputs: tuple[RecordedValue, ...] | None = None  # its outputs, if they are recorded
    replays: int = 0
    raised: Raised | None = None
    notes: tuple[str, ...] = ()  # what is missing from the file, and why
    messages: tuple[Message, ...] = ()  # the message of each rank, if they agreed on the step
    alone: str = ""  # this rank's own choice

    def values(self) -> Iterator[tuple[str, RecordedValue]]:
        """Return all values, each with the name of its elements in the file."""
        return ((f"{self.number}.{part}.{one.name}", one) for part in _PARTS for one in getattr(self, part) or ())

    def missing(self) -> list[str]:
        """Return a line for each input that the file lacks. Without them the step cannot run."""
        return [f"slot {one.name!r}: {one.why}" for one in (*self.slots, *self.staged) if one.why]


@attrs.frozen(kw_only=True)
class RunnerRecord:
    """The runner that was recorded.

    Attributes:
        needed: Facts that must be the same in a runner that runs its steps: sizes, copied slots and ranks, in text.
        facts: Further facts, whose differences are only noted.
        ranks: Its ranks, or None.
    """

    needed: dict[str, str]
    facts: dict[str, str]
    ranks: RanksRecord | None = None

    @classmethod
    def of(cls, runner: Runner[Any]) -> "RunnerRecord":
        """Describe a runner as it is now."""
        stage = runner.stage
        declaration = runner.stage.declaration
        graphs = runner.graphs
        facts = {
            "kind": runner.name,
            "inputs": declaration.name,
            "backend": stage.backend.name,
            "lowering": "" if graphs is None else graphs.filler.lowering.name,
            "buckets": str(sorted(runner.sizes)),
            "disabled": ", ".join(declaration.disabled),
            "fields": ", ".join(declaration.fields),
            **{f"config {name!r}": str(value) for name, value in runner.config.as_data().items()},
        }
        needed = {f"size of {axis}": str(size) for axis, size in stage.sizes.items() if axis.fixed}
        for slot in explain_declaration(declaration, stage.backend.capabilities, stage.backend.name).slots:
            group = facts if slot.source is None else needed
            what = f"{slot.kind} {slot.role or slot.dtype} [{', '.join(slot.shape)}]"
            group[f"slot {slot.name!r}"] = f"{what} on {slot.placement}"
            facts[f"filling of slot {slot.name!r}"] = ", ".join(filter(None, (slot.tail, slot.source, slot.function)))
        record = None
        ranks = declaration.ranks
        if ranks is not None:
            record = RanksRecord.of(ranks)
            needed["ranks"] = str(record)
        return cls(needed=needed, facts=facts, ranks=record)


@attrs.define(kw_only=True)
class RecordedFile:
    """The contents of a recording: the last steps of a runner.

    Attributes:
        runner: The runner that was recorded.
        steps: Its last steps, whose values have their elements.
        versions: Versions of Python, torch and others, by name.
        notes: Faults outside of the steps.
        name: The name of the file that was read.
    """

    format: int = FORMAT
    versions: dict[str, str]
    runner: RunnerRecord
    steps: tuple[StepRecord, ...]
    notes: tuple[str, ...] = ()
    name: str = attrs.field(default="", init=False, eq=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RecordedFile":
        """Read a file and check it. Raise RecordingError if it is invalid."""
        if not isinstance(path, str | os.PathLike):
            raise RecordingError(f"expected the path of a recording, got {path!r:.80}")
        file = pathlib.Path(path)
        try:
            need(file.is_file() or not file.exists(), "it is not a file")  # opening a pipe would wait for its writer
            with safe_open(file, framework="pt", device="cpu") as opened:
                found = cls._of(opened)
        except Exception as error:  # each library raises other errors for an invalid file
            why = str(error)[:_LONGEST]
            raise RecordingError(f"{file.name}: it is not a recording that can be read: {why}") from error
        found.name = file.name
        return found

    @classmethod
    def _of(cls, opened: Any) -> "RecordedFile":
        """Return the contents of an open file. Raise ValueError, or an error of a library, if they are invalid."""
        text = (opened.metadata() or {}).get(_KEY, "")
        need(text, "it has no steps of slotgraph")
        data = json_data(text)
        number = data.get("format") if isinstance(data, dict) else None
        need(number == FORMAT, f"it has format {number!r:.50}, and this version reads {FORMAT}")
        found = from_data(data, cls)
        ranks = found.runner.ranks
        size = 0 if ranks is None else ranks.size
        if ranks is not None:
            known = 0 <= ranks.rank < size <= MOST_RANKS and ranks.shards > 0
            need(known, f"there is no rank {ranks.rank} of {size} with {ranks.shards} shards")
        for step in found.steps:
            fault = f"step {step.number}: its ranks are not the {size} that its runner had"
            need(not step.messages or len(step.messages) == size, fault)
        values = [row for step in found.steps for row in step.values()]
        need(len(dict(values)) == len(values), "two of its steps, or two values of a step, have the same name")
        unlike = {key for key, value in values if value.has_elements} ^ set(opened.keys())
        need(not unlike, f"its steps and its tensors do not both have {min(unlike, default='')!r}")
        for key, value in values:
            if value.kind == "plain" and not value.why:
                plain_from_text(value.data)
            if value.has_elements:
                held = value.elements = opened.get_tensor(key)
                fits = (dtype_text(held.dtype), tuple(held.shape)) == (value.dtype, value.shape)
                need(fits, f"{key!r} holds {held.dtype} {list(held.shape)}, and its header says {value}")
        return found

    def write(self, path: pathlib.Path) -> None:
        """Write the file in place of an earlier one. Only its owner may read it, since it contains users' prompts.

        Raises:
            RecordingError: The header is larger than one that can be read, or the file cannot be written.
        """
        text = json.dumps(to_data(self), allow_nan=False)
        if len(text) > MOST_HEADER:
            raise RecordingError(
                f"{path.name}: {len(text):,} characters of plain data are more than a header can have: keep fewer steps"
            )
        tensors = {key: one.elements for step in self.steps for key, one in step.values() if one.elements is not None}
        try:
            with tempfile.TemporaryDirectory(prefix=".slotgraph.", dir=path.parent) as folder:
                part = pathlib.Path(folder, path.name)
                part.touch(0o600)
                save_file(tensors, part, metadata={_KEY: text})
                part.replace(path)
        except (OSError, SafetensorError) as error:
            why = getattr(error, "strerror", None) or error
            raise RecordingError(f"{path.name} cannot be written: {why}") from error

    def only(self, number: int | None = None) -> tuple[StepRecord, ...]:
        """Return all steps, or the one with a number. Raise RecordingError if there is none."""
        found = tuple(step for step in self.steps if number in (None, step.number))
        if not found:
            known = ", ".join(str(step.number) for step in self.steps) or "none"
            raise RecordingError(f"{self.name} has no step{'' if number is None else f' {number}'}: it has {known}")
        return found


def need(holds: object, fault: str) -> None:
    """Raise ValueError unless a condition on a file is true."""
    if not holds:
        raise ValueError(fault)


def versions() -> dict[str, str]:
    """Return the versions of Python, the libraries and the device."""
    try:
        own = importlib.metadata.version("slotgraph")
    except importlib.metadata.PackageNotFoundError:  # the source was copied into another package
        own = "unknown"
    found = {"slotgraph": own, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {**found, "cuda": torch.version.cuda or "none", "platform": platform.platform()}


def plain_to_text(value: Any) -> str:
    """Write plain data as JSON.

    Raise TypeError, ValueError or RecursionError if it is not plain, too large or too deep.
    """
    text = json.dumps(value, default=_number)
    need(len(text) <= MOST, f"more than {MOST:,} letters of text")
    return text


def _number(value: Any) -> Any:
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):
        return value.item()
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def plain_from_text(text: str) -> Any:
    """Return the value that `plain_to_text` has written. Raise RecordingError if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"plain data is nested too deeply, or is not JSON: {error!s:.200}") from error
