"""Commands that meet what they cannot use: one line on stderr and a status that a script can use, never a traceback."""

import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest
import typer.testing

from slotgraph.runners.commands.app import app

HUGE: Final = "9" * 23
LONG: Final = "9" * 5000
MODULE: Final = """
import sys
import torch
from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, copied

class Ids(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

def make(step=lambda view: view.ids * 2, **options):
    return DecodeRunner(Ids, step, buckets=[2, 4], backend="cpu-capture", progress=False, **options)

def make_without_graphs():
    return make(graphs=False)

def make_quitting():
    return make(lambda view: sys.exit(0))

def quits():
    sys.exit(0)

def raises(rows, generator):
    raise KeyError("no such thing")

def one(rows):
    return {"ids": torch.arange(rows)}

def three(rows, generator, more):
    return {"ids": torch.arange(rows)}

def nothing(rows, generator):
    return None

def leaves(rows, generator):
    sys.exit(0)

class Broken:
    def __iter__(self):
        yield {"ids": torch.arange(1)}
        raise ValueError("broken off")

broken = Broken()
large = [{"ids": torch.arange(9)}, {"ids": torch.arange(7)}]
empty = []
odd = [3, None]
"""
TARGETS: Final = (
    *("", ":", "failing_module:", "failing_module:make:x", "failing_module:quits", "failing_module:no_such_name"),
    *("quits_at_once:make", "quits_at_once.py:make", "no_text.py:make", "folder.py:make", "no_such_file.py:make"),
)
UNUSABLE: Final = [
    ("check", "failing_module:make", "--seed", HUGE),
    ("check", "failing_module:make", "--seed", "-1"),
    ("check", "failing_module:make", "--rounds", HUGE),
    ("check", "failing_module:make", "--rounds", "-3"),
    *(
        ("check", "failing_module:make", "--only", "coverage", "--batches", name)
        for name in ("raises", "one", "three", "nothing", "leaves", "broken", "large", "empty", "odd", "no_such_name")
    ),
    ("check", "failing_module:make_without_graphs"),
    ("check", "failing_module:make_quitting"),
    *itertools.product(("check", "explain"), TARGETS),
    ("explain", "failing_module:Ids", "--size", f"batch={LONG}"),
    ("explain", "failing_module:Ids", "--size", "batch=-1"),
    ("explain", "failing_module:Ids", "--size", "batch=1", "--width", "-1"),
    ("explain", "failing_module:Ids", "--output", "folder"),
    ("explain", "failing_module:Ids", "--output", "no_such_folder/x"),
    ("explain", "failing_module:Ids", "--output", "x" * 300),
    ("explain", "failing_module:Ids", "--format", "html"),
    ("explain", "failing_module:make", "--size", "batch=1"),
    ("bench", "--slots", HUGE),
    ("bench", "--slots", LONG),
    ("replay", "folder"),
    ("replay", "pipe"),
    ("replay", "no_such_file"),
    ("replay", "x" * 300),
    ("replay", "failing_module.py"),
    ("replay", "no_text.py"),
    ("replay", "failing_module.py", "failing_module:make", "--step", HUGE),
    ("backends", "--format", "no_such_format"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A current directory with files of a user's; what they bring to sys is taken back."""
    (tmp_path / "failing_module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "quits_at_once.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    (tmp_path / "no_text.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("failing_module", "quits_at_once"):
        sys.modules.pop(name, None)


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("arguments", UNUSABLE, ids=range(len(UNUSABLE)))
def test_what_cannot_be_used(arguments: tuple[str, ...]) -> None:
    """The status is not 0, the reason stands on stderr, and nothing was raised but what ends the command."""
    done = run(*arguments)
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit), repr(done.exception)
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() or "nothing was checked" in done.stdout


@pytest.mark.parametrize("target", ["make_without_graphs", "make"])
def test_a_check_that_checked_nothing(target: str) -> None:
    """It fails, as a table and as data, and says why no batch was taken."""
    batches = () if target == "make_without_graphs" else ("--batches", "large")
    reason = "graphs are switched off" if target == "make_without_graphs" else "more than the largest bucket, 4"
    for form in ("table", "json"):
        done = run("check", f"failing_module:{target}", "--format", form, *batches)
        assert done.exit_code == 1
        assert "nothing was checked: " in done.stdout
        assert reason in done.stdout
        assert form == "table" or '"ok": false' in done.stdout


def test_the_line_of_the_users_code_is_told() -> None:
    """An error of a user's own function has its file and its line."""
    done = run("check", "failing_module:make", "--batches", "raises")
    assert 'KeyError at failing_module.py:22, `raise KeyError("no such thing")`' in done.stderr


@pytest.mark.parametrize("form", ["table", "json"])
def test_an_output_that_takes_nothing(form: str) -> None:
    """A full device and a pipe that nobody reads end a command without a traceback."""
    line = [sys.executable, "-m", "slotgraph", "explain", "failing_module:Ids", "--format", form]
    with pathlib.Path("/dev/full").open("wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, check=False, timeout=300)  # noqa: S603 - ours
    assert done.returncode == 1
    assert done.stderr.decode() == "the output cannot be written: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=300)  # noqa: S603 - ours
    os.close(writing)
    assert done.returncode in (0, 1)
    assert done.stderr.decode() == ""
