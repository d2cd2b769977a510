"""Devices that stand still because another rank is lost: waiting for them ends, with that rank's name.

A CPU never stands still, so these tests have events that stand for one that does; test_cuda_lost.py has real ones.
"""

import functools
import pathlib
import threading
from typing import Any

import torch

from slotgraph import DecodeRunner, backends
from slotgraph.backends.base import Event
from slotgraph.dataflow.errors import RankError
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.watchdog import Watchdog
from tests.ranks import stepping
from tests.ranks.processes import Processes, ranks

CPU = torch.device("cpu")


class Standing(Event):
    """A place that the device passes after so many questions, or never."""

    def __init__(self, after: float = float("inf")) -> None:
        self.asked = 0
        self._after = after

    def query(self) -> bool:
        """Whether it was asked for often enough."""
        self.asked += 1
        return self.asked > self._after

    def synchronize(self) -> None:
        """What nobody may call."""
        raise AssertionError

    def microseconds_since(self, earlier: Event) -> float:
        """What nobody asks."""
        del earlier
        raise AssertionError


def waits(rank: int, lost: int) -> tuple[int, str, str]:
    """Each rank waits for its device, and then for one that stands still, but for one that is lost before that."""
    made = Ranks(timeout=2.0)
    event, first, second = Standing(1000), "", ""
    made.wait(event, CPU)
    if rank == lost:
        return event.asked, first, second
    try:
        made.wait(Standing(), CPU)
    except RankError as error:
        first = str(error)
    try:
        DecodeRunner(stepping.Counted, stepping.step, buckets=[2], ranks=made, backend="cpu").capture()
    except RankError as error:
        second = str(error)
    return event.asked, first, second


def test_a_device_that_passes(two: Processes) -> None:
    """Waiting ends when the device is there, however often it was asked before."""
    assert two.run(steady) == [[1, 6, 500], [1, 6, 500]]


def steady(rank: int) -> list[int]:
    """How often each of some events was asked for."""
    del rank
    made, found = Ranks(timeout=5.0), []
    for after in (0, 5, 499):
        event = Standing(after)
        made.wait(event, CPU)
        found.append(event.asked)
    return found


def test_a_rank_is_lost_in_a_step(tmp_path: pathlib.Path) -> None:
    """Whoever waits is told which rank did not come, and nothing is exchanged any more."""
    with ranks(2, tmp_path) as made:
        (asked, first, second), _ = made.run(waits, 1)
    assert asked == 1001
    assert first.startswith("the end of a step on the device: rank 1 did not come within 2 s: it is dead, stuck, or")
    assert "these ranks are lost to each other: the end of a step on the device: rank 1" in second


def test_all_devices_stand_still(tmp_path: pathlib.Path) -> None:
    """Where all ranks are there, none is said to be lost."""
    with ranks(2, tmp_path) as made:
        found = made.run(waits, -1)
    for _, first, _ in found:
        assert "all ranks came, but not all within 2 s" in first


def keeps_watchdog(rank: int) -> tuple[str, bool, int]:
    """Rank 0's device stands still in a warm-up; rank 1 never begins its own. Then rank 0 meets nobody."""
    made, backend = Ranks(capture_timeout=2.0), backends.choose("cpu")
    threads = threading.active_count()
    if rank == 1:
        return "", False, 0
    watchdog, told = Watchdog(made, backend, 2.0, "a warm-up"), ""
    try:
        with watchdog.kept():
            watchdog.over(lambda: None)()
            assert watchdog._asked is not None
            watchdog._asked = Standing()
            for thread in threading.enumerate():
                if thread.name == "slotgraph watchdog":
                    thread.join(30)
    except RankError as error:
        told = str(error)
    try:
        DecodeRunner(stepping.Counted, stepping.step, buckets=[2], ranks=made, backend="cpu").capture()
    except RankError as error:
        told += f"; {error}"
    return told, True, threading.active_count() - threads


def test_a_watchdog_over_a_capture(tmp_path: pathlib.Path) -> None:
    """A warm-up whose device stands still ends the capture, which tells of the rank that did not come."""
    with ranks(2, tmp_path) as made:
        (told, kept, threads), _ = made.run(keeps_watchdog)
    assert kept
    assert told.startswith("a warm-up: rank 1 did not come within 2 s: it is dead, stuck")
    assert "these ranks are lost to each other: a warm-up: rank 1 did not come within 2 s" in told
    assert threads <= 1, "the watchdog is over"


class StandsStill:
    """A backend whose device stands still, and is waited for in vain until its ranks are known to be lost."""

    device = CPU

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def event(self) -> Event:
        """A place that is never passed."""
        return Standing()

    def synchronize(self) -> None:
        """The wait in the driver, which an abort ends."""
        pause = threading.Event()
        for _ in range(600):
            if self._ranks.broken is not None:
                return
            pause.wait(0.1)
        raise AssertionError


def runs_again(rank: int) -> tuple[str, int]:
    """Rank 0 would run a step twice; its device stands still in the first."""
    made, runs, told = Ranks(capture_timeout=2.0), list[int](), ""
    if rank == 1:
        return "", 0
    backend: Any = StandsStill(made)
    try:
        with Watchdog(made, backend, 2.0, "a warm-up").kept() as over:
            for number in range(2):
                over(functools.partial(runs.append, number))()
    except RankError as error:
        told = str(error)
    return told, len(runs)


def test_no_step_after_a_lost_rank(tmp_path: pathlib.Path) -> None:
    """A step that would wait for the lost rank again, in a group whose collectives were ended, is not run."""
    with ranks(2, tmp_path) as made:
        (told, runs), _ = made.run(runs_again)
    assert told.startswith("a warm-up: rank 1 did not come within 2 s")
    assert runs == 1


def test_a_watchdog_over_a_good_capture(two: Processes) -> None:
    """A device that goes on is left alone, and so is one that nothing was asked of."""
    assert two.run(goes_on) == [["", ""], ["", ""]]


def goes_on(rank: int) -> list[str]:
    """What a capture says after each of two watchdogs that are longer than they have patience."""
    del rank
    found = []
    for asks in (False, True):
        made = Ranks(capture_timeout=20.0)
        watchdog = Watchdog(made, backends.choose("cpu"), 0.05, "a warm-up")
        with watchdog.kept():
            event = threading.Event()
            for _ in range(8):
                if asks:
                    watchdog._asked = Standing(1)
                event.wait(0.05)
        runner: Any = DecodeRunner(stepping.Counted, stepping.step, buckets=[2], ranks=made, backend="cpu")
        found.append("" if runner.capture().captured == (2,) else "not captured")
    return found


def test_waiting_alone() -> None:
    """Without other ranks it is the device's own wait."""
    runner = DecodeRunner(stepping.Counted, lambda view: view.ids, buckets=[2], backend="cpu")
    runner.capture()
    batch = stepping.batch_of(2, 3)
    outputs = runner(batch)
    runner.wait()
    assert outputs.tolist() == batch["ids"].tolist()
