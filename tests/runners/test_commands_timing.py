"""How `slotgraph bench` measures: by turns, each step by itself on the host, and on a device only what stood ready."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph.backends import Backend, choose
from slotgraph.runners.commands import timing
from slotgraph.runners.commands.timing import QUEUED, Busy, Run, Spread, device_time, device_times, measure
from slotgraph.runners.commands.workload import Batch

BATCHES = [Batch(rows=1, number=number) for number in range(3)]


def nothing() -> None:
    """No progress is shown."""


@attrs.define
class Clock:
    """A device that gets through work of its own while the host hands it more. late: how often it is ahead at first."""

    late: int = 0
    queues: list[int] = attrs.field(factory=list)
    queued: int = 0
    works: list[float] = attrs.field(factory=list)

    def event(self) -> "Moment":
        """A point after all that was queued so far."""
        return Moment(self, self.queued)

    def synchronize(self) -> None:
        """All is done."""
        if self.queued:
            self.queues.append(self.queued)
        self.queued = 0

    def work(self, microseconds: float) -> None:
        """Note what was asked for."""
        self.works.append(microseconds)


@attrs.frozen
class Moment:
    """An event: each step behind it takes two microseconds."""

    clock: Clock
    at: int

    def query(self) -> bool:
        """Whether the device got here before the host was done."""
        return len(self.clock.works) <= self.clock.late

    def microseconds_since(self, earlier: "Moment") -> float:
        """Between two of them."""
        return 2.0 * (self.at - earlier.at)


def run_on(clock: Clock) -> Run:
    """A run whose steps are queued; one took ten microseconds on the host."""

    def way(batch: Batch) -> None:
        del batch
        clock.queued += 1

    return Run(way, BATCHES, host=[10.0])


def test_runs_take_turns() -> None:
    """Rounds go over all runs before any run's next one, and nothing but rounds counts."""
    order: list[str] = []
    runs = [Run(lambda _, label=label: order.append(label), BATCHES[:1]) for label in "ab"]  # type: ignore[misc]
    ticks: list[int] = []
    spreads = measure(runs, 3, 2, choose("cpu"), lambda: ticks.append(1))
    assert "".join(order) == "aaabbb" * 4
    assert len(ticks) == 3
    assert [len(run.host) for run in runs] == [6, 6]
    assert all(spread.p10 <= spread.median <= spread.p90 for spread in spreads)


def test_batches_take_turns_from_round_to_round() -> None:
    """A round goes on where the last one ended; where sizes differ it is as long as there are batches."""
    seen: list[int] = []
    run = Run(lambda batch: seen.append(batch.number), BATCHES)
    run.once(3, nothing)
    run.once(1, nothing)
    assert seen == [0, 1, 2, 0, 1, 2]
    walk = Run(lambda _: None, [Batch(rows=rows) for rows in (1, 2, 3)])
    measure([walk], 2, 20, choose("cpu"), nothing)
    assert len(walk.host) == 6


def test_the_host_never_runs_far_ahead() -> None:
    """Within a round the device is waited for, outside of what is timed, before an upload's ring would wait for it."""
    ahead: list[int] = [0]

    def way(batch: Batch) -> None:
        del batch
        ahead[-1] += 1

    Run(way, BATCHES).once(64, lambda: ahead.append(0))
    assert max(ahead) == QUEUED + 1
    assert QUEUED + 1 <= 24


def test_spread_of_samples() -> None:
    """Median and percentiles; a single sample is all of them."""
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([float(n) for n in range(1, 12)]) == Spread(6.0, 2.0, 10.0)


@pytest.mark.parametrize(("late", "steps"), [(0, 20), (1, 10), (2, 5), (3, 4), (4, 4)])
def test_steps_must_stand_ready(late: int, steps: int) -> None:
    """Where the device was first, it is tried again with more work before and with fewer steps, and so ever after."""
    clock = Clock(late)
    run: Any = run_on(clock)
    for _ in range(2):
        assert device_time(run, clock, clock) == 2.0  # type: ignore[arg-type]
    assert clock.queues[-1] == steps
    assert len(clock.works) == late + 2
    shares = [work / queued for work, queued in zip(clock.works, clock.queues[1::2], strict=True)]
    assert shares == sorted(shares)
    assert all(share > 2 * 10.0 for share in shares)


def test_what_waits_for_the_device_has_no_device_time() -> None:
    """Nothing is made up for a way in which the host cannot get ahead."""
    clock = Clock(late=99)
    assert device_time(run_on(clock), clock, clock) is None  # type: ignore[arg-type]


def test_device_time_is_measured_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null on a CPU, and where it could not be had; elsewhere the spread over rounds, the runs taking turns."""
    backend, ticks = choose("cpu"), list[int]()
    runs = [Run(lambda _: None, BATCHES) for _ in range(2)]
    assert device_times(runs, 2, backend, lambda: ticks.append(1)) == [None, None]
    monkeypatch.setattr(type(backend), "device", torch.device("meta"))
    monkeypatch.setattr(timing, "_BUSY_SIZE", 8)
    asked: list[int] = []

    def device_time_of(run: Run, busy: Busy, on: Backend) -> float | None:
        assert busy.product_us >= 1.0
        assert on is backend
        asked.append(runs.index(run))
        return None if run is runs[0] else float(len(asked))

    monkeypatch.setattr(timing, "device_time", device_time_of)
    assert device_times(runs, 3, backend, lambda: ticks.append(1)) == [None, Spread.of([2.0, 3.0, 4.0])]
    assert asked == [0, 1, 1, 1]
    assert len(ticks) == 3


def test_busy_work_is_as_long_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole products, rounded up."""
    products: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda *_, **__: products.append(1))
    matrix = torch.ones(2, 2)
    for microseconds in (1.0, 100.0, 101.0):
        Busy(matrix, matrix, 100.0).work(microseconds)
    assert len(products) == 4
