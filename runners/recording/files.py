"""Recorded files: safetensors, whose metadata has a header as JSON; written whole or not at all, read with distrust."""

import contextlib
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...dataflow.errors import ConfigError, RecordingError
from ...dataflow.roles import dtype_from_text
from ...dataflow.serial import from_data, json_data, to_data
from .plain import lists_fit, plain_from_data
from .records import FORMAT, Header, StepRecord, Value, ranks_faults

_KEY: Final = "slotgraph"
MOST_HEADER: Final = 1 << 25
"""Bytes that a file's header may have: 32 MiB."""
MOST_RECORDS: Final = 1 << 18
"""Steps, values and other records that a header may have: each is an object once it is read."""
MOST_NUMBERS: Final = 1 << 56
"""The product of an empty value's other dims: beyond, neither torch nor NumPy can count the bytes."""
DIMS: Final = 64
"""Dims that a tensor may have, as in torch."""
_NATIVE: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Dtypes that every version of safetensors has, by its own words; others are kept as bytes."""
_NUMBERS: Final = frozenset({torch.int64, torch.float64, torch.bool})
"""Dtypes of numbers in lists."""
_UNREADABLE: Final = (
    SafetensorError,
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    OverflowError,
)
"""What reading a file that someone else made may raise, in whichever layer finds its fault."""


def check_place(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a file that can be written, as far as that can be known now; ConfigError says why it cannot."""
    try:
        file = pathlib.Path(path)
    except TypeError as error:
        message = f"a recording is written to a path, got {path!r:.100}"
        raise ConfigError(message) from error
    if file.suffix != ".safetensors":
        message = f"a recording is a .safetensors file, got {str(file)!r:.300}"
        raise ConfigError(message)
    try:
        if file.is_dir():
            message = f"{str(file)!r} is a folder: name a file to record to"
            raise ConfigError(message)
        if not file.parent.is_dir():
            message = f"there is no folder {str(file.parent)!r:.300} to record to"
            raise ConfigError(message)
        with contextlib.suppress(FileNotFoundError):
            file.lstat()  # which says whether the name is too long
        with tempfile.TemporaryFile(dir=file.parent):
            return file
    except (OSError, ValueError) as error:
        message = f"{str(file)!r:.300} cannot be recorded to: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(message) from error


def write(path: pathlib.Path, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a file in the place of what was there. Only its owner may read it: it holds what users asked.

    RecordingError where the header is larger than what is read again, or the file cannot be written.
    """
    data = to_data(header)
    text, records = json.dumps(data, allow_nan=False), _records_in(data)
    if len(text) * 2 > MOST_HEADER or records > MOST_RECORDS:  # every letter may be escaped once more
        message = (
            f"{path.name}: its steps have {len(text):,} letters of plain data and {records:,} records, more than a "
            "header takes: keep fewer"
        )
        raise RecordingError(message)
    try:
        handle, name = tempfile.mkstemp(prefix=".slotgraph.", suffix=".part", dir=path.parent)
        os.close(handle)
        try:
            save_file({key: _storable(one) for key, one in tensors.items()}, name, metadata={_KEY: text})
            pathlib.Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                pathlib.Path(name).unlink()
            raise
    except (OSError, SafetensorError) as error:
        message = f"{path.name} cannot be written: {getattr(error, 'strerror', None) or error}"
        raise RecordingError(message) from error


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in _NATIVE else tensor.reshape(-1).view(torch.uint8)


@attrs.frozen(eq=False)
class RecordedFile:
    """A file that was read: its header, of which all was checked, and where the elements of its values are."""

    path: pathlib.Path
    header: Header

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RecordedFile":
        """Read a file's header, and hold the file to it. RecordingError says what is wrong with the file."""
        try:
            file = pathlib.Path(path)
        except TypeError as error:
            message = f"a recording is read from a path, got {path!r:.100}"
            raise RecordingError(message) from error
        with _opened(file) as opened:
            header = _header(file, opened.metadata())
            found = set(opened.keys())
            wanted = [row for step in header.steps for row in step.values() if row[1].has_tensor]
            for key, value in wanted:
                if key not in found:
                    _fault(file, f"the elements of {key!r} are missing")
                _hold(file, key, value, opened.get_slice(key))
            extra = sorted(found - {key for key, _ in wanted})
            if extra:
                _fault(file, f"it has a tensor {extra[0]!r} that no step names")
        return cls(file, header)

    def tensors(self, step: StepRecord) -> dict[str, torch.Tensor]:
        """The elements of a step's values, by their names in the file, in memory of their own."""
        with _opened(self.path) as opened:
            return {key: _restored(opened.get_tensor(key), one) for key, one in step.values() if one.has_tensor}

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size


@contextlib.contextmanager
def _opened(file: pathlib.Path) -> Iterator[Any]:
    """The file opened by safetensors, with whatever is wrong with it as RecordingError."""
    try:
        _check_lengths(file)
        with safe_open(file, framework="pt", device="cpu") as opened:
            yield opened
    except RecordingError:
        raise
    except _UNREADABLE as error:
        message = f"{file.name}: it is no recording that can be read: {error}"
        raise RecordingError(message) from error


def _check_lengths(file: pathlib.Path) -> None:
    """The header's length, which comes first, lies within the file, and is not larger than any header of ours."""
    if file.exists() and not file.is_file():  # to open a pipe would wait for who writes it
        _fault(file, "it is no file")
    with file.open("rb") as opened:
        first = opened.read(8)
    length, size = int.from_bytes(first, "little"), file.stat().st_size
    if len(first) < 8 or 8 + length > size:  # noqa: PLR2004 - the bytes of that length
        _fault(file, f"it is cut off, or no safetensors file: its header would be longer than all its {size:,} bytes")
    if length > MOST_HEADER:
        _fault(file, f"its header of {length:,} bytes is larger than any recording's, {MOST_HEADER:,}")


def _header(file: pathlib.Path, metadata: Mapping[str, str] | None) -> Header:
    text = (metadata or {}).get(_KEY)
    if text is None:
        _fault(file, "it has no steps of slotgraph: it is a safetensors file of something else")
    try:
        data = json_data(text)
    except ValueError as error:
        _fault(file, f"its header is no JSON: {error}")
    if _records_in(data) > MOST_RECORDS:
        _fault(file, f"its header has more than {MOST_RECORDS:,} records, more than any recording's")
    number = data.get("format") if isinstance(data, dict) else None
    if number != FORMAT:
        _fault(file, f"it is written in format {number!r:.50}, and this version reads {FORMAT}")
    try:
        header = from_data(data, Header)
    except (ConfigError, RecursionError) as error:
        _fault(file, str(error)[:2000])
    _check_steps(file, header)
    return header


def _records_in(data: Any) -> int:
    """How many objects of JSON there are, however deep."""
    count, todo = 0, [data]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            count += 1
            todo += one.values()
        elif isinstance(one, list):
            todo += one
    return count


def _check_steps(file: pathlib.Path, header: Header) -> None:
    """Steps and values have names of their own, what is plain data is such, and what has elements a dtype for them."""
    runner = header.runner
    for what, found in (("config", runner.config), ("settings", runner.settings)):
        if not isinstance(found, dict) or not all(_is_plain(one) for one in found.values()):
            _fault(file, f"its runner's {what} is no plain data by name")
    for fault in ranks_faults(runner.ranks, header.steps):
        _fault(file, fault)
    if len({step.number for step in header.steps}) < len(header.steps):
        _fault(file, "two of its steps have the same number")
    for step in header.steps:
        keys = [key for key, _ in step.values()]
        if len(set(keys)) < len(keys):
            _fault(file, f"two values of step {step.number} have the same name")
        for key, value in step.values():
            _check_value(file, key, value)


def _is_plain(data: Any) -> bool:
    try:
        plain_from_data(data)
    except RecordingError:
        return False
    return True


def _check_value(file: pathlib.Path, key: str, value: Value) -> None:
    if not _is_plain(value.value):
        _fault(file, f"{key!r} is no plain data")
    if not value.has_tensor:
        return
    if len(value.shape) > DIMS or not all(0 <= size < 1 << 63 for size in value.shape):
        _fault(file, f"{key!r} has a shape that no tensor has")
    try:
        dtype = dtype_from_text(value.dtype)
        known = value.kind != "array" or torch.empty(0, dtype=dtype, device="cpu").numpy().size == 0
    except (ValueError, TypeError, RuntimeError) as error:
        _fault(file, f"{key!r}: {error}")
    numbers = dtype in _NUMBERS and lists_fit(value.shape)
    if not known or (value.kind in ("list", "tuple") and not numbers):
        _fault(file, f"{key!r} is no {value.kind} of numbers")
    if 0 in value.shape and math.prod(filter(None, value.shape)) > MOST_NUMBERS:
        _fault(file, f"{key!r} has a shape that no tensor has")


def _hold(file: pathlib.Path, key: str, value: Value, found: Any) -> None:
    """The elements are as many, and of the kind, that the header says."""
    dtype, stored = dtype_from_text(value.dtype), (found.get_dtype(), tuple(found.get_shape()))
    as_bytes = ("U8", (math.prod(value.shape) * dtype.itemsize,))
    wanted = (_NATIVE[dtype], value.shape) if dtype in _NATIVE else as_bytes
    if stored != wanted:
        _fault(file, f"{key!r} holds {stored[0]} {list(stored[1])}, and its header says {wanted[0]} {list(wanted[1])}")


def _restored(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Elements in memory of their own, of the dtype and shape that the record says."""
    dtype = dtype_from_text(value.dtype)
    return tensor.clone() if dtype in _NATIVE else tensor.clone().view(dtype).view(value.shape)


def _fault(file: pathlib.Path, what: str) -> NoReturn:
    message = f"{file.name}: {what}"
    raise RecordingError(message)
