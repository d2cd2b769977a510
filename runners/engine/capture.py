"""Captures one bucket's graph, with a progress bar and without garbage collection, and counts replays of its pool."""

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
        replays: The number of replays so far.
        stream: The stream of the last replay.
    """

    replays: int = 0
    stream: int | None = None


_CLOCKS: Final["weakref.WeakKeyDictionary[object, Clock]"] = weakref.WeakKeyDictionary()


def clock_of(pool: object | None) -> Clock:
    """Return the clock of a graph pool, which all its runners share, or a new clock without a pool."""
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
        gc.unfreeze()  # a second call, because an interrupt may have come right before the first


def warm_up(backend: Backend, step: Callable[[], Any]) -> None:
    """Run a step as a capture does, and wait for it. Raise CaptureError from any error of the step."""
    with capture_errors(), backend.stream():
        with_own_casts(step)  # torch.compile would recompile for another cache setting
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
    if not blocks:  # keep the setting, since no block is open and torch.compile would recompile for another
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
    """Raise CaptureError from any error of a step before and during its capture."""
    try:
        yield
    except CaptureError:
        raise
    except (CheckError, ComputeError) as error:  # errors of this library, whose text is complete
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
    shown = show and console.is_interactive and console.file.isatty()  # rich trusts FORCE_COLOR
    # do not redirect what the step itself prints to standard output
    with rich.progress.Progress(console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        task = progress.add_task("", total=len(items))
        for one in items:
            progress.update(task, description=text(one))
            yield one
            progress.advance(task)
