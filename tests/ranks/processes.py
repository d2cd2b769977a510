"""Processes that stay: each is one rank of a gloo group, and runs functions of test modules on demand."""

import contextlib
import datetime as dt
import multiprocessing
import multiprocessing.connection
import pathlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

PATIENCE: Final = 240
"""Seconds after which a test fails: whatever is tested must come back long before."""
_CONTEXT: Final = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "slotgraph", "numpy"])  # imported once for all


@attrs.frozen(eq=False)
class Outcome:
    """What a function returned in one rank, or what it raised: the kind, and the traceback as text."""

    value: Any = None
    kind: str | None = None
    trace: str = ""


@attrs.frozen(eq=False)
class Processes:
    """The ranks of one group, from 0."""

    processes: list[Any]
    pipes: list[multiprocessing.connection.Connection]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` in every rank at once; their results. AssertionError where one raised."""
        outcomes = self.outcomes(function, *args)
        found = [Outcome(kind="Gone", trace="its process is gone") if one is None else one for one in outcomes]
        failed = [f"rank {rank}: {one.trace}" for rank, one in enumerate(found) if one.kind]
        assert not failed, "\n".join(failed)
        return [one.value for one in found]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Outcome | None]:
        """The same, with what was raised; None of a rank whose process is gone."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, args))
        return [_outcome(pipe) for pipe in self.pipes]

    def stop(self) -> None:
        """End them, however they are."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(PATIENCE)


def _outcome(pipe: multiprocessing.connection.Connection) -> Any:
    if not pipe.poll(PATIENCE):
        return Outcome(kind="Stuck", trace="it did not come back")
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return None


def raised(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """The kind and the message of what a call raises; nothing if it returns."""
    try:
        call(*args, **options)
    except Exception as error:  # noqa: BLE001 - the test is told
        return f"{type(error).__name__}: {error}"
    return ""


def all_gather(out: torch.Tensor, own: torch.Tensor) -> None:
    """Into one tensor, under the name that this torch has for it."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own)


@contextlib.contextmanager
def ranks(size: int, folder: pathlib.Path, *, timeout: float = PATIENCE, backend: str = "gloo") -> Iterator[Processes]:
    """So many ranks of one default group, as long as the block runs. folder: theirs alone."""
    ends = [_CONTEXT.Pipe() for _ in range(size)]
    started = [
        _CONTEXT.Process(
            target=_serve, args=(rank, size, str(folder / "store"), timeout, backend, ends[rank][1]), daemon=True
        )
        for rank in range(size)
    ]
    for process, (_, theirs) in zip(started, ends, strict=True):
        process.start()
        theirs.close()
    made = Processes(started, [ours for ours, _ in ends])
    try:
        yield made
    finally:
        made.stop()


def _serve(
    rank: int, size: int, store: str, timeout: float, backend: str, pipe: multiprocessing.connection.Connection
) -> None:
    """One rank's life: functions in turn, until the other end is gone."""
    torch.set_num_threads(1)
    if "cuda" in backend:
        torch.cuda.set_device(rank)
    limit = dt.timedelta(seconds=timeout)
    dist.init_process_group(backend, store=FileStore(store, size), rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(function(rank, *args))
        except BaseException as error:  # noqa: BLE001 - the test is told
            outcome = Outcome(None, type(error).__name__, traceback.format_exc())
        pipe.send(outcome)
