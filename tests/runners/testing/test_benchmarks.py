"""Benchmarks: what is timed does the same by each way, and ratios are taken round by round."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, computed, copied, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, RegressionError, WrongBytesError
from slotgraph.dataflow.ready import Ready
from slotgraph.dataflow.sampling import Sample
from slotgraph.runners.testing.benchmarks import (
    KEY,
    Contest,
    Figures,
    Timer,
    contest_of_fills,
    contest_of_steps,
    draw_for,
)
from slotgraph.runners.testing.ground import Ground
from tests.runners.testing.declared import HIDDEN, PAGES, Mixed


@attrs.define
class Stub:
    """What pytest-benchmark's fixture has."""

    disabled: bool = False
    extra_info: dict[str, Any] = attrs.field(factory=dict)
    group: str | None = None
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
    assert figures.microseconds["per_slot"].median == 15


def test_fills(slotgraph_backend: Backend) -> None:
    """Each way fills slots of all kinds as the oracle does; by hand too an axis follows, and settings switch slots."""
    timer = Timer(Stub())
    figures = timer.fill(slotgraph_backend, Mixed, {BATCH: 8, TOKENS: 9, PAGES: 5}, {PAGES: 4}, rounds=2, steps=3)
    assert {"regrouped", "foreach"} <= set(figures.ratios)
    assert figures.microseconds.keys() == {"per_slot", *figures.ratios}
    told: dict[str, Any] = {"absent": {"hidden", "flags"}, "lowerings": ("foreach",), "rounds": 1, "steps": 1}
    assert set(timer.fill(slotgraph_backend, Mixed, {HIDDEN: 5}, **told).ratios) == {"regrouped", "foreach"}
    follow, settings = {TOKENS: BATCH * 4}, standard.Sharding()
    given: dict[str, Any] = {"settings": settings, "relations": follow, "rounds": 1, "steps": 1}
    assert "foreach" in timer.fill(slotgraph_backend, standard.DecodeInputs, {BATCH: 6}, **given).ratios


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that leaves tails is named, with slot and row."""
    monkeypatch.setattr(Ready, "reset", lambda *_: None)
    with pytest.raises(WrongBytesError, match=r"Rows filled by 'foreach': slot 'ids', row 3 \(its tail\)"):
        contest_of_fills(Ground.of(Rows, "cpu"), {BATCH: 3}, {}, (), ())


def test_steps_and_ways() -> None:
    """A runner's step, eagerly, and after a fill by hand, give the same outputs; so may ways of one's own be timed."""
    runner, batches = captured(), [batch(3, seed) for seed in range(3)]
    contest = contest_of_steps(runner, [Sample(one, {}) for one in batches])
    contest.run(1, 1)  # which prepares the view that is replayed
    for name in ("eager", "runner"):
        assert torch.equal(contest.ways[name](contest.batches[0]), batches[0]["ids"] + 1)
    timer = Timer(stub := Stub())
    assert timer.runner(runner, batches, rounds=2, steps=2).ratios.keys() == {"eager", "runner"}
    assert stub.group == "cpu-capture: step of Rows"
    assert "runner" in timer.runner(runner, live={BATCH: 7}, rounds=1, steps=1).ratios
    drawn = draw_for(runner.parts.stage, {BATCH: 7}, {"ids": (3, 5)})
    assert len({tuple(one.batch["ids"].tolist()) for one in drawn}) == len(drawn) > 1
    assert all(len(one.batch["ids"]) == 7 and one.batch["ids"].min() >= 3 for one in drawn)
    seen: list[tuple[str, int]] = []
    ways = {name: lambda number, name=name: seen.append((name, number)) for name in ("theirs", "mine", "other")}
    figures = timer.ways(choose("cpu"), ways, [1, 2, 3], "fill", rounds=2, steps=3)
    assert figures.ratios.keys() == {"mine", "other"}
    assert set(seen) == {(name, number) for name in ways for number in (1, 2, 3)}


def test_what_is_no_contest() -> None:
    """Sizes that do not fit, several sizes, no graph, nothing captured, one way."""
    timer, cpu, runner = Timer(Stub()), choose("cpu"), captured()
    for live in ({BATCH: 9}, {TOKENS: 1}):
        with pytest.raises(ConfigError, match=r"live: sizes of the axes \[BATCH\], at most the padded ones"):
            timer.fill(cpu, Rows, {BATCH: 8}, live)
    for rows in ((3, 4), (3, 5), (9,)):
        with pytest.raises(ConfigError, match="batches must be of one size"):
            timer.runner(runner, [batch(size) for size in rows])
    early = DecodeRunner(Rows, lambda view: view.ids, buckets=[4], backend="cpu-capture")
    for other in (early, EagerRunner(Rows, lambda view: view.ids, backend="cpu")):
        with pytest.raises(ConfigError, match="has captured nothing: call capture"):
            timer.runner(other, [batch(3)])
    with pytest.raises(ConfigError, match="slot 'ids': live lacks a size for BATCH"):
        timer.runner(runner)
    for ways, batches in (({"mine": print}, [1]), ({"mine": print, "other": print}, [])):
        with pytest.raises(ConfigError, match="ways to time: at least two"):
            timer.ways(cpu, ways, batches, "fill")


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
    return Told("fill", {"foreach": lambda _: None}, [None], "foreach", choose("cpu"), told=[*ratios])


def test_ratios_that_are_too_high() -> None:
    """They count if each of three measurements is over what is allowed; figures are saved all the same."""
    timer = Timer(stub := Stub())
    why = r"cpu: fill: foreach takes 1.200 of the time of per_slot, where 1.1 is allowed \(measured 3 times\)"
    with pytest.raises(RegressionError, match=why):
        timer.contest(contest(1.4, 1.3, 1.2), rounds=5, steps=6, most=1.1)
    assert stub.extra_info[KEY]["ratios"] == {"foreach": 1.2}
    assert stub.calls == [(5, 6, 1)]
    assert timer.contest(contest(1.4, 1.05), most=1.1).ratios == {"foreach": 1.05}
    assert timer.contest(contest(9.0)).ratios == {"foreach": 9.0}
    idle = Stub(disabled=True)
    assert Timer(idle).contest(contest(1.2), most=1.1).ratios == {"foreach": 1.2}
    assert idle.calls == [(1, 1, 1)]
