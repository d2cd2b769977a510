"""What went wrong on a CUDA device, in words: what was refused, where in the step, and the way out."""

import re
import traceback
from pathlib import Path
from typing import Final

import torch

from ..dataflow.errors import CaptureError

_ON_DEVICE: Final = (
    "it waits for the device, as item(), tolist(), cpu(), bool(), nonzero, x[mask], unique, torch.tensor(device=...), "
    "blocking copies and synchronize do. Keep the value on the device (torch.where, index_select), or hand it to the "
    "step in a slot"
)
_STREAMS: Final = (
    "it uses a stream or an event that is no part of this capture. Let the other stream wait for the current one "
    "first, and the current one for it before the step ends"
)
_CAUGHT: Final = "an operation of the step was refused, and the step went on after it: let its error through"
_ADVICE: Final = (
    (
        "unless the cpu tensor is pinned",
        "copy from a slot with placement='host', which is pinned, or from a device slot",
    ),
    ("operation not permitted when stream is capturing", _ON_DEVICE),
    ("previous error during capture", _CAUGHT),
    ("uncaptured work in another stream", _STREAMS),
    ("legacy stream depend on a capturing", _STREAMS),
    ("unjoined work", _STREAMS),
    ("last recorded in a capturing stream", _STREAMS),
    ("outside graph capture", "a graph draws from the device's default generator alone: leave out generator="),
    ("not registered to the graph", "a graph draws from the device's default generator alone: leave out generator="),
    (
        "cublas_status_not_initialized",
        "its libraries set themselves up at first use: capture after a warm-up, as warmups= does",
    ),
    ("cuda graph is empty", "nothing was recorded: the step works on another stream or device, or does nothing at all"),
)
_LOWER: Final = (
    "lower the number of buckets, the largest bucket, or the share of memory that the engine's KV cache takes"
)
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


def not_captured(error: BaseException) -> CaptureError:
    """The error for a step that raised, or that the device refused, while it was captured."""
    if ran_out_of_memory(error):
        return out_of_memory(error, "while this bucket was captured")
    place, said = place_of(error), first_line(error)
    for text, advice in _ADVICE:
        if text in str(error).lower():
            return CaptureError(f"a captured step cannot do what it does{place} ({said}): {advice}")
    return CaptureError(f"the step raised {type(error).__name__}{place} while it was captured: {said}")


def first_line(error: BaseException) -> str:
    """What an error says, without the paragraphs that CUDA's errors carry."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def place_of(error: BaseException) -> str:
    """The innermost line of the step that an error came through, outside torch: " at model.py:7, `x.item()`"."""
    torch_folder, own = str(Path(torch.__file__).parent), str(Path(__file__).parent)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((torch_folder, own))]
    if not frames:
        return ""
    source = f", `{frames[-1].line}`" if frames[-1].line else ""
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}{source}"
