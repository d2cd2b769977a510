"""The soak in small: it passes on a laptop by every lowering, and fails where a packet goes astray."""

import itertools

import pytest
import torch

from slotgraph.backends.host_upload import HostUpload
from tests import soak


@pytest.mark.parametrize(
    ("backend", "lowering"),
    [("cpu-capture", "in_graph"), ("cpu-capture", "fused"), ("cpu", "foreach")],
)
def test_passes(backend: str, lowering: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of every kind give the oracle's answers, and what they came to is reported."""
    assert soak.main(["--steps", "300", "--backend", backend, "--lowering", lowering]) == 0
    said = capsys.readouterr().out
    assert f"300 steps on {backend}, {lowering}" in said
    assert "0 mismatches in 17" in said


def test_sees_a_packet_that_went_astray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where one upload in ten is lost, answers differ, and the exit code says so."""
    send, number = HostUpload.send, itertools.count()

    def lossy(upload: HostUpload, data: bytes, kept: object) -> None:
        if next(number) % 10:
            send(upload, data, kept)

    monkeypatch.setattr(HostUpload, "send", lossy)
    assert soak.main(["--steps", "300", "--backend", "cpu-capture"]) == 1
    assert " 0 mismatches" not in capsys.readouterr().out


def test_sees_memory_that_grows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where each step keeps a megabyte, the exit code says so, though all answers are right."""
    kept, plainly = list[torch.Tensor](), soak.Soak.plainly

    def hoarding(self: soak.Soak, one: soak.Prepared) -> torch.Tensor:
        kept.append(torch.ones(1 << 18))
        return plainly(self, one)

    monkeypatch.setattr(soak.Soak, "plainly", hoarding)
    monkeypatch.setattr(soak, "HOST_GROWTH", 16 << 20)
    assert soak.main(["--steps", "300", "--backend", "cpu"]) == 1
    assert "0 mismatches in" in capsys.readouterr().out
