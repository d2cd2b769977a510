"""`slotgraph check` from end to end: targets, batches, tables, JSON, and exit statuses."""

import json
import pathlib
import sys

import pytest
import typer.testing

from slotgraph.runners.check.checks import CHECKS
from slotgraph.runners.commands.app import app

ENGINE = """
import torch
from slotgraph import BATCH, DecodeRunner, Inputs, copied

class DecodeInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)

def rows_apart(view):
    return view.ids * view.weights

def rows_together(view):
    return view.ids * view.weights.softmax(0)

def make(step, **options):
    return DecodeRunner(DecodeInputs, step, buckets=[2, 4], backend="cpu-capture", progress=False, **options)

def make_sound():
    return make(rows_apart)

faulty = make(rows_together)
captured = make(rows_apart)
captured.capture()

def make_nothing():
    return 3

def make_trouble():
    return 1 // 0

def make_batch(rows, generator):
    return {"ids": torch.arange(rows) + 1, "weights": torch.rand(rows, generator=generator)}

TWO = [make_batch(1, torch.Generator()), make_batch(3, torch.Generator())]
wide = make_batch(9, torch.Generator())
number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current directory with an engine of a user's; what it brings to sys is taken back."""
    (tmp_path / "checked_engine.py").write_text(ENGINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "checked_engine", raising=False)
    return tmp_path


def run(*arguments: str) -> typer.testing.Result:
    """The command, as a shell would call it."""
    return typer.testing.CliRunner().invoke(app, ["check", *arguments])


def cells_of(table: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    rows = (line.split() for line in table.splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0] in CHECKS}


def test_finding() -> None:
    """A runner with a bug exits with 1; the table names check and slot, and the sentence below it the row."""
    found = run("checked_engine:faulty", "--seed", "4")
    assert found.exit_code == 1
    cells = cells_of(found.stdout)
    assert list(cells) == ["poison", "parity", "addresses", "coverage", "races"]
    assert cells["poison"] == ["8", "1", "weights"]
    assert cells["races"] == ["8", "0", "-"]
    assert "poison: live row 0 of the output changed" in found.stdout
    assert "when the tail of slot 'weights' held nan instead of 1.0" in found.stdout


def test_json() -> None:
    """The same as data."""
    found = run("checked_engine:faulty", "--format", "json", "--only", "poison", "--only", "coverage", "--rounds", "1")
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert data["steps"] == {"poison": 6, "coverage": 6}
    assert [(one["check"], one["slot"]) for one in data["findings"]] == [("poison", "weights")]


@pytest.mark.parametrize(
    "target", ["checked_engine:make_sound", "checked_engine.py:make_sound", "checked_engine:captured"]
)
def test_sound(target: str) -> None:
    """A function that makes a runner, in a module or in a file, and a runner that is captured already."""
    found = run(target)
    assert (found.exit_code, found.stderr) == (0, "")
    assert "DecodeRunner: no findings (poison on " in found.stdout


@pytest.mark.parametrize(("name", "steps"), [("make_batch", "8"), ("TWO", "2")], ids=["function", "list"])
def test_batches(name: str, steps: str) -> None:
    """Batches of the module's own, from the same module that the runner came from."""
    found = run("checked_engine.py:make_sound", "--batches", name, "--only", "poison")
    assert found.exit_code == 0
    assert cells_of(found.stdout) == {"poison": [steps, "0", "-"]}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["checked_engine:makesound"], 2, "Invalid value: checked_engine has no 'makesound'"),
        (["checked_engine:number"], 2, "'number' in checked_engine is no runner, nor a function without"),
        (["checked_engine:make"], 2, "'make' in checked_engine is no runner, nor a function without"),
        (["checked_engine"], 2, "say which one, as in checked_engine:faulty; there are: captured, faulty"),
        (["checked_engine:make_nothing"], 2, "'make_nothing' in checked_engine returned int, which is no runner"),
        (["checked_engine:make_trouble"], 1, "ZeroDivisionError at checked_engine.py:29, `return 1 // 0`"),
        (["no_engine:faulty"], 2, "there is no module 'no_engine'"),
        (["checked_engine:captured", "--only", "poisson"], 2, "there is no check 'poisson': checks are poison, parity"),
        (["checked_engine:captured", "--read-outside", "idz"], 2, "read_outside names 'idz'"),
        (["checked_engine:captured", "--batches", "TOW"], 2, "checked_engine has no 'TOW'"),
        (["checked_engine:captured", "--batches", "number"], 2, "'number' in checked_engine is no batches"),
        (["checked_engine:captured", "--rounds", "0"], 2, "--rounds"),
    ],
)
def test_refusals(arguments: list[str], status: int, said: str) -> None:
    """What is not understood exits with 2, what a user's code raises with 1; each says what it was."""
    found = run(*arguments)
    assert found.exit_code == status
    assert said in " ".join(found.stderr.split()), found.stderr
