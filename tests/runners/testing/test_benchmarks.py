"""Benchmarks: what is timed does the same by each way, ways take turns, and ratios are taken round by round."""

import contextlib
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from slotgraph import BATCH, TOKENS, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, RegressionError, WrongBytesError
from slotgraph.dataflow.fill.tails import CleanTails
from slotgraph.runners.testing import benchmarks
from slotgraph.runners.testing.benchmarks import KEY, Timer
from slotgraph.runners.testing.timing import QUEUED, Figures, Run, device_time, measure
from tests.runners.explained.houses import HIDDEN, PAGES, FullInputs
from tests.runners.models import PlainInputs


@attrs.define
class Stub:
    """What pytest-benchmark's fixture has. Its copies share what they saw."""

    disabled: bool = False
    name: str = "test_it"
    fullname: str = "tests.py::test_it"
    extra_info: dict[str, Any] = attrs.field(factory=dict)
    group: str | None = None
    stats: Any = None
    rows: list[tuple[str, str, Any]] = attrs.field(factory=list)

    def pedantic(self, target: Any, args: tuple[Any, ...]) -> None:
        """Call it once, and keep the row and its times."""
        target(*args)
        if not self.disabled:
            self.stats = SimpleNamespace(stats=SimpleNamespace(data=[1.0]))
        self.rows.append((self.name, self.fullname, self.stats))


def test_ratios_are_taken_round_by_round() -> None:
    """Two rounds, the second on a machine twice as slow: the ratio is what it is in each."""
    samples = {"per_slot": [10.0, 10, 10, 20, 20, 20], "foreach": [5.0, 5, 99, 10, 10, 99]}
    figures = Figures.of(samples, 2, "per_slot")
    assert figures.ratios == {"foreach": 0.5}
    assert figures.microseconds["per_slot"].median == 15


def test_fills(slotgraph_backend: Backend) -> None:
    """Each way fills slots of all kinds as the oracle does; by hand too an axis follows, and settings switch slots."""
    timer = Timer(stub := Stub())
    figures = timer.fill(slotgraph_backend, FullInputs, {BATCH: 8, TOKENS: 9, PAGES: 5}, {PAGES: 4}, rounds=2, steps=3)
    assert {"regrouped", "foreach"} <= set(figures.ratios)
    assert figures.microseconds.keys() == {"per_slot", *figures.ratios}
    assert stub.group == f"{slotgraph_backend.name}: fill of FullInputs (test_it)"
    told: dict[str, Any] = {"absent": {"hidden_states"}, "lowerings": ("foreach",), "rounds": 1, "steps": 1}
    assert set(timer.fill(slotgraph_backend, FullInputs, {HIDDEN: 5}, **told).ratios) == {"regrouped", "foreach"}
    follow, settings = {TOKENS: BATCH * 4}, standard.Sharding()
    given: dict[str, Any] = {"settings": settings, "relations": follow, "rounds": 1, "steps": 1}
    assert "foreach" in timer.fill(slotgraph_backend, standard.DecodeInputs, {BATCH: 6}, **given).ratios


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that leaves tails is named, with slot and row."""
    monkeypatch.setattr(CleanTails, "begin", lambda *_: None)
    monkeypatch.setattr(benchmarks, "measure", pytest.fail)
    with pytest.raises(WrongBytesError, match=r"PlainInputs filled by 'direct': slot 'ids', row 3 \(its tail\)"):
        Timer(Stub()).fill(choose("cpu"), PlainInputs, {BATCH: 8, TOKENS: 8}, {BATCH: 3, TOKENS: 3})


def test_ways_of_ones_own() -> None:
    """All are called with the batches in turn; the first is what the others are held to; each has a row of its own."""
    seen: list[tuple[str, int]] = []
    ways = {name: lambda number, name=name: seen.append((name, number)) for name in ("theirs", "mine", "other")}
    figures = Timer(stub := Stub()).ways(choose("cpu"), ways, [1, 2, 3], "fill", rounds=2, steps=3)
    assert figures.ratios.keys() == {"mine", "other"}
    assert set(seen) == {(name, number) for name in ways for number in (1, 2, 3)}
    shown = ["theirs", *(f"{name}, {figures.ratios[name]:.2f} of the first" for name in ("mine", "other"))]
    assert [name for name, _, _ in stub.rows] == shown
    assert [full for _, full, _ in stub.rows] == [f"tests.py::test_it {name}" for name in ways]
    for name, (_, _, row) in zip(ways, stub.rows, strict=True):
        assert len(row.stats.data) == 6
        assert statistics.median(row.stats.data) * 1e6 == pytest.approx(figures.microseconds[name].median)


def test_refusals() -> None:
    """Sizes that do not fit, one way, no batches."""
    timer, cpu = Timer(Stub()), choose("cpu")
    for live in ({BATCH: 9}, {PAGES: 1}):
        with pytest.raises(ConfigError, match=r"live: sizes of the axes \[BATCH, TOKENS\], at most the padded ones"):
            timer.fill(cpu, PlainInputs, {BATCH: 8}, live)
    for ways, batches in (({"mine": print}, [1]), ({"mine": print, "other": print}, [])):
        with pytest.raises(ConfigError, match="ways: expected at least two"):
            timer.ways(cpu, ways, batches, "fill")


def test_ratios_that_are_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count if each of three measurements is over what is allowed; figures are saved all the same."""
    ratios: list[float] = []

    def measured(runs: Any, *_: object) -> None:
        base, ours = runs
        base.host, ours.host = [1.0], [ratios.pop(0)]

    def timed(timer: Timer, *told: float, **options: Any) -> float:
        ratios[:] = told
        ways = {"per_slot": lambda _: None, "foreach": lambda _: None}
        return timer.ways(choose("cpu"), ways, [None], "fill", rounds=1, steps=6, **options).ratios["foreach"]

    monkeypatch.setattr(benchmarks, "measure", measured)
    timer = Timer(stub := Stub())
    why = r"cpu: fill: foreach takes 1.200 of the time of per_slot, where 1.1 is allowed \(measured 3 times\)"
    with pytest.raises(RegressionError, match=why):
        timed(timer, 1.4, 1.3, 1.2, most=1.1)
    assert stub.extra_info[KEY]["ratios"] == {"foreach": 1.2}
    assert [row.stats.data for _, _, row in stub.rows] == [[1e-6], [1.2e-6]]
    assert timed(timer, 1.4, 1.05, most=1.1) == 1.05
    assert timed(timer, 9.0) == 9.0
    assert timed(Timer(Stub(disabled=True)), 1.2, most=1.1) == 1.2


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
    """Rounds go over all runs before any run's next one, and only rounds count; batches go on between rounds.

    A round runs in its context; before each timed step it is told how many are left.
    """
    order: list[Any] = []
    runs = [Run(lambda batch, label=label: order.append(f"{label}{batch}"), range(2)) for label in "ab"]  # type: ignore[misc]
    measure(runs, choose("cpu"), 3, 2, device_rounds=2)
    assert order == ["a0", "a1", "a0", "b0", "b1", "b0", "a1", "a0", "a1", "b1", "b0", "b1"] * 2
    assert [len(run.host) for run in runs] == [6, 6]
    assert [run.as_data()["gpu_us"] for run in runs] == [None, None]

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        order.append("in")
        yield
        order.append("out")

    order.clear()
    run = Run(order.append, ["step"], around, order.append)
    run.once(2, lambda: None)
    run.queue(2)
    assert order == ["in", "step", 1, "step", 0, "step", "out", "in", 1, "step", 0, "step", "out"]


def test_the_host_never_runs_far_ahead() -> None:
    """Within a round the device is waited for, outside of what is timed, before an upload's ring would wait for it."""
    clock = Clock()
    Run(clock.step, range(3)).once(64, clock.synchronize)
    assert max(clock.queues) == QUEUED + 1 <= 24


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
    never = Clock(late=99)  # nothing is made up for a way in which the host cannot get ahead
    assert device_time(Run(never.step, [0], host=[10.0]), never.works.append, never) is None  # type: ignore[arg-type]
