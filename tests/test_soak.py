"""The soak in small: it passes on a laptop by every lowering."""

import pytest

from tests import soak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "lowering"), [("cpu-capture", "in_graph"), ("cpu-capture", "fused"), ("cpu", "foreach")]
)
def test_passes(backend: str, lowering: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of every kind give the oracle's answers, and what they came to is reported."""
    assert soak.main(["--steps", "300", "--backend", backend, "--lowering", lowering]) == 0
    said = capsys.readouterr().out
    assert f"300 steps on {backend}, {lowering}" in said
    assert "0 mismatches in 17 " in said
