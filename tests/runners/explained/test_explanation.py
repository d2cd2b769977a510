"""An explanation of a runner says what the runner has, plans and did; what changes there shows."""

import json
import re
from typing import Any

import pytest
import torch

import slotgraph
from slotgraph import TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import CaptureError
from slotgraph.runners.engine.pool import InputPool
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.serial import from_data, to_data
from tests.operators import Operators
from tests.runners.explained.houses import SIZES, FullInputs, full_batch, full_runner, full_step, places, proxy, steps
from tests.runners.kinds import RUNNERS, batch_of, captured
from tests.runners.models import PlainInputs, batch_for, decoder, plain_runner, plain_step, random_batch, ready
from tests.runners.prefilled import KINDS, Model, runner_of


def read_back(explanation: RunnerExplanation) -> RunnerExplanation:
    """Through JSON and back."""
    return from_data(json.loads(json.dumps(to_data(explanation), allow_nan=False)), RunnerExplanation)


@pytest.mark.parametrize("name", RUNNERS)
def test_every_kind_of_runner(name: str) -> None:
    """Each runner is explained before and after steps, and comes back from JSON."""
    runner = captured(name)
    before = slotgraph.explain(runner)
    assert read_back(before) == before
    declaration = runner.stage.declaration
    assert (before.kind, before.declaration.declaration) == (name, declaration.name)
    told = r"(buckets \[2, 4\], (2 of 2 captured|graphs off), )?\S+ K?i?B"
    assert re.fullmatch(rf"<{name} of {declaration.name} on \S+: {told}>", repr(runner))
    runner(batch_of(name, 3, 3))
    after = slotgraph.explain(runner)
    assert read_back(after) == after
    assert sum(after.statistics["steps"].values()) == sum(before.statistics["steps"].values()) + 1
    assert {place.slot for place in after.memory.places} == set(declaration.slots)
    assert [bucket.rows for bucket in after.buckets] == ([] if name == "EagerRunner" else [2, 4])


def test_facts_read_back(backend: Backend) -> None:
    """On each backend and by each lowering, an explanation comes back from JSON, and its plans are the runner's."""
    if backend.capabilities.host_parameters:
        pytest.skip(f"{backend.name} hands host parameters to operators, and the step of this house calls none")
    for lowering in backend.capabilities.lowerings:
        runner = full_runner(backend, lowering=lowering)
        assert read_back(slotgraph.explain(runner)) == slotgraph.explain(runner)
        runner.capture()
        for rows in (1, 5, 11):
            runner(full_batch(rows), **proxy(rows))
        found = slotgraph.explain(runner)
        assert read_back(found) == found
        assert (found.backend, found.lowering, found.device) == (backend.name, lowering, str(backend.device))
        assert {graph.why for bucket in found.buckets for graph in bucket.graphs} == {""}
        for bucket in found.buckets:
            fill, moved = bucket.fill, [step for step in bucket.fill.steps if step.kind in ("copy", "kernel")]
            assert fill.plan == runner.plan(bucket.rows)
            assert (fill.calls["graph"], fill.calls.get("kernel")) == (1, {"fused": 1, "in_graph": 0}.get(lowering))
            assert sum(step.nbytes or 0 for step in moved) >= fill.plan.nbytes
        assert found.declaration.plan == runner.plan(8)


class Written(Inputs):
    """Copied slots alone: of several dtypes, a strided one, one on the host, tails of zero and of others."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    scales: torch.Tensor = copied(TOKENS, dtype=torch.float32, pad=2.5)
    pairs: torch.Tensor = copied(2, TOKENS, dtype=torch.int32, pad=0)
    lens: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=1, placement="host")


@pytest.mark.parametrize("lowering", ["foreach", "slot_by_slot"])
def test_calls_are_those_that_are_made(lowering: str) -> None:
    """Copies and resets of a fill that finds every tail dirty are as many operators as are told."""
    runner = decoder(Written, lambda view: view.ids + 1, buckets=[8], lowering=lowering)
    for rows in (7, 2, 7):
        runner.fill(batch_for(Written, {TOKENS: rows}, rows))
    with Operators() as ran:
        runner.fill(batch_for(Written, {TOKENS: 2}, 2))
    found = slotgraph.explain(runner).buckets[0].fill
    copies, resets = (
        sum(name in names for name in ran.names) for names in (("copy_", "_foreach_copy_"), ("fill_", "_foreach_zero_"))
    )
    assert (copies, resets) == (found.calls["copy"], found.calls["reset"])
    assert copies > 0


@pytest.mark.parametrize("lowering", ["fused", "in_graph"])
def test_one_upload_and_one_kernel(lowering: str) -> None:
    """The packet has the values that the host computes; the kernel is inside of the graph, or beside it."""
    runner = full_runner(lowering=lowering)
    found = slotgraph.explain(runner)
    (upload,), (kernel,) = steps(found, "upload"), steps(found, "kernel")
    assert (upload.calls, upload.nbytes) == (1, places(found)["tokens"].nbytes)
    assert (kernel.inside, kernel.calls) == ((True, 0) if lowering == "in_graph" else (False, 1))
    assert upload.slots == kernel.slots == runner.plan(8).fused


@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_model_in_parts(kind: str, backend: Backend) -> None:
    """A stack with two breaks is three graphs to launch, and what the device computes comes before them."""
    model = Model(named=kind == "piecewise").to(backend.device)
    runner = ready(runner_of(kind, model, backend, buckets=[8]))
    found = slotgraph.explain(runner)
    parts = 1 if backend.name == "cpu" else 3  # where nothing is recorded, a replay is one call
    assert found.path == kind
    assert [graph.parts for graph in found.buckets[0].graphs] == [parts]
    assert found.buckets[0].fill.calls["graph"] == parts
    assert [(step.calls, step.inside) for step in steps(found, "compute")] == [(1, False)]


def test_places_are_addresses() -> None:
    """Offsets and bytes are those of the buffers, and fit into each allocation."""
    found, runner = slotgraph.explain(full_runner()), full_runner()
    for buffer in runner.graphs.buffers:
        place, storage = places(slotgraph.explain(runner))[buffer.name], buffer.tensor.untyped_storage()
        assert place.offset == buffer.tensor.data_ptr() - storage.data_ptr()
        assert (place.nbytes, place.shape) == (buffer.tensor.nbytes, tuple(buffer.tensor.shape))
    for one in found.memory.allocations:
        members = [place for place in found.memory.places if place.allocation == one.name]
        assert sum(place.nbytes for place in members) <= one.nbytes
    assert sum(one.nbytes for one in found.memory.allocations) == found.statistics["memory"]["inputs"]


def test_bound_memory_is_someone_elses() -> None:
    """An adopted slot shows the offset in the memory that it is part of, and is in no account."""
    memory = torch.zeros(64, dtype=torch.int64)
    runner = plain_runner("cpu", bind={"ids": memory[16:24]})
    place, found = places(slotgraph.explain(runner))["ids"], slotgraph.explain(runner)
    assert place.offset == 128
    assert [one.name for one in found.memory.allocations if one.adopted] == [place.allocation]
    assert found.statistics["memory"]["inputs"] == runner.graphs.buffers.nbytes
    assert [one.nbytes for one in found.memory.allocations if one.adopted] == [memory.nbytes]


def test_when_values_count() -> None:
    """A value counts from the phase that writes it; what must last between steps says why."""
    found = places(slotgraph.explain(full_runner(lowering="in_graph")))
    spans = {name: (place.since, place.until) for name, place in found.items()}
    assert spans["input_ids"] == ("kernel", "replay")
    assert spans["block_tables"] == ("kernel", "replay")
    assert spans["after"] == ("replay", "replay")
    assert spans["logits"] == ("replay", "outputs")
    assert found["ones"].lasting == "a constant, which no step writes"
    assert found["input_ids"].lasting is None
    assert "kernel" not in slotgraph.explain(full_runner(lowering="foreach")).memory.phases


def test_shared_memory() -> None:
    """A runner of a pool says who shares its bytes, and where everyone's slots lie; one that comes late shares none."""
    pool = InputPool("draft", "verify", anytime=["encode"])
    options: dict[str, Any] = {"backend": "cpu", "buckets": [8]}
    runners = [
        DecodeRunner(PlainInputs, plain_step, phase=phase, **options)
        for phase in (pool["draft"].keeping("ids"), pool["verify"])
    ]
    assert ["no memory yet" in repr(runner) for runner in runners] == [True, True]
    first, second = (slotgraph.explain(runner) for runner in runners)
    assert ["no memory yet" in repr(runner) for runner in runners] == [False, False]
    assert first.pool is not None
    assert first.pool == second.pool
    assert first.pool.nbytes < first.pool.apart
    assert read_back(first) == first
    taken = {(place.offset, place.nbytes) for place in places(first).values()}
    assert taken & {(place.offset, place.nbytes) for place in places(second).values()}
    shares = [name for place in places(first).values() for name in place.shares]
    assert shares
    assert all(name.startswith(f"{second.member}.") for name in shares)
    ids, weights = places(first)["ids"], places(first)["weights"]
    assert (ids.lasting, ids.since, ids.until) == ("it is kept, because that was asked for", "fill", "outputs")
    assert (weights.lasting, ids.shares) == (None, ())
    late = slotgraph.explain(DecodeRunner(PlainInputs, plain_step, phase=pool["draft"].keeping("ids"), **options))
    assert (late.pool, late.member, places(late)["ids"].lasting) == (None, None, None)


def why(runner: DecodeRunner[Any], bucket: int = 8) -> set[str]:
    """Why a bucket's graphs are not there."""
    found = slotgraph.explain(runner)
    return {graph.why for one in found.buckets if one.rows == bucket for graph in one.graphs}


def test_why_there_is_no_graph() -> None:
    """Not yet, never, later or failed: each bucket and pattern tells its own reason."""
    assert why(full_runner()) == {"nothing is captured yet: call capture()"}
    off, lazy = full_runner(graphs=False), full_runner(lazy=True)
    off.capture()
    lazy.capture()
    assert why(off) == {"graphs are switched off, by graphs=False"}
    assert why(lazy) == {"captured when the first batch comes for it (lazy)"}
    lazy(full_batch(7), **proxy(7))
    assert why(lazy) == {""}
    assert why(lazy, 2) != {""}

    def too_much(view: PlainInputs) -> torch.Tensor:
        if view.ids.shape[0] > 4:
            raise ValueError("no more than four")
        return plain_step(view)

    failing = DecodeRunner(PlainInputs, too_much, backend="cpu", buckets=[4, 8], progress=False)
    with pytest.raises(CaptureError):
        failing.capture()
    assert "1 of 2 captured, 1 failed" in repr(failing)
    (reason,) = why(failing)
    assert "no more than four" in reason
    assert why(failing, 4) == {""}


def test_eager_runner_before_and_after() -> None:
    """Without a batch there is no memory; then the capacity that it grew to, without buckets, tails or graphs."""
    runner = EagerRunner(
        FullInputs, full_step, backend="cpu", sizes={axis: size for axis, size in SIZES.items() if axis.fixed}
    )
    before = slotgraph.explain(runner)
    assert (before.memory.places, before.eager, before.buckets) == ((), None, ())
    runner(full_batch(5), **proxy(5))
    after = slotgraph.explain(runner)
    assert after.eager is not None
    assert dict(after.eager.plan.sizes)["TOKENS"] == 8
    assert {"reset", "graph"}.isdisjoint(after.eager.calls)
    assert after.statistics["memory"]["inputs"] == runner.nbytes
    assert read_back(after) == after


def test_explaining_changes_nothing() -> None:
    """The view filled last still stands, and the books count nothing."""
    runner = plain_runner("cpu-capture")
    view = runner.fill(random_batch(3, seed=1))
    before = runner.stats()
    first, second = slotgraph.explain(runner), slotgraph.explain(runner)
    assert first == second
    assert runner.stats() == before
    assert runner.replay(view).shape[0] == 3
