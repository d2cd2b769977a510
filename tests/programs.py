"""Programs that a test runs in a Python of their own."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NOTHING: Mapping[str, str] = {}


def python(
    *words: Path | str, paths: Iterable[object] | None = None, env: Mapping[str, str] = NOTHING, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a new Python to its end. paths: where it finds modules, if not where this one does; env: other variables."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLOTGRAPH_", "PYTEST_"))}
    found = os.pathsep.join(map(str, filter(None, sys.path if paths is None else paths)))
    given = {**own, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1", "PYTHONPATH": found, **env}
    return subprocess.run(
        [sys.executable, *words], env=given, capture_output=True, encoding="utf-8", check=False, timeout=600, **options
    )
