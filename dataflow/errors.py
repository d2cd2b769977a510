"""Errors: few classes, each derived from the nearest builtin; where they come from, and which name was meant."""

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
__all__ = [  # what `slotgraph.errors` shows
    "BackendUnavailableError", "BatchError", "BindError", "CaptureError", "CheckError", "ComputeError",
    "ConfigError", "CycleError", "DeclarationError", "DeclarationErrors", "LayoutError",
    "MissingSourceError", "RankError", "RecordingError", "RegressionError", "ReplayError", "SlotGraphError",
    "StaleOutputError", "WrongBytesError",
]
# fmt: on


class SlotGraphError(Exception):
    """Base of every error of this library, so that one except clause can hold them all."""


class DeclarationError(SlotGraphError, TypeError):
    """A declaration breaks a rule: the message names the slot, what was expected and the way out."""


class DeclarationErrors(ExceptionGroup[DeclarationError], SlotGraphError):  # noqa: N818 - the plural says it
    """All faults of one declaration together."""

    def __str__(self) -> str:
        """Show each fault on a line of its own: a logger, or a line of pytest, shows nothing else of a group."""
        return f"{self.message}: " + "\n".join(map(str, self.exceptions))

    def derive(self, excs: Sequence[DeclarationError]) -> "DeclarationErrors":  # type: ignore[override]
        """A part of the group, as `except*` asks for it."""
        return DeclarationErrors(self.message, excs)


class CycleError(DeclarationError):
    """Slots need each other in a circle: the message shows the path."""


@attrs.frozen
class Fault:
    """What is wrong with the source of one slot.

    Attributes:
        slot: The slot's name.
        text: What is wrong, as a sentence that names the slot.
        dims: The dims that have another size, where nothing else is wrong with the shape.
    """

    slot: str
    text: str
    dims: tuple[int, ...] = ()


class BatchError(SlotGraphError, ValueError):
    """A batch does not fit its declaration; nothing was written.

    Attributes:
        faults: What is wrong with each source, where sources are to blame.
    """

    faults: Sequence[Fault] = ()

    @classmethod
    def of(cls, *faults: Fault) -> Self:
        """The error for sources that do not fit."""
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
    """A backend cannot run here: the message says why and what to install."""


class CaptureError(SlotGraphError, RuntimeError):
    """A graph could not be captured."""


class ReplayError(SlotGraphError, RuntimeError):
    """A graph cannot be replayed now: not captured yet, forked, or its addresses moved."""


class StaleOutputError(SlotGraphError, RuntimeError):
    """An output was used after the replay that overwrote it."""


class CheckError(SlotGraphError, RuntimeError):
    """A check found a wrong step: the message names the slot, or what else the step depends on."""


class WrongBytesError(SlotGraphError, AssertionError):
    """A fill left other bytes than the oracle, or a step returned others: the message names the slot and the row."""


class RegressionError(SlotGraphError, AssertionError):
    """A fill or a step takes longer than was allowed, compared with the one by hand in the same run."""


class ConfigError(SlotGraphError, ValueError):
    """A configuration has an unknown key or a value of the wrong kind."""


class RecordingError(SlotGraphError, ValueError):
    """A recorded file cannot be read or written, or is of another runner."""


class LayoutError(SlotGraphError, RuntimeError):
    """A layout of shared memory breaks a promise: the message names the slots that would meet."""


class RankError(SlotGraphError, RuntimeError):
    """Ranks disagree: one refused its batch, is at another step, or is missing. The message names it."""


for _name in __all__:  # what a traceback prints is what users import
    globals()[_name].__module__ = "slotgraph.errors"

_OTHERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), contextlib.__file__)
"""Files that a failure is not blamed on: those of torch, and of this library."""


def place_of(error: BaseException) -> str:
    """The innermost line of the user's that an error came through: " at model.py:7, `x.item()`"."""
    return _innermost(traceback.extract_tb(user_traceback(error)))


def place_now() -> str:
    """The innermost line of the user's that is running, in the same words."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(_OTHERS)]
    return _innermost(frames)


def _innermost(frames: Sequence[traceback.FrameSummary]) -> str:
    """Name the last of the user's frames, "" where there is none."""
    if not frames:
        return ""
    source = f", `{frames[-1].line}`" if frames[-1].line else ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}{source}"


def origin_of(error: BaseException) -> BaseException:
    """What this library made an error of, or the error itself."""
    while isinstance(error, SlotGraphError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def user_traceback(error: BaseException) -> TracebackType | None:
    """Make a traceback of those lines that are the user's own. Return None if the error passed through none."""
    made: TracebackType | None = None
    steps, step = list[TracebackType](), error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    for step in reversed(steps):
        if not step.tb_frame.f_code.co_filename.startswith(_OTHERS):
            made = TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def kind_text(value: object) -> str:
    """What somebody passed, in words: the name of its class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else type(value).__name__


def hint(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Ask for the known name that is nearest to an unknown one, or say something else where none is near."""
    names = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else otherwise


def did_you_mean(name: Any, known: Iterable[str]) -> str:
    """The same as the end of a sentence."""
    near = hint(str(name), known)
    return f"; {near}" if near else ""


def blame(slot: str, function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raise what a slot's function raised as ComputeError, with the slot, the function and its line.

    CaptureError and DeclarationError stay what they are; other errors of this library, and of memory, say the same.
    """
    name, place = getattr(function, "__qualname__", repr(function)), place_of(error)
    if isinstance(error, CaptureError):
        raise CaptureError(f"slot {slot!r}, in its function {name}{place}: {error}") from error
    if isinstance(error, DeclarationError):  # of `Step`
        raise DeclarationError(f"slot {slot!r}, in its function {name}: {error}") from error
    if isinstance(error, SlotGraphError | torch.OutOfMemoryError):
        raise error
    raise ComputeError(f"slot {slot!r}: its function {name} raised {type(error).__name__}{place}: {error}") from error
