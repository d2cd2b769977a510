"""`slotgraph bench`: right before it is timed, and its figures as tables and as JSON."""

import itertools
import json
import pathlib
import re
from typing import Any

import attrs
import pytest
import torch
import typer.testing

from slotgraph.backends import Backend, choose
from slotgraph.dataflow.errors import WrongBytesError
from slotgraph.runners.commands import bench
from slotgraph.runners.commands.app import app
from slotgraph.runners.commands.bench import check_bytes, contestants, declare_decode, draw
from slotgraph.runners.commands.shared import screen

STEPS = {"per_slot", "regrouped", "foreach", "in_graph", "fused", "slot_by_slot", "bare"}


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, ["bench", *arguments])


def test_batches_differ_in_addresses_and_values() -> None:
    """No step finds the sources of the one before, nor their values."""
    drawn = [vars(draw(declare_decode(12), choose("cpu"), 200, number)) for number in range(3)]
    for one, other in itertools.pairwise(drawn):
        for name in one.keys() - {"rows", "is_greedy"}:
            assert one[name] is not other[name]
            assert not torch.equal(one[name], other[name])


def test_every_contestant_leaves_the_oracles_bytes(backend: Backend) -> None:
    """Over growing and shrinking batches, tails and outputs included; but a bare replay fills nothing."""
    inputs = declare_decode(12)
    found = contestants(inputs, backend, 48)
    batches = [(rows, draw(inputs, backend, rows)) for rows in (37, 48, 1, 37)]
    check_bytes("twelve", inputs, backend, found, batches)
    steps = {"per_slot", "regrouped", *backend.capabilities.lowerings, "bare"}
    assert set(found) == steps
    bare = found["bare"]
    before = {name: slot.clone() for name, slot in bare.slots.items()}
    bare.call(draw(inputs, backend, 3))
    assert all(torch.equal(slot, before[name]) for name, slot in bare.slots.items())


@pytest.mark.parametrize("changed", ["slots", "outputs"])
def test_wrong_bytes_end_the_benchmark(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed that leaves other slots or returns other outputs than the oracle: the command fails."""

    def stale(*given: Any) -> Any:
        found = contestants(*given)
        right = found["per_slot"]

        def call(batch: Any) -> Any:
            returned = right.call(batch)
            right.slots["seq_lens"][batch.rows :] += int(changed == "slots")
            return returned + int(changed == "outputs")

        return {**found, "per_slot": attrs.evolve(right, call=call)}

    inputs, cpu = declare_decode(4), choose("cpu")
    what = {"outputs": "it returned other outputs", "slots": "slot 'seq_lens', row 7 (its tail)"}[changed]
    with pytest.raises(WrongBytesError, match=re.escape(f"device by 'per_slot': {what}")):
        check_bytes("device", inputs, cpu, stale(inputs, cpu, 8), [(7, draw(inputs, cpu, 7))])
    monkeypatch.setattr(bench, "contestants", stale)
    monkeypatch.setattr(bench, "measure", pytest.fail)
    result = run("--quick", "--slots", "4", "--backend", "cpu")
    assert result.exit_code == 1
    assert "WrongBytesError: 4 slots by 'per_slot': " in result.stderr


def row(**changes: Any) -> dict[str, Any]:
    """A row that was not measured."""
    plain = {"lowering": "in_graph", "slots": 4, "live": 7, "padded": 8}
    return {**plain, "host_us": 10.04, "gpu_us": None, **changes}


def test_device_figures_have_a_table_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Device time is shown where it was measured; ratios are to ours."""
    bench.show_rows([row(gpu_us=5.25), row(lowering="per_slot", host_us=50.2)], "in_graph", screen())
    out = capsys.readouterr().out
    assert "device microseconds of a whole step" in out
    assert "5.0 x" in out
    assert "5.2" in out


@pytest.mark.slow
def test_bench_end_to_end(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and JSON of one quick run; in a narrow terminal nothing is cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "figures.json"
    result = run("--quick", "--slots", "4", "--slots", "12", "--backend", "cpu", "--json", str(file))
    assert result.exit_code == 0, result.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    found = {(one["lowering"], one["slots"], one["live"], one["padded"]) for one in data["rows"]}
    assert found == {(name, slots, *size) for name, slots, size in itertools.product(STEPS, (4, 12), bench.SIZES)}
    times = {"host_us", "host_p10_us", "host_p90_us", "gpu_us", "gpu_p10_us", "gpu_p90_us"}
    for one in data["rows"]:
        assert times <= one.keys()
        assert 0 < one["host_p10_us"] <= one["host_us"] <= one["host_p90_us"]
        assert one["gpu_us"] is None
    conditions = data["conditions"]
    told = {name: conditions[name] for name in ("backend", "ours", "quick", "torch")}
    assert told == {"backend": "cpu", "ours": "foreach", "quick": True, "torch": torch.__version__}
    for part in ("200/256", "4096/4096", "whole step", "ours: foreach"):
        assert part in result.stdout
    assert "…" not in result.stdout
    assert result.stderr == ""


WRONG = [
    (("--slots", "1"), "greater than or equal to 2"),
    (("--slots", "x"), "valid integer"),
    (("--json", "."), "Is a directory"),
    (("--json", "no/such/folder/figures.json"), "No such file or directory"),
]


def test_wrong_options_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured whose figures could not be shown."""
    monkeypatch.setattr(bench, "measure", pytest.fail)
    for arguments, message in WRONG:
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
