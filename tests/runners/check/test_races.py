"""Steps in flight: a broken ring, and a host slot that is overwritten too early, are found; what is sound is not."""

import copy
import threading
import types
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, computed, copied
from slotgraph.dataflow.buffers import span
from slotgraph.dataflow.sources import Source
from slotgraph.runners.check.trial import Finding
from slotgraph.runners.engine.pool import InputPool
from tests.invariants.device import Device
from tests.invariants.steps import LOWERINGS
from tests.runners.check.test_planted import found_by, report_of, runner_of
from tests.runners.models import Batch, PlainInputs, assert_right, plain_step, random_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotgraph.backends import Backend

ROWS = (3, 4, 1, 8, 6)


class Hosted(PlainInputs):  # with lengths in the host's memory, which the step's device work reads, and a count there
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    count: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64, placement="host")


def hosted_step(view: Any) -> torch.Tensor:
    """What is in host memory goes to the device first, as it does on one."""
    on_device = view.weights.device.type != "cpu"
    lens: torch.Tensor = view.lens.to(view.weights.device, non_blocking=True) if on_device else view.lens.clone()
    return plain_step(view) + lens[:, None]


def hosted_batch(rows: int, seed: int) -> Batch:
    """Lengths beside the rest."""
    lens = torch.randint(1, 99, (rows,), generator=torch.Generator().manual_seed(seed))
    return {**random_batch(rows, seed), "lens": lens}


def lazy_runner(
    inputs: type[Inputs] = PlainInputs, step: Any = plain_step, *, lowering: str = "in_graph"
) -> tuple[Any, Device]:
    """A captured runner on the lazy device."""
    backend = Device()
    return runner_of(step, backend, inputs, buckets=[4, 8], lowering=lowering), backend


def found_on(runner: Any, backend: Device, make: "Callable[[int, int], Batch]") -> list[Finding]:
    """What the check finds there."""
    with backend.later():
        return found_by("races", runner, [make(rows, 7 + rows) for rows in ROWS], state=[])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_sound_ring(lowering: str) -> None:
    """Sources may be overwritten right after the call, whatever they are: nothing is found."""
    runner, backend = lazy_runner(lowering=lowering)
    for make in (random_batch, lambda *of: {name: one.numpy() for name, one in random_batch(*of).items()}):
        assert found_on(runner, backend, make) == []


@pytest.mark.parametrize("lowering", ["in_graph", "fused", "slot_by_slot"])
def test_host_slot_that_a_graph_copies_from(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait the next fill overwrites it under the copy, which is found and named; with it nothing is."""
    runner, backend = lazy_runner(Hosted, hosted_step, lowering=lowering)
    hosts = runner.graphs.filler.hosts
    assert hosts.slots == {"lens": "aten::clone"}
    assert found_on(runner, backend, hosted_batch) == []
    monkeypatch.setattr(hosts, "wait", lambda: None)
    (found,) = found_on(runner, backend, hosted_batch)
    assert found.slot == "lens"
    assert "aten::clone copies from slot 'lens' in host memory when the device gets there" in found.message


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_only_runners_that_read_host_slots_wait(lowering: str) -> None:
    """A runner whose step leaves its host slots to the host never waits; one that reads them waits in each fill."""
    for step, waits in ((plain_step, False), (hosted_step, True)):
        runner, backend = lazy_runner(Hosted, step, lowering=lowering)
        runner(hosted_batch(3, 1))
        assert (runner.graphs.buffers.use.reading is not None) == runner.graphs.filler.hosts.notes == waits
        backend.synchronize()


@settings(max_examples=min(40, settings().max_examples))
@given(rows=st.lists(st.integers(0, 9), min_size=2, max_size=12), seed=st.integers(0, 1 << 20), data=st.data())
def test_many_steps_behind_one_another(rows: list[int], seed: int, data: st.DataObject) -> None:
    """Each of many steps in flight, by any way, gives its own batch's rows, host slots included; 9 run eagerly."""
    runner, backend = HOSTED[data.draw(st.sampled_from(LOWERINGS))]
    batches = [hosted_batch(count, seed + at) for at, count in enumerate(rows)]
    given_rows = [{name: value.clone() for name, value in batch.items()} for batch in batches]
    with backend.later():
        outputs = []
        for batch in given_rows:
            outputs.append(runner(batch).clone())
            batch["lens"].fill_(-5)
    backend.synchronize()
    for batch, output in zip(batches, outputs, strict=True):
        assert_right(output - batch["lens"][:, None], batch)


HOSTED = {lowering: lazy_runner(Hosted, hosted_step, lowering=lowering) for lowering in LOWERINGS}


def test_runners_of_a_pool_have_host_slots_for_themselves() -> None:
    """So that a fill need not wait for another runner's step: the layout says so, and what is in flight is right."""
    backend, pool = Device(), InputPool("first", "second")
    given: dict[str, Any] = {"buckets": [8], "backend": backend, "lowering": "in_graph"}
    steps = {"first": hosted_step, "second": plain_step}
    runners = [DecodeRunner(Hosted, step, phase=pool[phase], **given) for phase, step in steps.items()]
    for made in runners:
        made.capture()
    mine, others = ({name: span(made.graphs.buffers[name].tensor) for name in ("lens", "count")} for made in runners)
    assert not any(low < stop and start < high for low, high in mine.values() for start, stop in others.values())
    batches = [hosted_batch(1 + at % 8, at) for at in range(12)]
    with backend.later():
        outputs = [runners[at % 2](batch).clone() for at, batch in enumerate(batches)]
    backend.synchronize()
    for at, (batch, output) in enumerate(zip(batches, outputs, strict=True)):
        assert_right(output - batch["lens"][:, None] if at % 2 == 0 else output, batch)


def test_patterns_of_eager_steps_are_looked_at(cpu: str) -> None:
    """An eager runner whose first batch comes without the host slot that later ones are read from."""

    class Perhaps(PlainInputs):
        lens: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, placement="host", default=None)

    def step(view: Perhaps) -> torch.Tensor:
        return plain_step(view) if view.lens is None else hosted_step(view)

    runner = EagerRunner(Perhaps, step, backend=cpu)
    for batch, slots in ((random_batch(3, 1), {}), (hosted_batch(3, 2), {"lens": "aten::clone"})):
        runner(batch)
        filler: Any = runner.eager.filler
        assert (filler.hosts.slots, filler.hosts.notes) == (slots, bool(slots))


def test_batches_that_hold_more_than_data(cpu: str) -> None:
    """What is overwritten is a copy. A lock cannot be copied, and a module's weights are not the batch's."""
    model = torch.nn.Linear(2, 2)
    weights = model.weight.detach().clone()
    data: dict[str, Any] = random_batch(3, 1)
    data["weights"], data["listed"] = data["weights"].numpy(), data["places"].tolist()
    before = copy.deepcopy(data)

    class Listed(PlainInputs):
        listed: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        called: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda given: given.places)

    class Own(Source):
        def read(self, batch: Any, side: Any) -> Any:
            del side
            return batch.places

    class Hidden(Listed):
        hidden: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=Own())

    batch = types.SimpleNamespace(**data, lock=threading.Lock(), owner=types.SimpleNamespace(model=model))
    runner = runner_of(plain_step, cpu, Listed, buckets=[4])
    assert found_by("races", runner, [batch]) == []
    assert torch.equal(model.weight, weights)
    for name, value in before.items():
        assert np.array_equal(vars(batch)[name], value), name
    report = report_of("races", runner_of(plain_step, cpu, Hidden, buckets=[4]), [batch])
    assert report.notes[0].startswith("races were left out: slot 'hidden': its source is a Own")


def test_sound_runner(backend: "Backend") -> None:
    """On every device: host slots that are copied from."""
    runner = runner_of(hosted_step, backend, Hosted, buckets=[4, 8])
    assert "lens" in runner.graphs.filler.hosts.slots
    batches = [{**random_batch(rows, rows, backend.device), "lens": torch.arange(rows)} for rows in ROWS]
    assert found_by("races", runner, batches) == []
