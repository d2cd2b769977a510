"""Benchmarks: what is timed does the same by each way, and ratios are taken round by round."""

from typing import Any

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, Inputs, computed, copied, standard
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, RegressionError, WrongBytesError
from slotgraph.dataflow.ready import Ready
from slotgraph.runners.testing import benchmarks
from slotgraph.runners.testing.benchmarks import KEY, Figures, Timer, ways_to_fill
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
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=2.5)
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


def test_ratios_are_taken_round_by_round() -> None:
    """Two rounds, the second on a machine twice as slow: the ratio is what it is in each."""
    samples = {"per_slot": [10.0, 10, 10, 20, 20, 20], "foreach": [5.0, 5, 99, 10, 10, 99]}
    figures = Figures.of(samples, 2, "per_slot")
    assert figures.ratios == {"foreach": 0.5}
    assert figures.microseconds["per_slot"].median == 15


def test_fills(slotgraph_backend: Backend) -> None:
    """Each way fills slots of all kinds as the oracle does; by hand too an axis follows, and settings switch slots."""
    timer = Timer(stub := Stub())
    figures = timer.fill(slotgraph_backend, Mixed, {BATCH: 8, TOKENS: 9, PAGES: 5}, {PAGES: 4}, rounds=2, steps=3)
    assert {"regrouped", "foreach"} <= set(figures.ratios)
    assert figures.microseconds.keys() == {"per_slot", *figures.ratios}
    assert stub.group == f"{slotgraph_backend.name}: fill of Mixed"
    told: dict[str, Any] = {"absent": {"hidden", "flags"}, "lowerings": ("foreach",), "rounds": 1, "steps": 1}
    assert set(timer.fill(slotgraph_backend, Mixed, {HIDDEN: 5}, **told).ratios) == {"regrouped", "foreach"}
    follow, settings = {TOKENS: BATCH * 4}, standard.Sharding()
    given: dict[str, Any] = {"settings": settings, "relations": follow, "rounds": 1, "steps": 1}
    assert "foreach" in timer.fill(slotgraph_backend, standard.DecodeInputs, {BATCH: 6}, **given).ratios


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that leaves tails is named, with slot and row."""
    monkeypatch.setattr(Ready, "reset", lambda *_: None)
    with pytest.raises(WrongBytesError, match=r"Rows filled by 'foreach': slot 'ids', row 3 \(its tail\)"):
        ways_to_fill(Ground.of(Rows, "cpu"), {BATCH: 3}, {}, (), ())


def test_ways_of_ones_own() -> None:
    """All are called with the batches in turn; the first is what the others are held to."""
    seen: list[tuple[str, int]] = []
    ways = {name: lambda number, name=name: seen.append((name, number)) for name in ("theirs", "mine", "other")}
    figures = Timer(Stub()).ways(choose("cpu"), ways, [1, 2, 3], "fill", rounds=2, steps=3)
    assert figures.ratios.keys() == {"mine", "other"}
    assert set(seen) == {(name, number) for name in ways for number in (1, 2, 3)}


def test_refusals() -> None:
    """Sizes that do not fit, one way, no batches."""
    timer, cpu = Timer(Stub()), choose("cpu")
    for live in ({BATCH: 9}, {TOKENS: 1}):
        with pytest.raises(ConfigError, match=r"live: sizes of the axes \[BATCH\], at most the padded ones"):
            timer.fill(cpu, Rows, {BATCH: 8}, live)
    for ways, batches in (({"mine": print}, [1]), ({"mine": print, "other": print}, [])):
        with pytest.raises(ConfigError, match="ways to time: at least two"):
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
    assert stub.calls == [(1, 6, 1)]
    assert timed(timer, 1.4, 1.05, most=1.1) == 1.05
    assert timed(timer, 9.0) == 9.0
    assert timed(Timer(Stub(disabled=True)), 1.2, most=1.1) == 1.2
