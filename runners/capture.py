"""Capturing buckets: largest first, garbage collector frozen, progress shown, memory accounted for."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import rich.console
import rich.progress
import torch

from ..backends.base import NO_PARAMETERS, Backend, Graph, Memory
from ..dataflow import log
from ..dataflow.errors import CaptureError, CheckError, ComputeError

_FROZEN_BY_PYTHON: Final = 1000
"""Python 3.12 starts with some hundred frozen objects, others with none; a program freezes many more."""


@attrs.frozen
class MemoryAccount:
    """Bytes that a runner holds: buffers, graphs beside them, other outputs, and what feeds the fused kernel.

    uploads: tables and packet on the device, and the host memory that uploads start from. shared: of its slots in a
    pool's memory, which is no runner's own.
    """

    inputs: int
    graphs: int
    outputs: int
    uploads: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        """All that is its own."""
        return self.inputs + self.graphs + self.outputs + self.uploads


@attrs.frozen
class CaptureReport:
    """What a capture came to: buckets captured, those that failed with the reason, seconds, and bytes.

    driver: bytes that the device has less of since, beside what torch's allocator took: the driver's own for graphs,
    and whatever else went on there.
    """

    captured: tuple[int, ...]
    failed: dict[int, str]
    seconds: float
    memory: MemoryAccount
    driver: int = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Each reason for a failure once, with the buckets that failed for it."""
        buckets: dict[str, list[str]] = {}
        for rows, reason in sorted(self.failed.items()):
            buckets.setdefault(reason, []).append(str(rows))
        return tuple(f"bucket {', '.join(rows)}: {reason}" for reason, rows in buckets.items())


def driver_bytes(before: Memory, after: Memory) -> int:
    """Bytes by which a device's free memory fell, beside what torch's allocator took of it."""
    return max(0, (before.free - after.free) - (after.allocated - before.allocated))


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keep the garbage collector from walking over all objects at each capture: 2.3 to 3.7 times faster, it is said.

    Young garbage goes first; a walk over all would cost more than several captures, and what is frozen is kept alive
    for no longer than this. A program that froze objects of its own has few others, and Python melts all or none:
    there nothing is done.
    """
    if gc.get_freeze_count() >= _FROZEN_BY_PYTHON:
        yield
        return
    gc.collect(1)
    try:
        gc.freeze()
        yield
    finally:
        gc.unfreeze()


def warm_up(backend: Backend, step: Callable[[], Any]) -> None:
    """Run a step on the backend's stream, and wait for it. CaptureError, chained to whatever was raised."""
    with told_as_capture_error(), backend.stream():
        step()
        backend.synchronize()


def capture_step(
    backend: Backend,
    step: Callable[[], Any],
    *,
    pool: object | None,
    error_mode: str | None = None,
    parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Graph:
    """Capture one step on the backend's stream. CaptureError, chained to whatever was raised.

    parameters: host slots, by the operator's argument that takes their value at each replay.
    """
    with told_as_capture_error(), backend.stream(), _own_casts():
        backend.synchronize()
        return backend.capture(step, pool=pool, error_mode=error_mode, parameters=parameters)


@contextlib.contextmanager
def _own_casts() -> Iterator[None]:
    """Have a graph cast weights itself, and share no cast with anything else.

    Under torch.autocast the casts of weights are kept until its outermost block ends. A graph that read one of these
    would read freed memory afterwards, or memory that another graph alone writes.
    """
    is_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(is_enabled)


@contextlib.contextmanager
def told_as_capture_error() -> Iterator[None]:
    """Whatever a step raises before and while it is captured, its bucket is not captured."""
    try:
        yield
    except CaptureError:
        raise
    except (CheckError, ComputeError) as error:  # its state is too large to be kept, or a slot's function raised
        raise CaptureError(str(error)) from error
    except Exception as error:
        raise CaptureError(f"the step raised {type(error).__name__}: {error}") from error


def progress_over(buckets: Sequence[int], backend: Backend, *, show: bool) -> Iterator[int]:
    """Walk over buckets under a progress bar that shows the bucket and the memory left; no bar off a terminal."""
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("capturing bucket {task.fields[bucket]}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[free]} free"),
    )
    hidden = not (show and console.is_terminal)
    with rich.progress.Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("capture", total=len(buckets), bucket="", free="")
        for bucket in buckets:
            progress.update(task, bucket=bucket, free=human_bytes(backend.memory().free))
            yield bucket
            progress.advance(task)


def warn_of_many(wanted: int, hint: int | None, runner: str) -> None:
    """One event where more graphs are wanted than the device is said to bear, before minutes are spent on them."""
    if hint is not None and wanted > hint:
        log.warning("many_graphs", runner=runner, wanted=wanted, borne=hint)


def human_bytes(count: float) -> str:
    """A byte count with a binary unit: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:  # noqa: PLR2004 - the step from one binary unit to the next
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def log_capture(report: CaptureReport, runner: str) -> None:
    """One event for the whole capture, and one for each reason for which buckets failed."""
    for reason in report.reasons:
        log.warning("capture_failed", runner=runner, reason=reason)
    memory = attrs.asdict(report.memory)
    done, seconds = list(report.captured), round(report.seconds, 3)
    log.info("captured", runner=runner, buckets=done, seconds=seconds, **memory, driver=report.driver)
