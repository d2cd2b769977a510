"""`slotgraph check` from end to end: targets, batches, tables, JSON, and exit statuses."""

import json
import pathlib
import sys

import pytest
import typer.testing

from slotgraph.runners.check.checks import CHECKS
from slotgraph_cli import app

ENGINE = """
import torch
from slotgraph import BATCH, DecodeRunner, Inputs, copied

class DecodeInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)

def make(step, **options):
    return DecodeRunner(DecodeInputs, step, buckets=[2, 4], backend="cpu-capture", progress=False, **options)

def make_sound():
    return make(lambda view: view.ids * view.weights)

faulty, captured = make(lambda view: view.ids * view.weights.softmax(0)), make_sound()
captured.capture()

def make_trouble():
    return 1 // 0

def make_batch(rows, generator):
    return {"ids": torch.arange(rows) + 1, "weights": torch.rand(rows, generator=generator)}

TWO = [make_batch(1, torch.Generator()), make_batch(3, torch.Generator())]
number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current directory with an engine of a user's; what it brings to sys is taken back."""
    (tmp_path / "checked_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "checked_engine", raising=False)


def run(arguments: str) -> typer.testing.Result:
    """The command, as a shell would call it."""
    return typer.testing.CliRunner().invoke(app, ["check", *arguments.split()])


def cells_of(table: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    rows = (line.split() for line in table.splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0] in CHECKS}


def test_finding() -> None:
    """A runner with a bug exits with 1; the table names check and slot, the sentence below it the row; or as data."""
    found = run("checked_engine:faulty --seed 4")
    assert found.exit_code == 1
    cells = cells_of(found.stdout)
    assert list(cells) == ["poison", "parity", "addresses", "coverage", "races"]
    assert (cells["poison"], cells["races"]) == (["8", "1", "weights"], ["8", "0", "-"])
    assert "poison: live row 0 of the output changed" in found.stdout
    assert "when the tail of slot 'weights' held nan instead of 1.0" in found.stdout
    found = run("checked_engine:faulty --format json --only poison --only coverage --rounds 1")
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert data["steps"] == {"poison": 6, "coverage": 6}
    assert [(one["check"], one["slot"]) for one in data["findings"]] == [("poison", "weights")]


def test_sound() -> None:
    """A function that makes a runner, and one that is captured already; drawn batches, a function's, and a list."""
    for target in ("checked_engine:make_sound", "checked_engine.py:make_sound", "checked_engine:captured"):
        found = run(target)
        assert (found.exit_code, found.stderr) == (0, "")
        assert "DecodeRunner: no findings (poison on " in found.stdout
    for name, steps in (("make_batch", "8"), ("TWO", "2")):
        found = run(f"checked_engine.py:make_sound --batches {name} --only poison")
        assert (found.exit_code, cells_of(found.stdout)) == (0, {"poison": [steps, "0", "-"]})


REFUSED = {
    "number": (2, "'number' in checked_engine is not a runner, nor a function without"),
    "make_trouble": (1, "ZeroDivisionError at checked_engine.py:19, `return 1 // 0`"),
    "captured --only poisson": (2, "there is no check 'poisson': checks are poison, parity"),
    "captured --batches number": (2, "'number' in checked_engine is no batches"),
    "captured --rounds 0": (2, "--rounds"),
}


def test_refusals() -> None:
    """What is not understood exits with 2, what a user's code raises with 1; each says what it was."""
    for arguments, (status, said) in REFUSED.items():
        found = run(f"checked_engine:{arguments}")
        assert found.exit_code == status, arguments
        assert said in " ".join(found.stderr.split()), found.stderr
