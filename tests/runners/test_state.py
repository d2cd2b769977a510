"""Tables over fixed sizes that steps keep: state, which functions name, steps write, and captures leave as it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, EagerRunner, InputBuffers, Inputs, computed, copied, staged
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER, Capabilities
from slotgraph.errors import BatchError, ConfigError
from slotgraph.pool import InputPool
from slotgraph.reports import RecordedFile, explain_declaration, replay_file
from tests.packing import backend_of
from tests.runners.models import bytes_of, decoder, ready

POOL: Final = Axis("POOL", fixed=True)
SLOTS: Final = 8
MODULUS: Final = 97


class Pooled(Inputs):
    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = staged(POOL, dtype=torch.int64, starts=5)
    last_ids: torch.Tensor = staged(POOL, dtype=torch.int64)
    positions: torch.Tensor = computed(lambda lengths, rows: lengths[rows], shape=BATCH, dtype=torch.int64)
    ids: torch.Tensor = computed(lambda last_ids, rows: last_ids[rows], shape=BATCH, dtype=torch.int64)


def step(view: Any) -> torch.Tensor:
    """Decode one token of each request, and note in the tables what comes next. Row 0 is nobody's."""
    sampled: torch.Tensor = (view.ids * 3 + view.positions + view.rows) % MODULUS
    view.last_ids[view.rows] = sampled
    view.lengths[view.rows] = view.positions + 1
    return sampled


class Plain:
    """The same in plain Python."""

    def __init__(self) -> None:
        self.lengths, self.last_ids = [5] * SLOTS, [0] * SLOTS

    def __call__(self, rows: Sequence[int]) -> list[int]:
        found = [(self.last_ids[row] * 3 + self.lengths[row] + row) % MODULUS for row in rows]
        for row, one in zip(rows, found, strict=True):
            self.last_ids[row] = one
            self.lengths[row] += 1
        return found


STEPS: Final = ([1, 2, 3], [2, 5], [7], [1, 2, 3, 4, 5, 6, 7], [3, 1], [5])
OPTIONS: Final[Any] = {"sizes": {POOL: SLOTS}, "output_rows": BATCH}


def batch_of(rows: Sequence[int], backend: Backend) -> dict[str, torch.Tensor]:
    """Requests by their rows in the pool."""
    return {"rows": torch.tensor(rows, device=backend.device)}


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize("lazy", [False, True])
def test_tables_last_from_step_to_step(backend: Backend, lowering: str, *, lazy: bool) -> None:
    """Whatever the bucket; also in steps that no graph takes, whose other memory grows."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no {lowering}")
    made = DecodeRunner(Pooled, step, buckets=[1, 2, 4], backend=backend, lowering=lowering, lazy=lazy, **OPTIONS)
    runner, plain = ready(made), Plain()
    for rows in STEPS * 2:
        assert runner(batch_of(rows, backend)).tolist() == plain(rows)
    view = runner.fill(batch_of([1], backend))
    assert view.lengths.tolist()[1:] == plain.lengths[1:]
    assert view.last_ids.tolist()[1:] == plain.last_ids[1:]
    assert runner.stats()["eager"]["too_large"]["steps"] == 2


def test_tables_are_adopted_with_their_contents(backend: Backend) -> None:
    """Two runners share a table that the engine owns; a capture leaves it as it was, an eager step may grow."""
    lengths = torch.arange(SLOTS, device=backend.device)
    runners: list[Any] = [
        decoder(Pooled, step, buckets=buckets, backend=backend, bind={"lengths": lengths}, **OPTIONS)
        for buckets in ([2], [4])
    ]
    assert lengths.tolist() == [*range(SLOTS)]
    plain = [Plain(), Plain()]
    plain[0].lengths = plain[1].lengths = [*range(SLOTS)]
    for rows in STEPS:
        for runner, other in zip(runners, plain, strict=True):
            assert runner(batch_of(rows, backend)).tolist() == other(rows)
    assert lengths.tolist()[1:] == plain[0].lengths[1:]


@pytest.mark.parametrize("given", [False, True])
def test_captures_and_checks_leave_tables_as_they_were(backend: Backend, *, given: bool) -> None:
    """By the state that is found, or besides the one that the caller names; nothing is found where nothing is wrong."""
    cache = torch.zeros(SLOTS, device=backend.device)

    def writing(view: Any) -> torch.Tensor:
        cache[view.rows] += 1
        return step(view)

    options = {**OPTIONS, "state": [cache]} if given else OPTIONS
    made = DecodeRunner(Pooled, writing, buckets=[1, 2, 4], backend=backend, warmups=3, **options)
    buffers = made.graphs.buffers
    before = {name: bytes_of(buffers[name].tensor) for name in ("lengths", "last_ids")}
    ready(made)
    assert {name: bytes_of(buffers[name].tensor) for name in before} == before
    plain = Plain()
    with slotgraph.debugged(made, ["parity", "poison"]):  # which run each step several times
        for rows in STEPS[:3]:
            assert made(batch_of(rows, backend)).tolist() == plain(rows)
    before = {name: bytes_of(buffers[name].tensor) for name in before}
    report = slotgraph.check(made, progress=False)
    assert report.ok, report
    assert {name: bytes_of(buffers[name].tensor) for name in before} == before


def test_parity_names_a_table_that_a_graph_leaves_otherwise() -> None:
    """A host value that the graph froze goes into the table, and into nothing else."""
    added = [1]

    def counting(view: Any) -> torch.Tensor:
        view.lengths[view.rows] += added[0]
        found: torch.Tensor = view.rows * 2
        return found

    runner: Any = decoder(Pooled, counting, backend="cpu-capture", **OPTIONS)
    added[0] = 2
    findings = slotgraph.check(runner, only="parity", progress=False).findings
    assert "in slot 'lengths'" in findings[0].message


def test_an_eager_runner_keeps_tables_when_it_grows(backend: Backend) -> None:
    """Its memory is made anew for larger batches, the tables are not."""
    runner, plain = EagerRunner(Pooled, step, sizes={POOL: SLOTS}, backend=backend), Plain()
    for rows in STEPS:
        assert runner(batch_of(rows, backend)).tolist() == plain(rows)


def test_tables_in_graphs_of_one_s_own(backend: Backend) -> None:
    """`InputBuffers` has them in its views, for each size the same, and fills write none."""
    buffers = InputBuffers(Pooled, {BATCH: 4, POOL: SLOTS}, backend=backend)
    plain, graphs = Plain(), {}
    for size in (2, 4):
        padded = {BATCH: size}
        buffers.prepare(padded)

        def captured(padded: Any = padded) -> torch.Tensor:
            buffers.fill_in_graph(padded)
            return step(buffers.view(padded))

        buffers.fill({"rows": torch.zeros(0, dtype=torch.int64, device=backend.device)}, padded)
        with backend.stream():
            graphs[size] = backend.capture(captured)
    for rows in ([1, 2], [3], [2, 5, 6, 7], [1]):
        size = 2 if len(rows) <= 2 else 4
        buffers.fill(batch_of(rows, backend), {BATCH: size})
        graphs[size].replay()
        assert graphs[size].outputs[: len(rows)].tolist() == plain(rows)


class Advancing(Inputs):  # a rule and a function on each side read tables, which no edit may name
    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    host_rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", source="rows")
    lengths: torch.Tensor = staged(POOL, dtype=torch.int64, starts=5)
    budgets: torch.Tensor = staged(POOL, dtype=torch.int64, starts=2, placement="host")
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids, lengths, rows: ids + lengths[rows])
    budget: torch.Tensor = computed(
        lambda budgets, host_rows: budgets[host_rows], shape=BATCH, dtype=torch.int64, placement="host"
    )


def growing(view: Any) -> torch.Tensor:
    """Write a table, and return numbers of slots."""
    view.lengths[view.rows] = view.lengths[view.rows] + 1
    found: torch.Tensor = view.ids + view.rows * 100
    return found


@pytest.mark.parametrize("lowering", LADDER)
def test_rules_in_steps_read_tables_as_the_last_step_left_them(lowering: str) -> None:
    """Rules name them; what the step wrote is what the next step reads."""
    backend = backend_of("cpu-capture")
    runner: Any = decoder(Advancing, growing, backend=backend, lowering=lowering, **OPTIONS)
    ids, lengths = {3: 1, 5: 2}, {3: 6, 5: 6}
    for launched in runner.steps({"rows": [3, 5], "ids": [1, 2]}, keys=[3, 5]):
        if launched.number:
            ids = {key: ids[key] + lengths[key] for key in ids}
            lengths = {key: lengths[key] + 1 for key in lengths}
        assert dict(launched.tokens()) == {key: ids[key] + key * 100 for key in launched.keys}
        if launched.number == 2:
            with pytest.raises(BatchError, match="edit names 'lengths', which is not a slot that these requests have"):
                launched.edit([3], lengths=[1])
            launched.leave([3])
            del ids[3], lengths[3]
        if launched.number == 4:
            break
    assert runner.graphs.buffers["lengths"].tensor.tolist()[5] == lengths[5]
    assert slotgraph.check(runner, progress=False).ok


def test_recorded_steps_run_again_from_their_own_tables(tmp_path: Path) -> None:
    """Each step brings the tables that it read, also those that functions on the host read."""

    def made() -> Any:
        return decoder(Advancing, lambda view: growing(view) + view.budget, backend="cpu", **OPTIONS)

    runner, file = made(), tmp_path / "steps.safetensors"
    budgets = runner.graphs.buffers["budgets"].tensor
    with slotgraph.record(runner, file, outputs=True):
        for rows in ([3, 5], [3], [1, 3, 5]):
            runner({"rows": rows, "ids": [7] * len(rows)})
            budgets.add_(3)
    assert [one.outcome for one in replay_file(RecordedFile.read(file), made()).steps] == ["equal"] * 3


def test_a_pool_shares_no_table(backend: Backend) -> None:
    """Another runner's fill would overwrite it."""
    pool = InputPool("decode", "verify")
    runners = [
        DecodeRunner(Pooled, step, buckets=[4], backend=backend, phase=pool[phase], sharing=True, **OPTIONS)
        for phase in ("decode", "verify")
    ]
    for runner in runners:
        runner.capture()
    assert pool.layout is not None
    assert "state, which steps keep" in pool.layout.why("decode", "lengths")
    plain = Plain(), Plain()
    for rows in STEPS[:3]:
        for runner, other in zip(runners, plain, strict=True):
            assert runner(batch_of(rows, backend)).tolist() == other(rows)


def test_explain_says_that_it_is_state() -> None:
    """And only of tables over fixed sizes."""

    class Both(Pooled):
        hidden: torch.Tensor = staged(TOKENS, 2, dtype=torch.float32, pad=0)

    shown = {
        slot.name: slot.row()["comes from"] for slot in explain_declaration(Both.slotgraph, Capabilities(), "cpu").slots
    }
    assert shown["lengths"] == "staged, state, kept from step to step"
    assert shown["hidden"] == "staged"
    with pytest.raises(ConfigError, match="POOL"):
        DecodeRunner(Pooled, step, buckets=[4], backend="cpu")
