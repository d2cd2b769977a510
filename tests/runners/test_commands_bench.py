"""`slotgraph bench`: right before it is timed, and its figures as table, JSON and drawing."""

import itertools
import json
import pathlib
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import typer.testing

from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import WrongBytesError
from slotgraph.dataflow.roles import CACHE_LOC, resolve_dtype
from slotgraph.runners.commands import bench, plot
from slotgraph.runners.commands.app import app
from slotgraph.runners.commands.bench_tables import show
from slotgraph.runners.commands.conditions import conditions_of
from slotgraph.runners.commands.figures import Figure, Key, Memory, Results
from slotgraph.runners.commands.lowerings import BARE, ByHand, Contestant, captured, contestants
from slotgraph.runners.commands.runner_kinds import kinds
from slotgraph.runners.commands.screen import screen
from slotgraph.runners.commands.timing import Spread
from slotgraph.runners.commands.verifying import verify
from slotgraph.runners.commands.workload import (
    BUCKETS,
    CASES,
    FLAT,
    SETS,
    SOURCES,
    WALK,
    Batch,
    Case,
    Sources,
    Workload,
    declare_decode,
    walk_sizes,
)

BY_HAND = {"per_slot", "regrouped"}
FILLS = {*BY_HAND, "foreach", "in_graph", "fused", "fill_alone"}
STEPS = {*BY_HAND, "foreach", "in_graph", "fused", "slot_by_slot", "bare"}

each_slots = pytest.mark.parametrize("slots", [2, 12])
each_sources = pytest.mark.parametrize("sources", SOURCES)


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, ["bench", *arguments])


def sources_of(batch: Batch) -> dict[str, Any]:
    """What a batch brings, by slot."""
    return {name: value for name, value in vars(batch).items() if name not in {"rows", "padded"}}


@pytest.mark.parametrize("slots", [2, 4, 12, 48])
def test_declarations_have_the_slots_asked_for(slots: int) -> None:
    """So many slots, one of them a count that the host computes; from a dozen on four dtypes among them."""
    declaration = declare_decode(slots).slotgraph
    assert len(declaration.slots) == slots
    assert declaration.order == ("num_token_non_padded",)
    assert declaration.side("num_token_non_padded") == "host"
    if slots >= 12:
        dtypes = {resolve_dtype(slot.dtype, choose("cpu").capabilities) for slot in declaration.slots.values()}
        assert dtypes == {torch.int64, torch.int32, torch.bool, torch.float32}


def test_walk_stays_in_its_bucket_and_moves() -> None:
    """Each step of the walk has another size than the one before, within one bucket, the same in each run."""
    sizes = walk_sizes(256, 48)
    assert len(sizes) == WALK
    assert all(48 < size <= 256 for size in sizes)
    assert all(1 <= abs(after - before) <= 4 for before, after in itertools.pairwise(sizes))
    assert sizes == walk_sizes(256, 48)
    assert set(walk_sizes(8, 1, steps=500)) <= set(range(2, 9))


@each_slots
@pytest.mark.parametrize("sources", ["device", "new", "numpy", "lists"])
def test_sets_differ_in_addresses_and_values(slots: int, sources: Sources) -> None:
    """No step finds the sources of the one before, nor their values: an upload could be spared."""
    batches = Workload.of(slots, choose("cpu")).sets(1, sources)
    assert len(batches) >= SETS
    for one, other in itertools.pairwise(batches[:20]):
        for name, value in sources_of(one).items():
            assert value is not getattr(other, name)
            if name != "is_greedy":
                assert not np.array_equal(np.asarray(value), np.asarray(getattr(other, name)))
    tensors = [value for batch in batches for value in sources_of(batch).values() if isinstance(value, torch.Tensor)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@pytest.mark.parametrize(
    ("sources", "kinds"),
    [
        ("same", [torch.Tensor] * 11),
        ("numpy", [np.ndarray] * 11),
        ("lists", [list] * 3 + [np.ndarray] * 8),
    ],
)
def test_sources_are_what_they_are_called(sources: Sources, kinds: list[type]) -> None:
    """One set where it is the same, and host data as arrays, or as lists of whole numbers for the first three slots."""
    batches = Workload.of(12, choose("cpu")).sets(7, sources)
    assert [type(value) for value in sources_of(batches[0]).values()] == kinds
    assert (len(batches) == 1) == (sources == "same")


@each_sources
@each_slots
def test_every_contestant_leaves_the_oracles_bytes(slots: int, sources: Sources, backend: Backend) -> None:
    """Over growing and shrinking batches in every bucket, tails and outputs included, by fills and by whole steps."""
    workload = Workload.of(slots, backend)
    found = contestants(workload)
    sizes = (256, 1, 200, 37, 7, 201, 8, 2, 48, 49, 49)
    verify(workload, found, [workload.batch(rows, sources, number % 3) for number, rows in enumerate(sizes)])
    lowerings = backend.capabilities.lowerings
    assert {one.name for one in found if one.step} == {*BY_HAND, *lowerings, BARE}
    assert {one.name for one in found if one.fill} == {*BY_HAND, *lowerings, "fill_alone"} - {"slot_by_slot"}


def test_a_bare_replay_fills_nothing(backend: Backend) -> None:
    """Its graph is the step alone: slots stay as they are, whatever the batch brings."""
    workload = Workload.of(4, backend)
    found = {one.name: one for one in contestants(workload)}
    bare, foreach = found[BARE], found["foreach"]
    assert bare.step is not None
    assert foreach.step is not None
    first, second = workload.batch(7), workload.batch(7, number=1)
    foreach.step(first)
    bare.step(second)
    backend.synchronize()
    assert torch.equal(bare.buffers["input_ids"].tensor[:7], first.input_ids)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fill": True}, "stale's fill left other bytes in slot 'seq_lens' than the oracle, 7/8 rows"),
        ({"step": True}, "stale's step left other bytes in slot 'seq_lens' than the oracle, 7/8 rows"),
        ({"outputs": True}, "stale returned other outputs than the oracle's slots give, 7/8 rows"),
    ],
)
def test_a_wrong_fill_or_step_is_not_timed(
    changed: dict[str, bool], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A contestant with one stale tail, or wrong outputs, is caught before it is measured, and the command fails."""

    def with_stale(workload: Workload) -> list[Contestant]:
        by_hand = ByHand(workload)
        right = by_hand.contestant("stale", by_hand.per_slot)
        assert right.fill is not None
        assert right.step is not None
        fill, step = right.fill, right.step

        def stale_fill(batch: Batch) -> Any:
            view = fill(batch)
            view.seq_lens[batch.rows :] += int("fill" in changed)
            return view

        def stale_step(batch: Batch) -> Any:
            outputs = step(batch)
            right.buffers["seq_lens"].tensor[batch.rows :] += int("step" in changed)
            return outputs + int("outputs" in changed)

        return [attrs.evolve(right, fill=stale_fill, step=stale_step)]

    workload = Workload.of(4, choose("cpu"))
    with pytest.raises(WrongBytesError, match=message):
        verify(workload, with_stale(workload), [workload.batch(7)])
    monkeypatch.setattr(bench, "contestants", with_stale)
    result = run("--quick", "--slots", "4", "--backend", "cpu")
    assert result.exit_code == 1
    assert message.partition(" than")[0] in result.stderr


def figure(**changes: Any) -> Figure:
    """A figure that was not measured."""
    spread = Spread(10.04, 9.0, 12.0)
    plain = Figure(
        what="step", lowering="in_graph", sources="device", slots=4, lowest=7, live=7, padded=8, host=spread, gpu=None
    )
    return attrs.evolve(plain, **changes)


def shown(results: Results) -> str:
    """The tables as text."""
    console = screen()
    with console.capture() as output:
        show(results, console)
    return output.get()


def test_device_figures_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device time is shown where it was measured, with what it is beyond a bare replay; ratios to ours on the host."""
    gpu = Spread(5.25, 5.0, 5.4)
    figures = [
        figure(gpu=gpu),
        figure(lowering="per_slot", host=Spread(50.2, 40.0, 60.0)),
        figure(lowering="bare", gpu=Spread(2.0, 2.0, 2.0)),
    ]
    for columns, cell in (("200", "5.2 ±0.2"), ("60", "5.2")):
        monkeypatch.setenv("COLUMNS", columns)
        text = shown(Results(figures, [], "in_graph"))
        assert "device microseconds, whole step" in text
        assert "device microseconds, fill" not in text
        assert "5.0 x" in text
        assert cell in text
        assert "+3.2" in text


def test_figures_as_data() -> None:
    """Steady rows have the keys that readers rely on, changing ones their range, and lists what an integer costs."""
    numpy, lists = figure(sources="numpy"), figure(sources="lists", host=Spread(11.04, 9.0, 12.0))
    results = Results([figure(gpu=Spread(3.0, 2.0, 4.0)), figure(lowest=3), numpy, lists], [], "in_graph")
    data = results.as_data({"backend": "cpu"})
    row = data["rows"][0]
    assert {"what", "lowering", "sources", "slots", "live", "padded", "host_us", "gpu_us"} <= row.keys()
    assert (row["host_p10_us"], row["host_p90_us"], row["gpu_p10_us"], row["gpu_p90_us"]) == (9.0, 12.0, 2.0, 4.0)
    assert (data["changing"][0]["lowest"], data["changing"][0]["highest"]) == (3, 7)
    assert data["lists"] == [{"slots": 4, "live": 7, "lowering": "in_graph", "integers": 21, "ns_each": 47.62}]
    assert data["conditions"] == {"ours": "in_graph", "backend": "cpu"}
    cases = Results([figure(), figure(lowering="x")], [], "x").grouped("step")
    assert list(cases) == [Key(4, 7, 7, 8, "device")]
    assert {"in_graph", "x"} == cases[Key(4, 7, 7, 8, "device")].keys()


def test_memory_is_accounted_for(backend: Backend) -> None:
    """Inputs are what the declaration adds up to, but for alignment; what feeds the kernel stands apart."""
    workload = Workload.of(12, backend)
    declared = 256 * (3 * 8 + CACHE_LOC.on(backend.capabilities).itemsize + 6 * 4 + 1) + 4
    for lowering in backend.capabilities.lowerings:
        memory = Memory.of(workload, captured(workload, lowering))
        assert memory.declared == declared
        assert declared <= memory.inputs < declared + 512
        fused = lowering in {"in_graph", "fused"}
        assert (memory.table > 0, memory.packet > 0) == (fused, fused)


def test_conditions_name_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run was made with; a device's name and driver where there is one."""
    backend = choose("cpu")
    found = conditions_of(backend)
    assert found["torch"] == torch.__version__
    assert (found["device_name"], found["driver"]) == (None, None)
    monkeypatch.setattr(type(backend), "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13020, raising=False)
    assert conditions_of(backend).items() >= {"device_name": "a device", "driver": "13.2"}.items()
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion")
    assert conditions_of(backend)["driver"] is None


def test_bench_end_to_end(tmp_path: pathlib.Path) -> None:
    """Table, JSON and drawing of one quick run."""
    json_file, drawing = tmp_path / "figures.json", tmp_path / "figures.png"
    result = run("--quick", "--slots", "4, 12", "--backend", "cpu", "--json", str(json_file), "--plot", str(drawing))
    assert result.exit_code == 0, result.stderr
    data = json.loads(json_file.read_text(encoding="utf-8"))
    found = {(row["what"], row["lowering"], row["slots"], row["live"], row["padded"]) for row in data["rows"]}
    assert found >= {("fill", name, slots, *case) for name in FILLS for slots in (4, 12) for case in CASES}
    assert found >= {("step", name, slots, *case) for name in STEPS for slots in (4, 12) for case in CASES}
    assert found >= {("step", name, 12, rows, rows) for name in STEPS for rows in FLAT}
    assert {row["sources"] for row in data["rows"] if row["slots"] == 12} == set(SOURCES)
    assert {row["sources"] for row in data["rows"] if row["slots"] == 4} == {"device", "numpy", "lists"}
    assert all(row["host_us"] > 0 and row["gpu_us"] is None for row in data["rows"])
    assert {row["lowering"] for row in data["changing"]} == FILLS | STEPS
    assert {row["lowering"] for row in data["lists"]} == STEPS - {"bare"}
    assert [(row["slots"], row["capacity"]) for row in data["memory"][::2]] == [(4, 256), (12, 256), (12, 4096)]
    assert [row["phase"] for row in data["runners"]] == [kind.phase for kind in kinds()]
    assert all(row["per_slot_host_us"] > 0 and row["ours_host_us"] > 0 for row in data["runners"])
    assert (data["conditions"]["backend"], data["conditions"]["ours"]) == ("cpu", "foreach")
    assert drawing.read_bytes().startswith(b"\x89PNG")
    parts = (
        "/ ours",
        "median (p10-p90)",
        "200/256",
        "4096/4096",
        "whole step",
        "ns each",
        "ours: foreach",
        "1800/2048",
    )
    for part in parts:
        assert part in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slots", "1"), "expected numbers from 2 to 1000"),
        (("--slots", "4,x"), "got '4,x'"),
        (("--slots", ""), "as in 4,12,48"),
        (("--plot", "figures.xyz"), "ends in .pdf, .png, .svg"),
        (("--plot", "no/such/folder/figures.png"), "no file in a folder that exists"),
        (("--json", "."), "no file in a folder that exists"),
        (("--backend", "nothing"), "there is no backend 'nothing'"),
    ],
)
def test_wrong_options_are_refused_before_measuring(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured whose figures could not be shown."""
    monkeypatch.setattr(bench, "measured", pytest.fail)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that installs it is named, before minutes of measuring."""
    monkeypatch.setattr(bench, "can_plot", lambda: False)
    monkeypatch.setattr(bench, "measured", pytest.fail)
    result = run("--plot", "figures.png")
    assert result.exit_code == 1
    assert result.stderr == "--plot needs matplotlib: pip install 'slotgraph[plot]'\n"
    assert plot.can_plot()


def test_device_times_are_drawn_too(tmp_path: pathlib.Path) -> None:
    """A row of panels more, where they were measured; contestants without one leave a gap."""
    gpu = Spread(5.2, 5.0, 5.4)
    figures = [figure(gpu=gpu), figure(lowering="per_slot"), figure(lowering="bare", lowest=3, gpu=gpu)]
    plot.draw(Results(figures, [], "in_graph"), tmp_path / "figures.svg")
    drawn = (tmp_path / "figures.svg").read_text(encoding="utf-8")
    assert "device us, whole step" in drawn
    assert "fill and view" not in drawn


def test_buckets_are_those_of_the_cases() -> None:
    """Each case has the bucket that it is measured in, and a walk stays in the largest."""
    assert BUCKETS == (1, 8, 48, 256)
    walk = Case.walk(Workload.of(2, choose("cpu")), WALK)
    assert (walk.slots, walk.padded) == (2, 256)
    assert {batch.padded for batch in walk.batches} == {256}
    assert walk.lowest == min(batch.rows for batch in walk.batches)


def test_a_narrow_terminal_shows_medians_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eighty columns nothing is cut off; percentiles make way."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run("--quick", "--slots", "48", "--backend", "cpu")
    assert result.exit_code == 0
    assert "p90" not in result.stdout
    assert "…" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
