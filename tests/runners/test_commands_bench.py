"""`slotgraph bench`: right before it is timed, and its figures as table, JSON and drawing."""

import itertools
import json
import pathlib
from typing import Any

import attrs
import pytest
import torch
import typer.testing

from slotgraph.backends import Backend, choose
from slotgraph.dataflow.roles import resolve_dtype
from slotgraph.runners.commands import bench, lowerings, plot, timing
from slotgraph.runners.commands.app import app
from slotgraph.runners.commands.figures import Figure, as_data, as_tables, grouped
from slotgraph.runners.commands.lowerings import LOWERINGS, Lowering, WrongBytesError, verify
from slotgraph.runners.commands.screen import screen
from slotgraph.runners.commands.timing import Run, Spread, device_times, measure
from slotgraph.runners.commands.workload import BUCKETS, CASES, Batch, declare_decode, make_batches, walk_sizes

NAMES = ["per_slot", "regrouped", "foreach", "fill_alone"]


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, ["bench", *arguments])


def batch_of(slots: int, rows: int, backend: Backend) -> Batch:
    """A batch for a declaration of so many slots."""
    return make_batches(declare_decode(slots), [rows], backend)[0]


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
    assert all(48 < size <= 256 for size in sizes)
    assert all(1 <= abs(after - before) <= 4 for before, after in itertools.pairwise(sizes))
    assert sizes == walk_sizes(256, 48)
    assert set(walk_sizes(8, 1, steps=500)) <= set(range(2, 9))


@pytest.mark.parametrize("slots", [2, 12])
@pytest.mark.parametrize("kind", LOWERINGS)
def test_every_lowering_leaves_the_oracles_bytes(kind: type[Any], slots: int, backend: Backend) -> None:
    """Over growing and shrinking batches in every bucket, tails included."""
    inputs = declare_decode(slots)
    batches = [batch_of(slots, rows, backend) for rows in (256, 1, 200, 37, 7, 201, 8, 2, 48, 49)]
    verify(kind(inputs, backend), inputs, backend, batches)


def test_a_wrong_fill_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that leaves one stale tail is caught before it is measured, by name, and the command fails."""

    class Stale(lowerings.HandWritten):
        name = "stale"

        def __call__(self, batch: Batch) -> Any:
            view = lowerings.PerSlot.__call__(self, batch)  # type: ignore[arg-type]
            view.seq_lens[batch.rows :] = 9
            return view

    backend = choose("cpu")
    inputs = declare_decode(4)
    with pytest.raises(WrongBytesError, match="stale left other bytes in slot 'seq_lens' than the oracle, 7/8 rows"):
        verify(Stale(inputs, backend), inputs, backend, [batch_of(4, 7, backend)])
    monkeypatch.setattr(bench, "LOWERINGS", (Stale,))
    result = run("--quick", "--slots", "4")
    assert result.exit_code == 1
    assert "stale left other bytes in slot 'seq_lens'" in result.stderr


def test_runs_take_turns() -> None:
    """Rounds go over all runs before any run's next one, and nothing but rounds counts."""
    order: list[str] = []

    class Noted(Lowering):
        name = "noted"

        def __init__(self, label: str) -> None:
            self.label = label

        def __call__(self, batch: Batch) -> Any:
            del batch
            order.append(self.label)

    backend = choose("cpu")
    batch = batch_of(2, 1, backend)
    runs = [Run(Noted("a"), [batch]), Run(Noted("b"), [batch, batch])]
    ticks: list[int] = []
    spreads = measure(runs, 3, backend, lambda: ticks.append(1))
    assert "".join(order) == "aabbb" * 4
    assert len(ticks) == 3
    assert [len(run.samples) for run in runs] == [3, 6]
    assert all(spread.p10 <= spread.median <= spread.p90 for spread in spreads)


def test_spread_of_samples() -> None:
    """Median and percentiles; a single sample is all of them."""
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([float(n) for n in range(1, 12)]) == Spread(6.0, 2.0, 10.0)


def test_device_time_is_measured_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Null on a CPU; elsewhere by the backend's events, over the run's steps."""
    backend = choose("cpu")
    run_ = Run(lowerings.PerSlot(declare_decode(2), backend), [batch_of(2, 1, backend)] * 2)
    assert device_times([run_], 2, backend) == [None]
    monkeypatch.setattr(timing, "_BUSY_SIZE", 8)
    monkeypatch.setattr(type(backend), "device", torch.device("meta"))
    found = device_times([run_], 2, backend)[0]
    assert found is not None
    assert found > 0


def figure(**changes: Any) -> Figure:
    """A figure that was not measured."""
    spread = Spread(10.04, 9.0, 12.0)
    plain = Figure(slots=4, lowest=7, live=7, padded=8, lowering="foreach", host=spread, gpu_us=None)
    return attrs.evolve(plain, **changes)


def test_device_figures_have_a_table_of_their_own() -> None:
    """Device time is shown where it was measured, and with it the ratio to hand-written fills."""
    figures = [figure(gpu_us=3.21), figure(lowering="per_slot", host=Spread(50.2, 40.0, 60.0), gpu_us=None)]
    console = screen()
    with console.capture() as captured:
        console.print(as_tables(figures, spread=False))
    assert "device microseconds" in captured.get()
    assert "5.0 x" in captured.get()
    assert "3.2" in captured.get()


def test_figures_as_data() -> None:
    """Steady rows have the keys that readers rely on; changing ones say their range."""
    data = as_data([figure(), figure(lowest=3)], {"backend": "cpu"})
    assert {"slots", "live", "padded", "lowering", "host_us", "gpu_us"} <= data["rows"][0].keys()
    assert (data["changing"][0]["lowest"], data["changing"][0]["highest"]) == (3, 7)
    assert list(grouped([figure(), figure(lowering="x")])) == [(4, 7, 7, 8)]


def test_bench_end_to_end(tmp_path: pathlib.Path) -> None:
    """Table, JSON and drawing of one quick run."""
    json_file, drawing = tmp_path / "figures.json", tmp_path / "figures.png"
    result = run("--quick", "--slots", "4, 12", "--backend", "cpu", "--json", str(json_file), "--plot", str(drawing))
    assert result.exit_code == 0, result.stderr
    data = json.loads(json_file.read_text(encoding="utf-8"))
    measured = [(row["slots"], row["live"], row["padded"], row["lowering"]) for row in data["rows"]]
    assert sorted(measured) == sorted((n, *case, name) for n in (4, 12) for case in CASES for name in NAMES)
    assert all(row["host_us"] > 0 and row["gpu_us"] is None for row in data["rows"])
    assert {row["lowering"] for row in data["changing"]} == set(NAMES)
    assert data["conditions"]["backend"] == "cpu"
    assert drawing.read_bytes().startswith(b"\x89PNG")
    for part in ("/ foreach", "median (p10 to p90)", "200/256", "the live size changes"):
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


def test_buckets_are_those_of_the_cases() -> None:
    """Each case has the bucket that it is measured in."""
    assert BUCKETS == (1, 8, 48, 256)


def test_a_narrow_terminal_shows_medians_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eighty columns nothing is cut off; percentiles make way."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run("--quick", "--slots", "48", "--backend", "cpu")
    assert result.exit_code == 0
    assert "p90" not in result.stdout
    assert "…" not in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
