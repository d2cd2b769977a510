"""KeyboardInterrupts at any moment of a capture on the CPU: torch works as before, and so does the next capture."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_at_any_moment() -> None:
    """In a process of its own, which cannot harm the tests that follow."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-m", "tests.backends.interrupted"]
    done = subprocess.run(  # noqa: S603 - the program beside this file
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout == "200 interrupts\n"
