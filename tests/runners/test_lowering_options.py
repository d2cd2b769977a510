"""Options that go with lowerings: the choice itself, captures on demand, debugging, accounts of bytes, and plans."""

from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend, load
from slotgraph.backends.cpu import CpuBackend
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError, ReplayError
from slotgraph.dataflow.explain import explain_declaration
from tests.runners.lowered import (
    ABSENT,
    BUCKETS,
    HIDDEN,
    PAGES,
    SIZES,
    WIDTH,
    Pair,
    Quick,
    Rich,
    arguments,
    assert_same_outputs,
    digest_step,
    runner_of,
)
from tests.runners.models import memory_of

each_lowering = pytest.mark.parametrize("lowering", LADDER)
each_fused = pytest.mark.parametrize("lowering", ["in_graph", "fused"])
PLAIN: Final = ("plain",)


class Large(Inputs):
    """Nothing for a kernel: one slot that is large, and one on the host."""

    rows: torch.Tensor = copied(BATCH, 1 << 18, dtype=torch.float32, pad=0.5)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, placement="host")


def test_auto_takes_the_devices_own(cpu: str) -> None:
    """What is not said, or is "auto", is the first of the backend's."""
    first = load(cpu)().capabilities.lowerings[0]
    assert runner_of(Quick, cpu).lowering == first
    assert runner_of(Quick, cpu, lowering="auto").lowering == first


@pytest.mark.parametrize("wanted", ["nonsense", "", "FUSED", "in-graph"])
def test_no_such_lowering(cpu: str, wanted: str) -> None:
    """A lowering that no backend has is refused with those that there are."""
    with pytest.raises(ConfigError, match=rf"lowering '{wanted}': this backend has .*foreach.*'auto'"):
        DecodeRunner(Quick, digest_step, backend=cpu, lowering=wanted)


def test_lowering_of_another_type(cpu: str) -> None:
    """What is no name is refused like any option of a wrong type."""
    with pytest.raises(ConfigError, match="expected str, got 3"):
        DecodeRunner(Quick, digest_step, backend=cpu, lowering=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [CpuBackend, CpuCaptureBackend])
def test_backend_without_the_lowering(kind: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that lacks a lowering refuses it; one that names it but has no fusion is told so."""
    few = attrs.evolve(kind().capabilities, lowerings=("foreach", "slot_by_slot"))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "capabilities", few)
        with pytest.raises(ConfigError, match="'in_graph': this backend has foreach, slot_by_slot; or say 'auto'"):
            DecodeRunner(Quick, digest_step, backend=kind(), lowering="in_graph")
    monkeypatch.setattr(kind, "fusion", lambda _: None)
    with pytest.raises(ConfigError, match=r"fusion\(\) gives none"):
        DecodeRunner(Quick, digest_step, backend=kind(), lowering="fused")


@each_lowering
def test_lazy(cpu: str, lowering: str) -> None:
    """A lazy runner captures a bucket, with all its patterns, when the first batch comes; each step is right."""
    pair = Pair(runner_of(Rich, cpu, lowering=lowering, lazy=True), runner_of(Rich, cpu, lowering="slot_by_slot"))
    captured = set[int]()
    for seed, (size, absent) in enumerate(
        [(3, ABSENT), (1, frozenset[str]()), (3, frozenset()), (8, ABSENT), (7, ABSENT)]
    ):
        bucket = next(one for one in BUCKETS if one >= size)
        report = pair.mine.report
        assert report is not None
        assert set(report.captured) == captured
        batch, plain = pair.batches(size, 5 * seed + 1, PLAIN, absent)
        decision = pair.mine.decide(batch, **arguments(batch))
        assert (decision.path, decision.bucket) == ("graph", bucket)
        outputs, right = pair.mine(batch, **arguments(batch)), pair.right(plain, **arguments(plain))
        for stale in ("scratch", "heat"):  # the other's warm-ups have written them
            del outputs[stale], right[stale]
        assert_same_outputs(outputs, right)
        captured.add(bucket)
    assert pair.mine.stats()["steps"] == {"graph": 5, "eager": 0}
    assert pair.mine.report is not None
    assert set(pair.mine.report.captured) == set(BUCKETS)


@each_lowering
def test_lazy_with_a_producer(cpu: str, lowering: str) -> None:
    """A producer that asks for a bucket's inputs has it captured, and what it writes is there for the step."""
    pair = Pair(runner_of(Quick, cpu, lowering=lowering, lazy=True), runner_of(Quick, cpu, lowering="slot_by_slot"))
    for seed, size in enumerate((3, 8, 1, 2)):
        bucket = next(one for one in BUCKETS if one >= size)
        view = pair.mine.inputs(bucket)
        view.ids.fill_(seed + 7)
        batch, plain = pair.batches(size, seed, ("in place", "plain"))
        assert_same_outputs(pair.mine(batch), pair.right(plain))
    with pytest.raises(ConfigError, match="no graph of bucket 3"):
        pair.mine.inputs(3)


@each_lowering
def test_lazy_capture_that_fails(cpu: str, lowering: str) -> None:
    """A bucket whose capture fails late runs eagerly from then on, says why, and leaves the others as they are."""
    calls: list[int] = []

    def step(view: Inputs) -> dict[str, torch.Tensor]:
        rows = len(view.ids)  # type: ignore[attr-defined]
        calls.append(rows)
        if rows == 4 * WIDTH:
            message = "not with four"
            raise RuntimeError(message)
        return digest_step(view)

    mine = DecodeRunner(Quick, step, buckets=BUCKETS, width=WIDTH, backend=cpu, lowering=lowering, lazy=True)
    mine.capture()
    pair = Pair(mine, runner_of(Quick, cpu, lowering="slot_by_slot"))
    for seed, size in enumerate((2, 3, 8, 3, 1)):
        batch, plain = pair.batches(size, seed, PLAIN)
        outputs, right = mine(batch), pair.right(plain)
        assert torch.equal(outputs["rows"], right["rows"])
        decision = mine.decide(batch)
        if size == 3:
            assert (decision.path, decision.why) == ("eager", "not_captured")
            assert "not with four" in decision.reason
        else:
            assert_same_outputs(outputs, right)
    assert calls.count(4 * WIDTH) == 1
    assert mine.stats()["eager"] == {"not_captured": {"steps": 2, "live": 6}}
    assert mine.report is not None
    assert set(mine.report.failed) == {4}


def test_before_capture(cpu: str) -> None:
    """Nothing is captured on demand before a runner was told to capture, lazily or not."""
    for lazy in (False, True):
        runner = DecodeRunner(Quick, digest_step, buckets=BUCKETS, backend=cpu, lazy=lazy)
        with pytest.raises(ReplayError, match="call capture"):
            runner({"ids": [1], "places": [2], "pairs": [[1.0, 2.0]], "bias": 1})
        with pytest.raises(ConfigError, match="no graph of bucket 2"):
            runner.inputs(2)
        runner.capture()
        with pytest.raises(CaptureError, match="captured already"):
            runner.capture()


@each_lowering
def test_debug(cpu: str, lowering: str) -> None:
    """With debugging on, steps are the same, and nothing is foreign where there are no streams."""
    pair = Pair.of(Rich, cpu, lowering, debug=True)
    for seed in range(8):
        batch, plain = pair.batches(1 + seed, 5 * seed + 1, ("plain", "list") if seed % 2 else PLAIN)
        mine, right = pair.mine(batch, **arguments(batch)), pair.right(plain, **arguments(plain))
        for name, output in mine.items():
            assert output.tolist() == right[name].tolist()
    assert "foreign_stream" not in pair.mine.stats()["detours"]


@each_lowering
def test_nothing_for_the_kernel(cpu: str, lowering: str) -> None:
    """Where every slot is large or on the host, the kernel has nothing to do, and steps are right."""
    runner = DecodeRunner(Large, lambda v: v.rows.sum(1) * v.here, buckets=[1, 4], backend=cpu, lowering=lowering)
    runner.capture()
    for seed in range(1, 5):
        rows = torch.randint(0, 9, (seed, 1 << 18)).float()
        here = torch.arange(seed) + seed
        assert torch.equal(runner({"rows": rows, "here": here}), rows.sum(1) * here)
        with pytest.raises(BatchError):
            runner({"rows": rows, "here": here.double()})
    if lowering in ("in_graph", "fused"):
        assert not runner.plan(4).fused


@each_fused
def test_uploads_are_accounted_for(cpu: str, lowering: str) -> None:
    """The account has tables and packet, more with more buckets and patterns, and its total is the sum of its parts."""
    accounts = {}
    for kind, buckets in ((Quick, (2,)), (Quick, BUCKETS), (Rich, BUCKETS)):
        report = runner_of(kind, cpu, lowering=lowering, buckets=buckets).report
        assert report is not None
        memory = report.memory
        assert memory.total == memory.inputs + memory.graphs + memory.outputs + memory.uploads
        accounts[kind, buckets] = memory.uploads
    assert 0 < accounts[Quick, (2,)] < accounts[Quick, BUCKETS] < accounts[Rich, BUCKETS]
    for other in ("foreach", "slot_by_slot"):
        plain = runner_of(Quick, cpu, lowering=other).report
        assert plain is not None
        assert plain.memory.uploads == 0


def test_a_refused_batch_leaves_the_view(cpu: str) -> None:
    """After a refused batch the view filled before it is still good for a replay, by every lowering."""
    for lowering in LADDER:
        pair = Pair.of(Quick, cpu, lowering)
        for seed, size in enumerate((3, 8, 1)):
            batch, plain = pair.batches(size, seed, PLAIN)
            pair.mine(pair.batches(8, 50 + seed, PLAIN)[0])  # a step whose packet may still be armed
            view = pair.mine.fill(batch)
            before = memory_of(pair.mine)
            for spoilt in ({**batch, "ids": batch["ids"].double()}, {**batch, "pairs": None}):
                with pytest.raises(BatchError):
                    pair.mine(spoilt)
                with pytest.raises(BatchError):
                    pair.mine.fill(spoilt)
            assert memory_of(pair.mine) == before
            assert_same_outputs(pair.mine.replay(view), pair.right(plain))


TEXTS: Final[dict[str, list[Any]]] = {
    "in_graph": ["1 copy call, ", "upload  one packet, then one kernel for 4 slots, the graph's first node", "fused)"],
    "fused": ["1 copy call, ", "upload  one packet, then one kernel for 4 slots, before the graph", "fused)"],
    "foreach": ["3 copy calls, ", "foreach)"],
    "slot_by_slot": ["3 copy calls, ", "single: slot by slot)"],
}


@each_lowering
def test_plan_says_how(cpu: str, lowering: str) -> None:
    """The plan's text tells the lowering, the upload, and what goes which way; a slot in place is not moved."""
    runner = runner_of(Quick, cpu, lowering=lowering)
    plan = runner.plan(4)
    text = str(plan)
    assert plan.lowering == lowering
    for part in TEXTS[lowering] if lowering != "foreach" else TEXTS[lowering][1:]:
        assert part in text
    written = runner.plan(4, in_place=["ids"])
    assert "copy    ids  (int64, device, in place)" in str(written)
    assert "reset   ids[live:] = -3 in each step" in str(written)
    assert written.nbytes == plan.nbytes - 4 * WIDTH * 8
    assert set(written.fused) <= set(plan.fused)


@each_lowering
def test_explanations_say_the_same(cpu: str, lowering: str) -> None:
    """What `explain` prints for a bucket's sizes is the runner's own plan, with slots in place or absent too."""
    runner = runner_of(Rich, cpu, lowering=lowering)
    declaration, capabilities = runner.stage.declaration, runner.stage.backend.capabilities
    sizes = {axis: (size, size) for axis, size in runner._sizes[4].items()}
    assert {PAGES, HIDDEN} <= set(sizes)
    for absent, written in (((), ()), (("extra", "beside"), ("ids", "tables", "here"))):
        made = explain_declaration(declaration, capabilities, cpu, sizes, absent, written, lowering=runner.lowering)
        assert made.plan == runner.plan(4, absent, written)
    assert SIZES[Rich][PAGES] == sizes[PAGES][1]
    with pytest.raises(ConfigError, match="cannot write 'scratch' in place"):
        explain_declaration(declaration, capabilities, cpu, sizes, in_place=["scratch"])
