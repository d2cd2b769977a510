"""`slotgraph explain` for runners: found, captured where that is asked for, printed or written in every form."""

import json
import pathlib
import sys
from typing import Any

import pytest
import typer.testing

from slotgraph.dataflow.serial import from_data
from slotgraph.runners.commands.app import app
from slotgraph.runners.explained.explanation import RunnerExplanation

SERVING = """
import torch
from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied

class DecodeInputs(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)

def step(view):
    if view.seq_lens.shape[0] == 4:
        raise ValueError("four is too many")
    return view.input_ids + 1

def make(buckets=(1, 2), step=step):
    return DecodeRunner(DecodeInputs, step, buckets=list(buckets), backend="cpu", progress=False)

def failing():
    return make((2, 4))

def broken():
    raise KeyError("no such weights")

def number():
    return 3

made = make()
made.capture()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current directory with a user's module."""
    (tmp_path / "explained_serving.py").write_text(SERVING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "explained_serving", raising=False)
    return tmp_path


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, ["explain", *arguments])


def explained(target: str, *arguments: str) -> RunnerExplanation:
    """What `--format json` prints, read back."""
    result = run(target, "--format", "json", *arguments)
    assert result.exit_code == 0, result.output
    return from_data(json.loads(result.stdout), RunnerExplanation)


def graphs(explanation: RunnerExplanation) -> dict[int, str]:
    """Why each bucket has no graph."""
    return {bucket.rows: graph.why for bucket in explanation.buckets for graph in bucket.graphs}


def test_runner_and_function() -> None:
    """A runner is shown as it stands; a function's is captured where that is asked for, and what failed is told."""
    assert graphs(explained("explained_serving:made")) == {1: "", 2: ""}
    assert set(graphs(explained("explained_serving.py:make")).values()) == {"nothing is captured yet: call capture()"}
    assert graphs(explained("explained_serving:make", "--capture")) == {1: "", 2: ""}
    result = run("explained_serving:failing", "--capture", "--format", "json")
    assert (result.exit_code, "four is too many" in result.stderr) == (0, True)
    found = graphs(from_data(json.loads(result.stdout), RunnerExplanation))
    assert found[2] == ""
    assert "four is too many" in found[4]


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("table", "memory layout"),
        ("mermaid", 'captured[["DecodeRunner<br/>2 buckets, 1 to 2<br/>filled foreach"]]'),
        ("json", '"kind": "DecodeRunner"'),
        ("html", "<title>DecodeRunner over DecodeInputs</title>"),
    ],
)
def test_every_form_is_printed_or_written(form: str, part: str, folder: pathlib.Path) -> None:
    """To the screen, or to a file with one line that says where; both are the same."""
    printed = run("explained_serving:made", "--format", form)
    written = run("explained_serving:made", "--format", form, "--output", "out.txt")
    assert (written.exit_code, written.stdout) == (0, "written to out.txt\n")
    assert part in printed.stdout
    assert (folder / "out.txt").read_text(encoding="utf-8") == printed.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("made --size batch=3", 2, "--size: is for a declaration; a runner has its own"),
        ("made --set swa", 2, "--set: is for a declaration"),
        ("made --in-place input_ids", 2, "--in-place: is for a declaration"),
        ("mad", 2, "explained_serving has no 'mad'; did you mean 'made'?"),
        ("number", 2, "'number' in explained_serving returned int, which is no runner"),
        ("step", 2, "'step' in explained_serving is no subclass of slotgraph.Inputs, nor a runner"),
        ("DecodeInputs --format html", 2, "a page is made of a runner"),
        ("broken", 1, "no such weights"),
        ("made --output nowhere/out", 1, "nowhere/out: cannot be written: No such file"),
    ],
)
def test_what_cannot_be_is_said(arguments: str, status: int, message: str) -> None:
    """A sentence on stderr, a status for scripts, no traceback, nothing on stdout."""
    result = run(*f"explained_serving:{arguments}".split())
    assert (result.exit_code, result.stdout) == (status, "")
    assert message in " ".join(result.stderr.split())
