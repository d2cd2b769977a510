"""What went wrong on a device, in words: where in the step, what was said, and the way out."""

import contextlib
import re
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from ..dataflow.errors import CaptureError

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
    place, said, text = place_of(error), first_line(error), str(error).lower()
    for sign, way_out in conditions:
        if sign in text:
            return CaptureError(f"nothing can be captured as things are ({said}): {way_out}")
    for sign, way_out in advice:
        if sign in text:
            return CaptureError(f"a captured step cannot do what it does{place} ({said}): {way_out}")
    return CaptureError(f"the step raised {type(error).__name__}{place} while it was captured: {said}")


def first_line(error: BaseException) -> str:
    """What an error says, without a place in C++ before it or the paragraphs after it."""
    lines = _IN_CPP.sub("", str(error).strip()).splitlines()
    return lines[0] if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """The innermost line of the step that an error came through, outside torch: " at model.py:7, `x.item()`"."""
    others = (str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(others)]
    if not frames:
        return ""
    source = f", `{frames[-1].line}`" if frames[-1].line else ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}{source}"
