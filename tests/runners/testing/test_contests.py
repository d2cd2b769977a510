"""Contests: what is timed does the same by each way, and ratios are taken round by round."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, computed, copied, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, RegressionError, WrongBytesError
from slotgraph.dataflow.ready import Ready
from slotgraph.runners.testing.benchmarks import KEY, Baseline, FillBenchmark, RunnerBenchmark, Timer, WaysBenchmark
from slotgraph.runners.testing.contests import Contest, Figures, Load, contest_of_fills, contest_of_steps, draw_for
from slotgraph.runners.testing.ground import Ground
from tests.runners.testing.declared import HIDDEN, PAGES, Mixed

NAME = "tests/test_mine.py::test_fill[cpu]"


@attrs.define
class Stub:
    """What pytest-benchmark's fixture has."""

    disabled: bool = False
    extra_info: dict[str, Any] = attrs.field(factory=dict)
    group: str | None = None
    fullname: str = NAME
    calls: list[tuple[int, int, int]] = attrs.field(factory=list)

    def pedantic(self, target: Any, *, rounds: int, iterations: int, warmup_rounds: int) -> None:
        """Call it once, and note what was asked for."""
        target()
        self.calls.append((rounds, iterations, warmup_rounds))


class Rows(Inputs):
    """A few slots, and a number that the host computes."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=2.5)
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


def batch(rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random batch."""
    seeded = torch.Generator().manual_seed(seed)
    ids, lens = torch.randint(0, 9, (rows,), generator=seeded), torch.randint(1, 9, (rows,), generator=seeded).int()
    return {"ids": ids, "lens": lens, "pairs": torch.rand(rows, 2, generator=seeded)}


def captured() -> DecodeRunner[Rows]:
    """A runner with two buckets."""
    runner = DecodeRunner(Rows, lambda view: view.ids + 1, buckets=[4, 8], backend="cpu-capture", progress=False)
    runner.capture()
    return runner


def test_ratios_are_taken_round_by_round() -> None:
    """Two rounds, the second on a machine twice as slow: the ratio is what it is in each."""
    figures = Figures.of({"per_slot": [10, 10, 10, 20, 20, 20], "foreach": [5, 5, 99, 10, 10, 99]}, rounds=2)
    assert figures.ratios == {"foreach": 0.5}
    assert figures.as_data()["microseconds"]["per_slot"]["median"] == 15


def test_fills(slotgraph_backend: Backend) -> None:
    """Each way fills slots of all kinds as the oracle does, or nothing is timed."""
    benchmark = FillBenchmark(Timer(Stub(), []), slotgraph_backend)
    figures = benchmark(Mixed, {BATCH: 8, TOKENS: 9, PAGES: 5}, {PAGES: 4, BATCH: 8}, rounds=2, steps=3)
    assert {"regrouped", "foreach"} <= set(figures.ratios)
    assert figures.microseconds.keys() == {"per_slot", *figures.ratios}
    absent = benchmark(
        Mixed, {BATCH: 8, HIDDEN: 5}, absent={"hidden", "flags"}, lowerings=("foreach",), rounds=1, steps=1
    )
    assert set(absent.ratios) == {"regrouped", "foreach"}


def test_fills_of_standard_declarations() -> None:
    """By hand too an axis follows from another, and settings switch slots."""
    benchmark = FillBenchmark(Timer(Stub(), []), choose("cpu"))
    follow, settings = {TOKENS: BATCH * 4}, standard.Sharding()
    figures = benchmark(standard.DecodeInputs, {BATCH: 6}, settings=settings, relations=follow, rounds=1, steps=1)
    assert "foreach" in figures.ratios


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that leaves tails is named, with slot and row."""
    monkeypatch.setattr(Ready, "reset", lambda *_: None)
    ground = Ground.of(Rows, "cpu")
    with pytest.raises(WrongBytesError, match=r"Rows filled by 'foreach': slot 'ids', row 3 \(its tail\)"):
        contest_of_fills(ground, {BATCH: 3}, {BATCH: 8}, {}, (), ())


def test_live_sizes_that_do_not_fit() -> None:
    """More live rows than padded ones, or an axis that is none."""
    benchmark = FillBenchmark(Timer(Stub(), []), choose("cpu"))
    for live in ({BATCH: 9}, {TOKENS: 1}):
        with pytest.raises(ConfigError, match=r"live: sizes of the axes \[BATCH\], at most the padded ones"):
            benchmark(Rows, {BATCH: 8}, live)


def test_steps() -> None:
    """A runner's step, eagerly, and after a fill by hand, give the same outputs, and are all timed."""
    runner, batches = captured(), [batch(3, seed) for seed in range(3)]
    contest = contest_of_steps(runner, [(one, {}) for one in batches])
    contest.run(1, 1)  # which prepares the view that is replayed
    load = contest.loads[0]
    for name in ("eager", "runner"):
        assert torch.equal(contest.ways[name](load), batches[0]["ids"] + 1)
    figures = RunnerBenchmark(Timer(stub := Stub(), []))(runner, batches, rounds=2, steps=2)
    assert figures.ratios.keys() == {"eager", "runner"}
    assert stub.group == "cpu-capture: step of Rows"


def test_drawn_steps() -> None:
    """Batches of one's own are not needed: those drawn have as many rows as is said, without what is absent."""
    runner = captured()
    drawn = draw_for(runner.parts.stage, {BATCH: 7}, {"ids": (3, 5)}, ())
    assert len({tuple(batch["ids"].tolist()) for batch, _ in drawn}) == len(drawn) > 1
    assert all(len(batch["ids"]) == 7 and batch["ids"].min() >= 3 for batch, _ in drawn)
    figures = RunnerBenchmark(Timer(Stub(), []))(runner, live={BATCH: 7}, rounds=1, steps=1)
    assert "runner" in figures.ratios
    with pytest.raises(ConfigError, match="slot 'ids': live lacks a size for BATCH"):
        draw_for(runner.parts.stage, {}, {}, ())


def test_ways_of_ones_own() -> None:
    """All are held to the first, and the second counts; less than two, or no batches, are no contest."""
    benchmark, seen = WaysBenchmark(Timer(stub := Stub(), []), choose("cpu")), list[tuple[str, int]]()
    ways = {name: lambda batch, name=name: seen.append((name, batch)) for name in ("theirs", "mine", "other")}
    figures = benchmark(ways, [1, 2, 3], "fill", rounds=2, steps=3)
    assert figures.ratios.keys() == {"mine", "other"}
    assert set(seen) == {(name, batch) for name in ways for batch in (1, 2, 3)}
    assert stub.group == "cpu: fill"
    for few, batches in (({"mine": ways["mine"]}, [1]), (ways, [])):
        with pytest.raises(ConfigError, match="ways to time: at least two"):
            benchmark(few, batches, "fill")


def test_what_is_no_contest() -> None:
    """Batches of several buckets or sizes, or of none; a runner that was not captured, or captures nothing."""
    runner = captured()
    for rows in ((3, 4), (3, 5), (9,)):
        with pytest.raises(ConfigError, match="batches must be of one size"):
            contest_of_steps(runner, [(batch(size), {}) for size in rows])
    early = DecodeRunner(Rows, lambda view: view.ids, buckets=[4], backend="cpu-capture")
    plain = EagerRunner(Rows, lambda view: view.ids, backend="cpu")
    for other in (early, plain):
        with pytest.raises(ConfigError, match="has captured nothing: call capture"):
            contest_of_steps(other, [(batch(3), {})])


@attrs.frozen
class Told(Contest):
    """A contest whose ratios are told, one after another."""

    told: list[float] = attrs.field(factory=list)

    def run(self, rounds: int, steps: int) -> Figures:
        """The next."""
        del rounds, steps
        return Figures({}, {"foreach": self.told.pop(0)})


def contest(*ratios: float) -> Told:
    """One of ways that do nothing."""
    return Told({"foreach": lambda _: None}, [Load(None, {}, (1,))], "foreach", choose("cpu"), told=[*ratios])


def baseline(ratio: float, fail: float | None = 0.2) -> Baseline:
    """A saved run of one test."""
    return Baseline("0001_mine.json", {NAME: {"extra_info": {KEY: {"ratios": {"foreach": ratio}}}}}, fail)


def test_a_ratio_that_was_lower() -> None:
    """It counts where each of three measurements is over what is allowed; figures are saved all the same."""
    timer = Timer(stub := Stub(), [baseline(0.5)])
    why = r"foreach takes 0.700 of .* per_slot, and took 0.500 in 0001_mine.json: 40% more, where 20% is .* 3 t"
    with pytest.raises(RegressionError, match=why):
        timer(contest(0.9, 0.8, 0.7), "mine", 5, 6, None)
    assert stub.extra_info[KEY]["ratios"] == {"foreach": 0.7}
    assert stub.calls == [(5, 6, 1)]
    assert timer(contest(0.9, 0.61, 0.59), "mine", 5, 6, None).ratios == {"foreach": 0.59}


def test_what_nothing_is_held_against() -> None:
    """A baseline without this test or this lowering, without a bound, or that is not worse."""
    others = [baseline(0.1, None), baseline(0.99), Baseline("other.json", {}, 0.2), Baseline("o.json", {NAME: {}}, 0.2)]
    assert Timer(Stub(), others)(contest(1.0), "mine", 1, 1, None).ratios == {"foreach": 1.0}


def test_the_most_that_is_allowed() -> None:
    """A bound of the test's own needs no baseline; where nothing is timed, nothing is held to it."""
    with pytest.raises(RegressionError, match=r"foreach takes 1.200 of the time of per_slot, where 1.1 is allowed"):
        Timer(Stub(), [])(contest(1.2, 1.2, 1.2), "mine", 1, 1, 1.1)
    idle = Stub(disabled=True)
    assert Timer(idle, [baseline(0.5)])(contest(1.2), "mine", 1, 1, 1.1).ratios == {"foreach": 1.2}
    assert idle.calls == [(1, 1, 1)]
