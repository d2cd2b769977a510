"""How ways are timed: in turn, each step by itself on the host, and on a device only what stood ready."""

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from slotgraph.backends import choose
from slotgraph.runners.testing.timing import QUEUED, Run, device_time, measure


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

    def step(self, batch: object) -> None:
        """Queue one."""
        del batch
        self.queued += 1


@attrs.frozen
class Moment:
    """An event: each step behind it takes two microseconds."""

    clock: Clock
    at: int

    def query(self) -> bool:
        """Whether the device got here before the host was done."""
        return len(self.clock.works) <= self.clock.late

    def elapsed_time(self, end_event: "Moment") -> float:
        """Milliseconds between two of them."""
        return 0.002 * (end_event.at - self.at)


def test_runs_take_turns() -> None:
    """Rounds go over all runs before any run's next one, and only rounds count; batches go on between rounds."""
    order: list[str] = []
    runs = [Run(lambda batch, label=label: order.append(f"{label}{batch}"), range(2)) for label in "ab"]  # type: ignore[misc]
    measure(runs, choose("cpu"), 3, 2, device_rounds=2)
    assert order == ["a0", "a1", "a0", "b0", "b1", "b0", "a1", "a0", "a1", "b1", "b0", "b1"] * 2
    assert [len(run.host) for run in runs] == [6, 6]
    assert [run.as_data()["gpu_us"] for run in runs] == [None, None]


def test_what_is_around_and_before() -> None:
    """A round runs in its context; before each timed step it is told how many are left."""
    seen: list[Any] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    run = Run(seen.append, ["step"], around, seen.append)
    run.once(2, lambda: None)
    assert seen == ["in", "step", 1, "step", 0, "step", "out"]
    seen.clear()
    run.queue(2)
    assert seen == ["in", 1, "step", 0, "step", "out"]


def test_the_host_never_runs_far_ahead() -> None:
    """Within a round the device is waited for, outside of what is timed, before an upload's ring would wait for it."""
    ahead: list[int] = [0]

    def way(batch: object) -> None:
        del batch
        ahead[-1] += 1

    Run(way, range(3)).once(64, lambda: ahead.append(0))
    assert max(ahead) == QUEUED + 1
    assert QUEUED + 1 <= 24


@pytest.mark.parametrize(("late", "steps"), [(0, 20), (1, 10), (2, 5), (3, 4), (4, 4)])
def test_steps_must_stand_ready(late: int, steps: int) -> None:
    """Where the device was first, it is tried again with more work before and with fewer steps, and so ever after."""
    clock = Clock(late)
    run = Run(clock.step, range(3), host=[10.0])
    for _ in range(2):
        assert device_time(run, clock.works.append, clock) == 2.0  # type: ignore[arg-type]
    assert clock.queues[-1] == steps
    assert len(clock.works) == late + 2
    shares = [work / queued for work, queued in zip(clock.works, clock.queues[1::2], strict=True)]
    assert shares == sorted(shares)
    assert all(share > 2 * 10.0 for share in shares)


def test_what_waits_for_the_device_has_no_device_time() -> None:
    """Nothing is made up for a way in which the host cannot get ahead."""
    clock = Clock(late=99)
    assert device_time(Run(clock.step, [0], host=[10.0]), clock.works.append, clock) is None  # type: ignore[arg-type]
