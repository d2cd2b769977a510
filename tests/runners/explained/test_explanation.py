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
from tests.runners.explained.houses import SIZES, FullInputs, full_batch, full_runner, full_step, places, proxy
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
    buckets = {"EagerRunner": [], "GraphRunner": [(2, 2), (2, 4), (4, 2), (4, 4)]}.get(name, [2, 4])
    told = rf"(buckets {re.escape(str(buckets))}, ((\d) of \3 captured|graphs off), )?\S+ K?i?B"
    assert re.fullmatch(rf"<{name} of {declaration.name} on \S+: {told}>", repr(runner))
    runner(batch_of(name, 3, 3))
    after = slotgraph.explain(runner)
    assert read_back(after) == after
    assert sum(after.statistics["steps"].values()) == sum(before.statistics["steps"].values()) + 1
    assert set(places(after)) == set(declaration.slots)
    assert [bucket.rows for bucket in after.buckets] == buckets


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
        for bucket in found.buckets:
            assert (bucket.plan, bucket.why) == (runner.plan(bucket.rows), "")
            assert bucket.launches == {"": 1, "hidden_states": 1}
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
    """Copies of a fill are as many operators as the plan has, but for those by address."""
    runner = decoder(Written, lambda view: view.ids + 1, buckets=[8], lowering=lowering)
    runner.fill(batch_for(Written, {TOKENS: 7}, 7))
    with Operators() as ran:
        runner.fill(batch_for(Written, {TOKENS: 2}, 2))
    copies = sum(name in ("copy_", "_foreach_copy_") for name in ran.names)
    assert copies == slotgraph.explain(runner).buckets[0].plan.calls > 0


@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_model_in_parts(kind: str, backend: Backend) -> None:
    """A stack with two breaks is three graphs to launch, and the explanation says so."""
    model = Model(named=kind == "piecewise").to(backend.device)
    runner = ready(runner_of(kind, model, backend, buckets=[8]))
    found = slotgraph.explain(runner)
    parts = 1 if backend.name == "cpu" else 3  # where nothing is recorded, a replay is one call
    assert found.path == kind
    assert found.buckets[0].launches == {"": parts}


def test_places_are_addresses() -> None:
    """Offsets and bytes are those of the buffers, and fit into each allocation."""
    found, runner = slotgraph.explain(full_runner()), full_runner()
    for buffer in runner.graphs.buffers:
        place, storage = places(slotgraph.explain(runner))[buffer.name], buffer.tensor.untyped_storage()
        assert place.offset == buffer.tensor.data_ptr() - storage.data_ptr()
        assert place.nbytes == buffer.tensor.nbytes
    for one in found.memory:
        assert one.slots
        assert all(0 <= place.offset <= one.nbytes - place.nbytes for place in one.slots)
    assert sum(one.nbytes for one in found.memory) == found.statistics["memory"]["inputs"]


def test_bound_memory_is_someone_elses() -> None:
    """An adopted slot shows the offset in the memory that it is part of, and is in no account."""
    memory = torch.zeros(64, dtype=torch.int64)
    runner = plain_runner("cpu", bind={"ids": memory[16:24]})
    *_, adopted = (found := slotgraph.explain(runner)).memory
    assert (adopted.name, adopted.nbytes) == ("adopted device memory", memory.nbytes)
    assert [(place.slot, place.offset) for place in adopted.slots] == [("ids", 128)]
    assert found.statistics["memory"]["inputs"] == runner.graphs.buffers.nbytes


def test_why_bytes_must_last() -> None:
    """What must last between steps says why."""
    found = places(slotgraph.explain(full_runner()))
    assert (found["ones"].lasting, found["input_ids"].lasting) == ("a constant, which no step writes", None)


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
    assert (ids.lasting, weights.lasting, ids.shares) == ("it is kept, because that was asked for", None, ())
    late = slotgraph.explain(DecodeRunner(PlainInputs, plain_step, phase=pool["draft"].keeping("ids"), **options))
    assert (late.pool, late.member, places(late)["ids"].lasting) == (None, None, None)


def why(runner: DecodeRunner[Any], bucket: int = 8) -> str:
    """Why a bucket's graphs are not there."""
    (found,) = (one.why for one in slotgraph.explain(runner).buckets if one.rows == bucket)
    return found


def test_why_there_is_no_graph() -> None:
    """Not yet, never, later or failed: each bucket tells its own reason."""
    assert why(full_runner()) == "nothing is captured yet: call capture()"
    off, lazy = full_runner(graphs=False), full_runner(lazy=True)
    off.capture()
    lazy.capture()
    assert why(off) == "graphs are switched off, by graphs=False"
    assert why(lazy) == "captured when the first batch comes for it (lazy)"
    lazy(full_batch(7), **proxy(7))
    assert why(lazy) == ""
    assert why(lazy, 2) != ""

    def too_much(view: PlainInputs) -> torch.Tensor:
        if view.ids.shape[0] > 4:
            raise ValueError("no more than four")
        return plain_step(view)

    failing = DecodeRunner(PlainInputs, too_much, backend="cpu", buckets=[4, 8], progress=False)
    with pytest.raises(CaptureError):
        failing.capture()
    assert "1 of 2 captured, 1 failed" in repr(failing)
    assert "no more than four" in why(failing)
    assert why(failing, 4) == ""


def test_eager_runner_before_and_after() -> None:
    """Without a batch there is no memory; then the capacity that it grew to, without buckets or graphs."""
    runner = EagerRunner(
        FullInputs, full_step, backend="cpu", sizes={axis: size for axis, size in SIZES.items() if axis.fixed}
    )
    before = slotgraph.explain(runner)
    assert (before.memory, before.declaration.plan, before.buckets) == ((), None, ())
    runner(full_batch(5), **proxy(5))
    after = slotgraph.explain(runner)
    assert after.declaration.sizes["TOKENS"] == (8, 8)
    assert [label for label, _ in after.notes()] == ["eager", "alone", "memory"], (
        "nothing is padded, and there is no bucket"
    )
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
