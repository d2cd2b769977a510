"""Errors: few classes, each derived from the nearest builtin, and helpers that locate a failure and suggest a name."""

import contextlib
import difflib
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import attrs
import torch

# fmt: off
__all__ = [  # the names that `slotgraph.errors` exports
    "BackendUnavailableError", "BatchError", "BindError", "CaptureError", "CheckError", "ComputeError",
    "ConfigError", "CycleError", "DeclarationError", "DeclarationErrors", "LayoutError",
    "MissingSourceError", "RankError", "RecordingError", "RegressionError", "ReplayError", "SlotGraphError",
    "StaleOutputError", "WrongBytesError",
]
# fmt: on


class SlotGraphError(Exception):
    """Base of every error of this library, so that one except clause can catch them all."""


class DeclarationError(SlotGraphError, TypeError):
    """A declaration breaks a rule: the message names the slot, what was expected and the way out."""


class DeclarationErrors(ExceptionGroup[DeclarationError], SlotGraphError):  # noqa: N818 - the plural says it
    """All faults of one declaration together."""

    def __str__(self) -> str:
        """Show each fault on a line of its own, since a logger or a line of pytest shows only this text of a group."""
        return f"{self.message}: " + "\n".join(map(str, self.exceptions))

    def derive(self, excs: Sequence[DeclarationError]) -> "DeclarationErrors":  # type: ignore[override]
        """Return part of the group, as `except*` requires."""
        return DeclarationErrors(self.message, excs)


class CycleError(DeclarationError):
    """Slots need each other in a circle. The message shows the path."""


@attrs.frozen
class Fault:
    """What is wrong with the source of one slot.

    Attributes:
        slot: The slot's name.
        text: What is wrong, as a sentence that names the slot.
        dims: The dims whose size is wrong, if nothing else is wrong with the shape.
    """

    slot: str
    text: str
    dims: tuple[int, ...] = ()


class BatchError(SlotGraphError, ValueError):
    """A batch does not fit its declaration. Nothing was written.

    Attributes:
        faults: What is wrong with each source, if sources are at fault.
    """

    faults: Sequence[Fault] = ()

    @classmethod
    def of(cls, *faults: Fault) -> Self:
        """Make the error for sources that do not fit."""
        made = cls("; ".join(fault.text for fault in faults))
        made.faults = faults
        return made


class MissingSourceError(BatchError, LookupError):
    """A required source is not in the batch."""


class BindError(SlotGraphError, ValueError):
    """A tensor cannot be adopted as a slot's buffer."""


class ComputeError(SlotGraphError, RuntimeError):
    """A slot's function raised, or returned what its slot cannot hold."""


class BackendUnavailableError(SlotGraphError, RuntimeError):
    """A backend cannot run on this machine. The message says why and what to install."""


class CaptureError(SlotGraphError, RuntimeError):
    """A graph could not be captured."""


class ReplayError(SlotGraphError, RuntimeError):
    """A graph cannot be replayed now: it is not captured yet, the process forked, or its addresses moved."""


class StaleOutputError(SlotGraphError, RuntimeError):
    """An output was used after the replay that overwrote it."""


class CheckError(SlotGraphError, RuntimeError):
    """A check found a wrong step. The message names the slot, or what else the step depends on."""


class WrongBytesError(SlotGraphError, AssertionError):
    """A fill or a step gave other bytes than the oracle. The message names the slot and the row."""


class RegressionError(SlotGraphError, AssertionError):
    """A fill or a step takes longer than allowed, compared with a handwritten one in the same run."""


class ConfigError(SlotGraphError, ValueError):
    """A configuration has an unknown key or a value of the wrong kind."""


class RecordingError(SlotGraphError, ValueError):
    """A recorded file cannot be read or written, or belongs to another runner."""


class LayoutError(SlotGraphError, RuntimeError):
    """A layout of shared memory breaks a promise. The message names the slots that would overlap."""


class RankError(SlotGraphError, RuntimeError):
    """Ranks disagree: one refused its batch, is at another step, or is missing. The message names it."""


for _name in __all__:  # so that tracebacks print the name that users import
    globals()[_name].__module__ = "slotgraph.errors"

_OTHERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__)
"""Files that a failure is never attributed to: those of torch, of this library and of contextlib."""


def place_of(error: BaseException) -> str:
    """Return the innermost line of user code that an error passed through, such as " at model.py:7, `x.item()`"."""
    return _innermost(traceback.extract_tb(user_traceback(error)))


def place_now() -> str:
    """Return the innermost line of user code that is running, in the same format."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OTHERS)]
    return _innermost(frames)


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    """Format the last frame, or return "" if there is none."""
    if not frames:
        return ""
    source = f", `{frames[-1].line}`" if frames[-1].line else ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}{source}"


def origin_of(error: BaseException) -> BaseException:
    """Return the exception that caused this library's error, or the error itself."""
    while isinstance(error, SlotGraphError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def user_traceback(error: BaseException) -> TracebackType | None:
    """Make a traceback of the frames in user code. Return None if the error passed through none."""
    made: TracebackType | None = None
    steps = list[TracebackType]()
    step = error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    for step in reversed(steps):
        if not step.tb_frame.f_code.co_filename.startswith(_OTHERS):
            made = TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def kind_text(value: object) -> str:
    """Describe the type of a value in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


def hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return "did you mean ...?" with the closest known name, or `otherwise` if none is close."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else otherwise


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """Return the same hint as the end of a sentence, or "" if no name is close."""
    near = hint(str(name), known)
    return f"; {near}" if near else ""


def blame(slot: str, function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raise ComputeError for what a slot's function raised. The message has the slot, the function and its line.

    CaptureError and DeclarationError keep their types. Other errors of this library and out-of-memory errors are raised
    unchanged.
    """
    name = getattr(function, "__qualname__", repr(function))
    place = place_of(error)
    if isinstance(error, CaptureError):
        raise CaptureError(f"slot {slot!r}, in its function {name}{place}: {error}") from error
    if isinstance(error, DeclarationError):  # raised by `Step`
        raise DeclarationError(f"slot {slot!r}, in its function {name}: {error}") from error
    if isinstance(error, SlotGraphError | torch.OutOfMemoryError):
        raise error
    raise ComputeError(f"slot {slot!r}: its function {name} raised {type(error).__name__}{place}: {error}") from error
