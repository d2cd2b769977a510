"""Programs in a process of their own: for settings that the stand-in reads once, and for what a start looks like."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping


def output(source: str, **environment: str) -> str:
    """What a program prints, with torch_npu to import and these settings in its environment; it must not fail."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")} | environment
    done = run(source, settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(source: str, settings: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """A program in an environment of these settings alone, and how it ended."""
    program = [sys.executable, "-c", textwrap.dedent(source)]
    return subprocess.run(program, env=settings, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
