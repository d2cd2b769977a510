"""Habits against their base: held to the oracle, then timed by turns, by each lowering."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import WrongBytesError
from ...dataflow.sources import look_up
from ..decode import DecodeRunner
from .figures import HabitFigure
from .habits import LIVE, Habit
from .lowerings import ORACLE
from .timing import QUEUED, Run, device_times, measure
from .verifying import same_bytes
from .workload import SETS


@attrs.frozen(eq=False)
class Turn:
    """One batch of several; all of a run count as of one size, so that a round has as many steps as were asked for."""

    batch: Any
    rows: int = LIVE


@attrs.define(eq=False)
class HabitRun(Run):
    """A run in what its loop runs in, with what precedes each step.

    runner: the one that does the steps, whose books tell of detours.
    """

    runner: DecodeRunner[Any] = attrs.field(kw_only=True)
    around: Callable[[], AbstractContextManager[object]] = attrs.field(default=contextlib.nullcontext, kw_only=True)
    before: Callable[[int], object] | None = attrs.field(default=None, kw_only=True)

    @classmethod
    def of(cls, habit: Habit, backend: Backend, lowering: Lowering) -> "HabitRun":
        """A captured runner, and the habit's batches."""
        runner = habit.runner(backend, lowering)
        step = runner if habit.way is None else habit.way(runner)
        turns = [Turn(batch) for batch in habit.batches(backend)]

        def way(turn: Any) -> Any:
            return step(turn.batch)

        return cls(
            way,
            turns,
            runner=runner,
            around=contextlib.nullcontext if habit.around is None else functools.partial(habit.around, backend),
            before=None if habit.before is None else habit.before(backend),
        )

    def once(self, steps: int, wait: Callable[[], None]) -> None:
        """One round."""
        way, turns, note, clock, before = self.way, self._turns, self.host.append, time.perf_counter_ns, self.before
        with self.around():
            for left in reversed(range(steps)):
                if left % QUEUED == QUEUED - 1 or left == steps - 1:
                    wait()
                    way(next(turns))
                batch = next(turns)
                if before is not None:
                    before(left)
                start = clock()
                way(batch)
                note((clock() - start) / 1e3)
            wait()

    def queue(self, steps: int) -> None:
        """So many steps, one behind another."""
        with self.around():
            for left in reversed(range(steps)):
                if self.before is not None:
                    self.before(left)
                self.way(next(self._turns))

    @property
    def detours(self) -> int:
        """Steps that the runner filled by another lowering than its own."""
        return sum(self.runner.stats()["detours"].values())


def lowerings_of(backend: Backend) -> list[Lowering]:
    """Those that habits are timed by: all but the oracle."""
    return [one for one in backend.capabilities.lowerings if one != ORACLE]


def run_habits(
    found: Sequence[Habit], backend: Backend, rounds: int, device_rounds: int, steps: int, tick: Callable[[], None]
) -> list[HabitFigure]:
    """Verify every habit by every lowering, then time all of them by turns; the first is the base.

    tick: called after each round, of the host and of the device. WrongBytesError where a step leaves other bytes than
    the oracle.
    """
    keys: list[tuple[Habit, Lowering]] = [(habit, lowering) for lowering in lowerings_of(backend) for habit in found]
    runs = [HabitRun.of(habit, backend, lowering) for habit, lowering in keys]
    for habit in found:
        verify_habit(habit, backend, [run for run, (one, _) in zip(runs, keys, strict=True) if one is habit])
    host = measure(runs, rounds, steps, backend, tick)
    times = zip(runs, keys, host, device_times(runs, device_rounds, backend, tick), strict=True)
    figures: list[HabitFigure] = []
    bases: dict[Lowering, HabitFigure] = {}
    for run, (habit, lowering), spread, gpu in times:
        figure = HabitFigure(habit.name, lowering, spread, gpu, bases.get(lowering), run.detours)
        bases.setdefault(lowering, figure)
        figures.append(figure)
    return figures


def verify_habit(habit: Habit, backend: Backend, runs: Sequence[HabitRun]) -> None:
    """Hold steps of each run to the oracle's, byte for byte; WrongBytesError."""
    oracle, padded = HabitRun.of(habit, backend, ORACLE), {BATCH: habit.bucket, TOKENS: habit.bucket}
    slots = habit.inputs.slotgraph.slots
    with torch.no_grad():
        for turn in oracle.batches[: 2 * SETS]:
            batch: Any = turn.batch  # type: ignore[attr-defined] # a Turn, as `of` made it
            present = [name for name in slots if slots[name].reads(name) is None or look_up(batch, name) is not None]
            for run in (oracle, *runs):
                with run.around():
                    run.way(turn)
            backend.synchronize()
            for run, name in itertools.product(runs, present):
                mine, right = (one.runner.graphs.buffers[name].view(padded) for one in (run, oracle))
                if not same_bytes(mine, right):
                    message = f"{habit.name}, by {run.runner.lowering}: other bytes in slot {name!r} than the oracle's"
                    raise WrongBytesError(message)
