"""A graph owns what it reads: others in the process may clear workspaces, plans and caches at any time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.backends import cuda_neighbours

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.mark.parametrize("order", ["ours_first", "theirs_first"])
@pytest.mark.parametrize("kind", cuda_neighbours.KINDS)
def test_beside_reduce_overhead(kind: str, order: str) -> None:
    """1,000 steps in turn with a model under `torch.compile(mode="reduce-overhead")`, with caches cleared between."""
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.backends.cuda_neighbours", kind, order]
    done = subprocess.run(  # noqa: S603 - the program beside this file
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1000 steps equal" in done.stdout
