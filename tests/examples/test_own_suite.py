"""The example of a suite of one's own: it passes as it stands, and finds the bug that its README plants."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "own_suite"
MASK = " * pages[:, :, None]"


def suite(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the suite in a folder, on the CPU alone, in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTGRAPH_", "PYTEST_"))}
    command = [sys.executable, "-m", "pytest", str(folder), "-p", "no:cacheprovider", *arguments]
    return subprocess.run(  # noqa: S603 - ours
        command, env={**kept, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_it_passes() -> None:
    """On both backends of the CPU: every test, benchmarks among them, each way once."""
    done = suite(FOLDER, "--slotgraph-backends=cpu,cpu-capture", "--benchmark-disable")
    assert done.returncode == 0, done.stdout
    assert "12 passed" in done.stdout


def test_it_finds_what_is_planted(tmp_path: Path) -> None:
    """Without its mask the step reads what padded rows wrote; the slot through which that comes is named."""
    shutil.copytree(FOLDER, tmp_path / "suite", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    model = tmp_path / "suite" / "model.py"
    text = model.read_text(encoding="utf-8")
    assert text.count(MASK) == 1
    model.write_text(text.replace(MASK, ""), encoding="utf-8")
    done = suite(tmp_path / "suite", "--slotgraph-backends=cpu-capture", "-k", "padding or parity")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "FailedCheckError: DecodeRunner" in done.stdout
    assert "in the tail of slot 'positions'" in done.stdout
