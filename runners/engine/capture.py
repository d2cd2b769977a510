"""Capturing of one bucket's graph, with a progress bar and without garbage collection, and the clock of its outputs."""

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
"""Counts how often this process came out of a fork."""
os.register_at_fork(after_in_child=lambda: setattr(FORKS, "count", FORKS.count + 1))


@attrs.define(eq=False)
class Clock:
    """Counts the replays in a pool of graph memory, each of which may overwrite outputs.

    Attributes:
        replays: How many there were.
        stream: The stream of the last one.
    """

    replays: int = 0
    stream: int | None = None


_CLOCKS: Final["weakref.WeakKeyDictionary[object, Clock]"] = weakref.WeakKeyDictionary()


def clock_of(pool: object | None) -> Clock:
    """Return the clock that all runners share whose graphs share a pool, or a new one if there is no pool."""
    return Clock() if pool is None else _CLOCKS.setdefault(pool, Clock())


@contextlib.contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keep the garbage collector from walking all objects at each capture, unless the program froze objects itself."""
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
        gc.unfreeze()  # again, because an interrupt may come right before the first


def warm_up(backend: Backend, step: Callable[[], Any]) -> None:
    """Run a step in the way it is captured, and wait for it. Raise CaptureError from whatever it raises."""
    with capture_errors(), backend.stream():
        with_own_casts(step)  # with another cache setting torch.compile would recompile
        backend.synchronize()


def capture_step(
    backend: Backend,
    step: Callable[[], Any],
    pool: object | None,
    error_mode: str | None = None,
    parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
) -> Graph:
    """Capture one step on the backend's stream. parameters: Host slots, by the operator's argument that takes them."""
    with capture_errors(), backend.stream():
        backend.synchronize()
        return with_own_casts(lambda: backend.capture(step, pool=pool, error_mode=error_mode, parameters=parameters))


def with_own_casts(run: Callable[[], T]) -> T:
    """Run without torch.autocast's cache, so that a graph casts weights itself.

    The cached casts are freed when the outermost autocast block ends.
    """
    # `map` calls both from C, so that no interrupt comes between them.
    *_, blocks = map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    if not blocks:  # no block is open: with another cache setting torch.compile would recompile
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
def capture_errors() -> Iterator[None]:
    """Raise CaptureError from whatever a step raises before and during its capture."""
    try:
        yield
    except CaptureError:
        raise
    except (CheckError, ComputeError) as error:  # the state is too large to copy, or a slot's function raised
        raise CaptureError(str(error)) from error
    except Exception as error:
        raise CaptureError(f"the step raised {type(error).__name__}: {error}") from error


def with_place(error: CaptureError) -> CaptureError:
    """Add the user's line that an error came through to its message, unless the message has it."""
    place = place_of(origin_of(error))
    if place not in str(error):
        error.args = (f"{error} ({place.strip()})",)
    return error


def progress_over(items: Sequence[T], text: Callable[[T], str], *, show: bool) -> Generator[T]:
    """Iterate over items under a progress bar that describes each. Off a terminal there is no bar."""
    console = rich.console.Console(stderr=True)
    shown = show and console.is_interactive and console.file.isatty()  # rich takes a pipe for one with FORCE_COLOR
    # a step still prints to standard output, which may be a pipe
    with rich.progress.Progress(console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        task = progress.add_task("", total=len(items))
        for one in items:
            progress.update(task, description=text(one))
            yield one
            progress.advance(task)
