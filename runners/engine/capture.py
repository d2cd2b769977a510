"""Capturing: one bucket's graph, with progress, garbage collection frozen, and the clock of its outputs."""

import contextlib
import gc
import operator
import os
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import rich.console
import rich.progress
import torch

from ...backends.base import NO_PARAMETERS, Backend, Graph
from ...dataflow.errors import CaptureError, CheckError, ComputeError, origin_of, place_of
from ...dataflow.guard import run_and_undo

T = TypeVar("T")


FORKS: Final = types.SimpleNamespace(count=0)
"""How often this process came out of a fork."""
os.register_at_fork(after_in_child=lambda: setattr(FORKS, "count", FORKS.count + 1))


@attrs.define(eq=False)
class Clock:
    """Replays so far in a pool of graph memory, each of which may overwrite outputs; the stream of the last one."""

    replays: int = 0
    stream: int | None = None


_CLOCKS: Final["weakref.WeakKeyDictionary[object, Clock]"] = weakref.WeakKeyDictionary()


def clock_of(pool: object | None) -> Clock:
    """The clock of all runners whose graphs share a pool; one of its own where there is none."""
    return Clock() if pool is None else _CLOCKS.setdefault(pool, Clock())


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keep the garbage collector from walking over all objects at each capture; not where a program froze its own."""
    if gc.get_freeze_count() >= 1000:  # noqa: PLR2004 - Python 3.12 itself starts with some hundred
        yield
        return
    gc.collect(1)
    try:
        try:
            gc.freeze()
            yield
        finally:
            gc.unfreeze()
    finally:
        gc.unfreeze()  # once more: an interrupt may come right before the first


def warm_up(backend: Backend, step: Callable[[], Any]) -> None:
    """Run a step as it is captured, and wait for it. CaptureError, chained to whatever was raised."""
    with told_as_capture_error(), backend.stream():
        with_own_casts(step)  # in another state torch.compile would compile anew
        backend.synchronize()


def capture_step(
    backend: Backend,
    step: Callable[[], Any],
    *,
    pool: object | None,
    error_mode: str | None = None,
    parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Graph:
    """Capture one step on the backend's stream. parameters: host slots, by the operator's argument that takes them."""
    with told_as_capture_error(), backend.stream():
        backend.synchronize()
        return with_own_casts(lambda: backend.capture(step, pool=pool, error_mode=error_mode, parameters=parameters))


def with_own_casts(run: Callable[[], T]) -> T:
    """Have a graph cast weights itself: the casts that torch.autocast keeps are freed when its outermost block ends."""
    # The map calls both from C, where no interrupt comes between them.
    *_, blocks = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    if not blocks:  # no block is open, and torch.compile would compile for another state
        return run()
    is_enabled = torch.is_autocast_cache_enabled()

    def run_without_cache() -> T:
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        return run()

    def undo() -> None:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(is_enabled)

    return run_and_undo(run_without_cache, undo)


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


def with_place(error: CaptureError) -> CaptureError:
    """Add the user's line that an error came through to its message, unless it is there."""
    place = place_of(origin_of(error))
    if place not in str(error):
        error.args = (f"{error} ({place.strip()})",)
    return error


def progress_over(items: Sequence[T], text: Callable[[T], str], *, show: bool) -> Generator[T]:
    """Walk over items under a progress bar that says what is done to each; no bar off a terminal."""
    console = rich.console.Console(stderr=True)
    shown = show and console.is_interactive and console.file.isatty()  # to rich, FORCE_COLOR makes a pipe a terminal
    # a step's prints go on to standard output, which may be a pipe
    with rich.progress.Progress(console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        task = progress.add_task("", total=len(items))
        for one in items:
            progress.update(task, description=text(one))
            yield one
            progress.advance(task)
