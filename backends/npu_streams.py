"""Streams of an NPU by number: torch_npu finds its own by it, and takes no events on one that is told by its handle."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .npu_runtime import npu, npu_c
from .segments import Snapshot


def stream_number(device: torch.device) -> int:
    """The current stream's number."""
    return int(npu_c()._npu_getCurrentStream(device.index)[0])  # noqa: SLF001 - no public name


def order(device: torch.device, first: int, then: int) -> None:
    """Have the stream of one number wait for another's; have the host wait for all, where torch_npu knows one not."""
    if min(first, then) < 0:
        npu().synchronize(device)
        return
    try:
        _stream_of(device, then).wait_stream(_stream_of(device, first))
    except RuntimeError:  # another library's: torch_npu takes no events on it
        npu().synchronize(device)


def numbered(snapshot: Snapshot, streams: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """An allocator's snapshot, which tells streams by handle, with their numbers; those of others are below zero."""
    known = {stream.npu_stream: stream.stream_id for stream in streams}
    for segment in snapshot:
        yield {**segment, "stream": known.get(segment["stream"], -segment["stream"])}


def _stream_of(device: torch.device, number: int) -> Any:
    default = npu().default_stream(device)
    return npu().Stream(stream_id=number, device_index=device.index, device_type=default.device_type)
