"""Recorded files: safetensors with a JSON header in their metadata, written whole or not at all, read with distrust."""

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any, Final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...dataflow.capabilities import dtype_from_text
from ...dataflow.errors import ConfigError, RecordingError
from ...dataflow.serial import from_data, json_data, to_data
from .records import FORMAT, Header, StepRecord, plain_from_text

_KEY: Final = "slotgraph"
MOST_HEADER: Final = 1 << 25
"""The letters of a file's header."""
MOST_RECORDS: Final = 1 << 18
"""The steps, values and other objects of a header."""
MOST_RANKS: Final = 1 << 20
"""The ranks that a file may tell of."""
_LONGEST: Final = 2000
"""The letters of an error about a file."""
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NATIVE: Final = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_FLOATS}
"""The dtypes that every version of safetensors has. Others are kept as bytes."""


def check_place(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a file that can be written, as far as can be known now. ConfigError says why it cannot."""
    try:
        file = pathlib.Path(path)
        fault = "" if file.suffix == ".safetensors" else "it is no .safetensors file"
        if file.is_dir():
            fault = "it is a folder"
        if not fault:
            with contextlib.suppress(FileNotFoundError):
                file.lstat()  # fails if the name is too long
            with tempfile.TemporaryFile(dir=file.parent):
                return file
    except (OSError, TypeError, ValueError) as error:
        fault = getattr(error, "strerror", None) or str(error)
    raise ConfigError(
        f"{path!r:.300} cannot be recorded to: {fault}: name a .safetensors file in a folder that you may write to"
    )


def write(path: pathlib.Path, header: Header) -> None:
    """Write a file, in place of the one that was there. Only its owner may read it: it holds what users asked.

    Raises:
        RecordingError: The header is larger than one that can be read, or the file cannot be written.
    """
    text = json.dumps(to_data(header), allow_nan=False)
    if len(text) > MOST_HEADER or text.count("{") > MOST_RECORDS:
        raise RecordingError(
            f"{path.name}: {len(text):,} letters of plain data are more than a header takes: keep fewer steps"
        )
    found = {key: one.elements for step in header.steps for key, one in step.values()}
    tensors = {
        key: one if one.dtype in _NATIVE else one.reshape(-1).view(torch.uint8)
        for key, one in found.items()
        if one is not None
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".slotgraph.", dir=path.parent) as folder:
            part = pathlib.Path(folder, path.name)
            part.touch(0o600)
            save_file(tensors, part, metadata={_KEY: text})
            part.replace(path)
    except (OSError, SafetensorError) as error:
        raise RecordingError(f"{path.name} cannot be written: {getattr(error, 'strerror', None) or error}") from error


@attrs.frozen(eq=False)
class RecordedFile:
    """A file that was read and checked: its path, and its header, whose values have their elements."""

    path: pathlib.Path
    header: Header

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RecordedFile":
        """Read a file. RecordingError says what is wrong with it.

        A file takes no more memory than its own size and a share of it, whatever it claims to hold.
        """
        file = pathlib.Path(path)
        try:
            _need(file.is_file() or not file.exists(), "it is no file")  # to open a pipe would wait for its writer
            with safe_open(file, framework="pt", device="cpu") as opened:
                return cls(file, _header(opened))
        except Exception as error:  # each layer has its own errors for a file that it cannot read
            raise RecordingError(
                f"{file.name}: it is no recording that can be read: {str(error)[:_LONGEST]}"
            ) from error

    def steps(self, only: int | None = None) -> tuple[StepRecord, ...]:
        """All steps, or the one of a number. RecordingError if there is none."""
        found = tuple(step for step in self.header.steps if only in (None, step.number))
        if found:
            return found
        known = ", ".join(str(step.number) for step in self.header.steps) or "none"
        none = "no steps: none was run while it was recorded" if only is None else f"no step {only}: it has {known}"
        raise RecordingError(f"{self.path.name} has {none}")


def _need(holds: object, fault: str) -> None:
    """ValueError, unless something holds of a file."""
    if not holds:
        raise ValueError(fault)


def _header(opened: Any) -> Header:
    """The header with the elements of its values. ValueError, or an error of a library, says what is wrong."""
    text = (opened.metadata() or {}).get(_KEY, "")
    _need(text, "it has no steps of slotgraph")
    fits = len(text) <= MOST_HEADER and text.count("{") <= MOST_RECORDS
    _need(fits, f"its header has more than {MOST_HEADER:,} letters, or more than {MOST_RECORDS:,} records")
    data = json_data(text)
    number = data.get("format") if isinstance(data, dict) else None
    _need(number == FORMAT, f"it has format {number!r:.50}, and this version reads {FORMAT}")
    header = from_data(data, Header)
    _check_ranks(header)
    values = [row for step in header.steps for row in step.values()]
    single = len({key for key, _ in values}) == len(values)
    single &= len({step.number for step in header.steps}) == len(header.steps)
    _need(single, "two of its steps, or two values of a step, have the same name")
    unlike = {key for key, value in values if value.has_elements} ^ set(opened.keys())
    _need(not unlike, f"its steps and its tensors do not both have {min(unlike, default='')!r}")
    for key, value in values:
        if value.kind == "plain" and not value.why:
            plain_from_text(value.data)
        if value.has_elements:
            stored, dtype = opened.get_tensor(key), dtype_from_text(value.dtype)
            is_native = dtype in _NATIVE
            elements = stored if is_native else stored.clone().view(dtype).view(value.shape)
            fits = stored.dtype == (dtype if is_native else torch.uint8) and elements.shape == value.shape
            value.elements = elements
            _need(fits, f"{key!r} holds {stored.dtype} {list(stored.shape)}, and its header says {value}")
    return header


def _check_ranks(header: Header) -> None:
    ranks = header.runner.ranks
    size = 0 if ranks is None else ranks.size
    if ranks is not None:
        known = 0 <= ranks.rank < size <= MOST_RANKS and ranks.shards > 0
        _need(known, f"there is no rank {ranks.rank} of {size} with {ranks.shards} shards")
    for step in header.steps:
        if step.ranks is not None:
            forced = 0 if step.ranks.forced is None else step.ranks.forced
            fits = all(len(rows) == size and min(rows) >= 0 for _, rows in step.ranks.live) and 0 <= forced < size
            _need(fits, f"step {step.number}: its ranks are not the {size} that its runner had")
