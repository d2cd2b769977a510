"""`slotgraph bench`: right before it is timed, and its figures as tables and as JSON."""

import itertools
import json
import pathlib
import re
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import typer.testing

from slotgraph.backends import Backend, choose
from slotgraph.dataflow.capabilities import resolve_dtype
from slotgraph.dataflow.errors import WrongBytesError
from slotgraph.runners.commands import bench
from slotgraph.runners.commands.app import app
from slotgraph.runners.commands.habits import habits
from slotgraph.runners.commands.screen import screen
from slotgraph.runners.commands.workload import (
    BARE,
    SIZES,
    Batch,
    Case,
    Contestant,
    by_hand,
    by_lowering,
    cases,
    contestants,
    declare_decode,
    verify,
)

BY_HAND = {"per_slot", "regrouped"}
FILLS = {*BY_HAND, "foreach", "in_graph", "fused"}
STEPS = {*FILLS, "slot_by_slot", "bare"}


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, ["bench", *arguments])


def small(slots: int, backend: Backend) -> list[Case]:
    """Cases of few rows, and those of host data."""
    return [case for case in cases(slots, backend) if case.padded < 4096]


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


def test_batches_differ_in_addresses_and_values() -> None:
    """No step finds the sources of the one before, nor their values; they are what the case is called."""
    kinds = {"device": [torch.Tensor] * 11, "numpy": [np.ndarray] * 11, "lists": [list] * 3 + [np.ndarray] * 8}
    for case in cases(12, choose("cpu")):
        sources = [{name: value for name, value in vars(one).items() if name != "rows"} for one in case.batches]
        assert all([type(value) for value in one.values()] == kinds[case.name] for one in sources)
        for one, other in itertools.pairwise(sources):
            for name, value in one.items():
                assert value is not other[name]
                assert name == "is_greedy" or not np.array_equal(np.asarray(value), np.asarray(other[name]))


@pytest.mark.parametrize("slots", [2, 12])
def test_every_contestant_leaves_the_oracles_bytes(slots: int, backend: Backend) -> None:
    """Over growing and shrinking batches, tails and outputs included, by fills and by whole steps."""
    lowerings = backend.capabilities.lowerings
    for case in small(slots, backend):
        found = contestants(case)
        verify(case, found)
        assert [one.name for one in found] == ["per_slot", "regrouped", *lowerings, BARE]
        assert {one.name for one in found if one.fill} == {*BY_HAND, *lowerings} - {"slot_by_slot"}


def test_every_habit_leaves_the_oracles_bytes(backend: Backend) -> None:
    """By each lowering; the base is first, and has no peculiarity."""
    found = habits(backend)
    assert [found[0].name, len({case.name for case in found})] == ["base", len(found)]
    for case in found:
        verify(case, [by_lowering(case, one) for one in backend.capabilities.lowerings], ("step",))


@pytest.mark.parametrize("changed", ["fill", "step", "outputs"])
def test_a_wrong_fill_or_step_is_not_timed(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contestant with one stale tail, or wrong outputs, is caught before it is measured, and the command fails."""

    def stale(case: Case) -> list[Contestant]:
        right = by_hand(case, "per_slot")
        assert right.fill is not None
        fill, step = right.fill, right.step

        def wrong_fill(batch: Batch) -> Any:
            view = fill(batch)
            view.seq_lens[batch.rows :] += int(changed == "fill")
            return view

        def wrong_step(batch: Batch) -> Any:
            outputs = step(batch)
            right.slots["seq_lens"][batch.rows :] += int(changed == "step")
            return outputs + int(changed == "outputs")

        return [attrs.evolve(right, fill=wrong_fill, step=wrong_step)]

    case = list(cases(4, choose("cpu")))[1]
    what = {"outputs": "step of per_slot: it returned other outputs"}.get(
        changed, f"{changed} of per_slot: slot 'seq_lens', row 7 (its tail)"
    )
    with pytest.raises(WrongBytesError, match=re.escape(f"device, 7/8 rows, the {what}")):
        verify(case, stale(case))
    monkeypatch.setattr(bench, "contestants", stale)
    monkeypatch.setattr(bench, "measure", pytest.fail)
    result = run("--quick", "--slots", "4", "--backend", "cpu")
    assert result.exit_code == 1
    assert "WrongBytesError: device, " in result.stderr


def test_a_bare_replay_fills_nothing(backend: Backend) -> None:
    """Its graph is the step alone, whatever the batch brings."""
    case = small(4, backend)[1]
    found = {one.name: one for one in contestants(case)}
    found["foreach"].step(case.batches[0])
    found[BARE].step(case.batches[1])
    backend.synchronize()
    assert torch.equal(found["foreach"].slots["input_ids"][:7], case.batches[0].input_ids)


def row(**changes: Any) -> dict[str, Any]:
    """A row that was not measured."""
    plain = {"what": "step", "lowering": "in_graph", "sources": "device", "slots": 4, "live": 7, "padded": 8}
    return {**plain, "host_us": 10.04, "gpu_us": None, **changes}


def test_device_figures_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Device time is shown where it was measured; ratios are to ours; detours are named."""
    bench.show_rows([row(gpu_us=5.25), row(lowering="per_slot", host_us=50.2)], "in_graph", screen())
    out = capsys.readouterr().out
    assert "device microseconds, whole step" in out
    assert "microseconds, fill" not in out
    assert "5.0 x" in out
    assert "5.2" in out
    habit = {"habit": "a list", "lowering": "fused", "detours": 3, "host_us": 9.0, "gpu_us": 4.0}
    bench.show_habits([{**habit, "ratio": 1.25, "gpu_ratio": 2.0}], screen())
    out = capsys.readouterr().out
    assert "9.0 (1.25)" in out
    assert "4.0 (2.00)" in out
    assert "the runner's: a list by fused: 3" in out


@pytest.mark.slow
def test_bench_end_to_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and JSON of one quick run; in a narrow terminal nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "figures.json"
    result = run("--quick", "--slots", "4, 12", "--backend", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    found = {(one["what"], one["lowering"], one["slots"], one["live"], one["padded"]) for one in data["rows"]}
    assert found == {
        (what, name, slots, *size)
        for what, names in (("fill", FILLS), ("step", STEPS))
        for name, slots, size in itertools.product(names, (4, 12), SIZES)
    }
    assert {one["sources"] for one in data["rows"]} == {"device", "numpy", "lists"}
    times = {"host_us", "host_p10_us", "host_p90_us", "gpu_us", "gpu_p10_us", "gpu_p90_us"}
    for one in data["rows"] + data["habits"]:
        assert times <= one.keys()
        assert 0 < one["host_p10_us"] <= one["host_us"] <= one["host_p90_us"]
        assert one["gpu_us"] is None
    names = {case.name for case in habits(choose("cpu"))}
    assert {one["habit"] for one in data["habits"]} == names
    assert {one["ratio"] for one in data["habits"] if one["habit"] == "base"} == {1.0}
    assert {one["detours"] for one in data["habits"]} == {0}
    conditions = data["conditions"]
    told = {name: conditions[name] for name in ("backend", "ours", "quick", "torch")}
    assert told == {"backend": "cpu", "ours": "foreach", "quick": True, "torch": torch.__version__}
    for part in ("200/256", "4096/4096", "whole step", "ours: foreach", *names):
        assert part in result.stdout
    assert "…" not in result.stdout
    assert result.stderr == ""


WRONG = [
    (("--slots", "1"), "expected numbers from 2 to 1000"),
    (("--slots", "4,x"), "got '4,x'"),
    (("--slots", ""), "as in 4,12,48"),
    (("--json", "."), "no file in a folder that exists"),
    (("--json", "no/such/folder/figures.json"), "no file in a folder that exists"),
    (("--backend", "nothing"), "there is no backend 'nothing'"),
]


def test_wrong_options_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured whose figures could not be shown."""
    monkeypatch.setattr(bench, "measure", pytest.fail)
    for arguments, message in WRONG:
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
