"""What went wrong on a device, in words: where in the step, what was said, and the way out."""

import re
from collections.abc import Iterable
from typing import Final

import torch

from ..dataflow.errors import CaptureError, ComputeError, place_of

Advice = Iterable[tuple[str, str]]
"""What an error says, in lower case, and the way out where it says so."""
_LOWER: Final = (
    "lower the number of buckets, the largest bucket, or the share of memory that the engine's KV cache takes"
)
_IN_CPP: Final = re.compile(r"^\S+:\S+\.cpp:\d+ (NPU function error: )?")
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the device had too little memory, as the allocator, the driver or a library says it."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("out of memory" in text or "alloc_failed" in text)
    )


def out_of_memory(error: BaseException, while_: str) -> CaptureError:
    """The error for a bucket that the device has no memory for."""
    asked = _ASKED.search(str(error))
    said = f"tried to allocate {asked[1]}" if asked else first_line(error)
    return CaptureError(f"the device's memory ran out {while_} ({said}): {_LOWER}")


def not_captured(error: BaseException, advice: Advice, conditions: Advice = ()) -> CaptureError:
    """The error for a step that raised, or that the device refused, while it was captured.

    advice: for what a step does. conditions: for what is wrong whatever the step does.
    """
    if ran_out_of_memory(error):
        return out_of_memory(error, "while this bucket was captured")
    said, text = first_line(error), str(error).lower()
    place = "" if isinstance(error, ComputeError) else place_of(error)  # which says it itself
    for sign, way_out in conditions:
        if sign in text:
            return CaptureError(f"nothing can be captured as things are ({said}): {way_out}")
    for sign, way_out in advice:
        if sign in text:
            return CaptureError(f"a captured step cannot do what it does{place} ({said}): {way_out}")
    if isinstance(error, ComputeError):
        return CaptureError(said)
    return CaptureError(f"the step raised {type(error).__name__}{place} while it was captured: {said}")


def raised_by_step(error: Exception, when: str) -> CaptureError:
    """The error for a step that raised on the CPU; a computed slot's error says itself where that was."""
    own = isinstance(error, ComputeError)
    return CaptureError(str(error) if own else f"the step raised {when}: {type(error).__name__}: {error}")


def first_line(error: BaseException) -> str:
    """What an error says, without a place in C++ before it or the paragraphs after it."""
    lines = _IN_CPP.sub("", str(error).strip()).splitlines()
    return lines[0] if lines else type(error).__name__
