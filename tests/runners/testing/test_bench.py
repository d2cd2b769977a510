"""The benchmark: each way leaves the oracle's bytes, runs whole steps, and says why it cannot."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, EagerRunner
from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import ConfigError, WrongBytesError
from slotgraph.runners.testing import bench, by_hand
from slotgraph.runners.testing.bench import BARE, cases, declare_decode, runner_of, smallest_step, ways_to_step
from slotgraph.runners.testing.benchmarks import SETS, draw, verify
from slotgraph.runners.testing.by_hand import COMPILED, PER_SLOT, REGROUPED
from slotgraph.runners.testing.ground import Ground
from tests.benchmarks.decoding import draw as drawn
from tests.runners import prefilled, test_draft, test_draft_extend
from tests.runners.models import PlainInputs, decoder, plain_runner, plain_step, random_batch

HANDS = (PER_SLOT, REGROUPED)


def test_batches_differ_in_addresses_and_values() -> None:
    """No step finds the sources of the one before, nor their values."""
    ground = Ground.of(declare_decode(12), "cpu", {BATCH: 256})
    ways: list[Callable[[int], dict[str, Any]]] = [
        lambda number: vars(drawn(declare_decode(12), choose("cpu"), 200, number)),
        lambda number: draw(ground, {}, number).batch,
    ]
    for make in ways:
        for one, other in itertools.pairwise(make(number) for number in range(SETS)):
            for name in one.keys() - {"rows", "is_greedy"}:
                assert one[name] is not other[name]
                assert not torch.equal(one[name], other[name])


def test_every_way_leaves_the_oracles_bytes(backend: Backend) -> None:
    """Over growing and shrinking batches, tails and outputs included; but a bare replay fills nothing."""
    runner = runner_of(declare_decode(12), buckets=[48], backend=backend)
    ground = Ground(runner.stage, runner.sizes[48])
    oracle, found = ways_to_step(runner, 48, HANDS)
    batches = [draw(ground, {BATCH: rows}, rows) for rows in (37, 48, 1, 37)]
    verify("twelve", ground.declaration, backend, oracle, found, [(one.sizes, one) for one in batches])
    assert set(found) == {*HANDS, *backend.capabilities.lowerings, BARE}
    before = {one.name: one.tensor.clone() for one in found[BARE].buffers}
    found[BARE].call(draw(ground, {BATCH: 3}, 3))
    assert all(torch.equal(one.tensor, before[one.name]) for one in found[BARE].buffers)


@pytest.mark.parametrize("changed", ["slots", "outputs"])
def test_wrong_bytes_end_the_benchmark(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed that leaves other slots or returns other outputs than the oracle."""

    def stale(*given: Any) -> Any:
        oracle, found = ways_to_step(*given)
        right = found[PER_SLOT]

        def call(one: Any) -> Any:
            returned = right.call(one)
            right.buffers["seq_lens"].tensor[one.sizes[BATCH] :] += int(changed == "slots")
            return returned + int(changed == "outputs")

        return oracle, {**found, PER_SLOT: type(right)(call, right.buffers)}

    what = {"outputs": "it returned other outputs", "slots": "slot 'seq_lens', row 7 (its tail)"}[changed]
    monkeypatch.setattr(bench, "ways_to_step", stale)
    monkeypatch.setattr(bench, "SIZES", {8: (7,)})
    monkeypatch.setattr(bench, "measure", pytest.fail)
    with pytest.raises(WrongBytesError) as caught:
        bench.bench(slots=[4], quick=True, backend="cpu")
    assert f"4 slots by 'per_slot': {what}" in str(caught.value)


@pytest.mark.parametrize("way", HANDS)
def test_code_by_hand_is_what_an_engine_writes(way: str) -> None:
    """One line a tail and one a copy, or a call of foreach for each dtype."""
    declaration = PlainInputs.slotgraph
    slots = {name: slot for name, slot in declaration.slots.items() if name in {"ids", "pairs"}}
    text = by_hand.text_by_hand(declaration, slots, {"ids": 49, "pairs": 0}, {BATCH: 4, TOKENS: 8}, way)
    lines = {
        PER_SLOT: ["if TOKENS < 8: ids[TOKENS:8].fill_(49)", "ids[:TOKENS].copy_(_ids, non_blocking=True)"],
        REGROUPED: [
            "if BATCH < 4: _foreach_zero_([pairs[BATCH:4]])",
            "_foreach_copy_([part_ids], [_ids], non_blocking",
        ],
    }
    assert [line for line in lines[way] if line not in text] == []


def test_a_users_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own step, in its largest bucket, at a known size and at sizes that were never seen; captured or not."""
    monkeypatch.setattr(bench, "QUICK", (1, 2, 0))
    runner = plain_runner("cpu-capture")
    report = bench.bench(runner, quick=True)
    assert {(row["live"], row["padded"]) for row in report.rows} == {(6, 8), ("any", 8)}
    assert {row["lowering"] for row in report.rows} == {*HANDS, *runner.stage.backend.capabilities.lowerings, BARE}
    assert all(row["host_us"] > 0 for row in report.rows)
    assert report.conditions["target"] == "DecodeRunner of PlainInputs"
    assert runner(random_batch(3, seed=1)).shape[0] == 3
    given = bench.bench(runner, [random_batch(rows, seed=rows) for rows in (2, 5)], quick=True)
    assert {(row["live"], row["padded"]) for row in given.rows} == {("given", 8)}


DRAFTS: dict[str, Callable[[], Any]] = {
    "tree": lambda: test_draft.made("cpu", 2, 3),
    "layers": lambda: test_draft_extend.made("cpu"),
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners of other classes are captured once more by each lowering, with the sizes and the width that they have."""
    monkeypatch.setattr(bench, "QUICK", (1, 2, 0))
    runner = DRAFTS[kind]()
    report = bench.bench(runner, quick=True)
    assert {row["lowering"] for row in report.rows} == {*HANDS, *runner.stage.backend.capabilities.lowerings, BARE}


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_a_stack_is_measured_by_its_fills(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that holds a part of the step has no whole replay."""
    monkeypatch.setattr(bench, "QUICK", (1, 2, 0))
    model: Any = prefilled.Model(named=kind == "piecewise")
    runner = prefilled.runner_of(kind, model, "cpu-capture", buckets=[32], max_batch=4)
    report = bench.bench(runner, lambda rows, _: prefilled.batch_of([rows], rows, "cpu"), quick=True)
    assert report.conditions["measured"] == "fill"
    assert BARE not in {row["lowering"] for row in report.rows}
    assert "microseconds of a fill" in str(report)


def test_what_cannot_be_compiled_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ways are measured all the same."""

    def refusing(*_: object, **__: object) -> Any:
        def call(*_: object) -> None:
            raise RuntimeError("no compiler\nhere")

        return call

    monkeypatch.setattr(bench, "FULL", (1, 2, 0))
    monkeypatch.setattr(torch, "compile", refusing)
    report = bench.bench(plain_runner("cpu"))
    notes = {row["lowering"]: (row["host_us"], row["note"]) for row in report.rows}
    assert notes[COMPILED] == (None, "it is not compiled here: RuntimeError: no compiler here")
    assert notes[PER_SLOT][0] > 0
    assert "compiled: it is not compiled here: RuntimeError: no compiler here" in " ".join(str(report).split())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_compiled_fill(backend: str) -> None:
    """It is compiled for all sizes, and leaves the oracle's bytes; slots of several dtypes share one memory."""
    runner = decoder(PlainInputs, plain_step, backend=backend, buckets=[8])
    found = [pair for pair in cases(runner, (6, "any"), (COMPILED,)) if pair[0]["lowering"] == COMPILED]
    assert [(row["note"], len(run.batches)) for row, run in found] == [("", SETS), ("", 8)]


def test_refusals() -> None:
    """A runner that captures nothing, and one that is given options."""
    eager: Any = EagerRunner(PlainInputs, smallest_step, backend="cpu")
    captured, refused = plain_runner("cpu"), list[tuple[Any, dict[str, Any]]]()
    refused += [(eager, {}), (captured, {"buckets": [3]}), (captured, {"backend": "cpu"}), ("captured", {})]
    for target, options in refused:
        with pytest.raises(ConfigError, match="bench measures a declaration, or a runner of one rank"):
            bench.bench(target, **options)
