"""The soak in small: it passes on a laptop by every lowering, and fails where a packet goes astray."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from slotgraph.backends.cpu import HostUpload
from tests import soak

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("backend", "lowering"), [("cpu-capture", "in_graph"), ("cpu-capture", "fused"), ("cpu", "foreach")]
)
def test_passes(backend: str, lowering: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of every kind give the oracle's answers, and what they came to is reported."""
    assert soak.main(["--steps", "300", "--backend", backend, "--lowering", lowering]) == 0
    said = capsys.readouterr().out
    assert f"300 steps on {backend}, {lowering}" in said
    assert "0 mismatches in 17 " in said


def test_sees_a_packet_that_went_astray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one upload in three is lost, answers differ, and the exit code says so."""
    send, draw = HostUpload.send, random.Random(0)  # noqa: S311 - no secret

    def lossy(upload: HostUpload, data: bytes, kept: object) -> None:
        if draw.random() < 2 / 3:
            send(upload, data, kept)

    monkeypatch.setattr(HostUpload, "send", lossy)
    assert soak.main(["--steps", "300", "--backend", "cpu-capture"]) == 1
    assert " 0 mismatches" not in capsys.readouterr().out


HOARDING = """
import sys
import torch
from tests import soak

kept, step = [], soak.Soak.step

def hoarding(self, *one):
    kept.append(torch.ones(1 << 18))
    return step(self, *one)

soak.Soak.step, soak.HOST_GROWTH = hoarding, 16 << 20
sys.exit(soak.main(["--steps", "300", "--backend", "cpu"]))
"""


def test_sees_memory_that_grows() -> None:
    """Where each step keeps a megabyte, the exit code says so, though all answers are right.

    In a process of its own: in this one, memory that earlier tests gave back may take it all without growing.
    """
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(  # noqa: S603 - our own interpreter and words
        [sys.executable, "-c", HOARDING], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert " 0 mismatches in" in done.stdout.replace("\n", " ")
