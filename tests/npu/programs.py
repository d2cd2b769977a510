"""Programs in a process of their own: for settings that the stand-in reads once, and for what a start looks like."""

import os
import subprocess
import sys


def program(source: str, **environment: str) -> list[str]:
    """The lines that a program prints; one that prints nothing must not fail."""
    settings = {**os.environ, "PYTHONWARNINGS": "ignore", **environment}
    words = [sys.executable, "-c", source]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert not done.returncode or done.stdout, done.stderr
    return done.stdout.strip().splitlines()
