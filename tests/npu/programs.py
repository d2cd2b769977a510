"""Programs in a process of their own: for settings that the stand-in reads once, and for what a start looks like."""

import os
import subprocess
import sys
import textwrap


def output(source: str, **environment: str) -> str:
    """What a program prints, with torch_npu to import and these settings in its environment; it must not fail."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("STANDIN_")} | environment
    program = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(program, env=settings, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    return done.stdout
