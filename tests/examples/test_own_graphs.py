"""The engine that captures its own graphs: every token as without graphs, and different as soon as padding is stale."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slotgraph.dataflow.ready import Ready
from tests.examples.demo import Module

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "own_graphs"


@pytest.fixture(scope="module")
def engine() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"engine.{name}")
    sys.path.remove(str(FOLDER))


def test_tokens_are_those_without_graphs(engine: Module, backend_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch that shrinks through three sizes: all tokens are equal, on each backend."""
    assert engine("program").main(["--backend", backend_name, "--requests", "40", "--tokens", "30"]) == 0
    assert "all equal to those without graphs" in capsys.readouterr().out


def test_stale_padding_shows(
    engine: Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without resets, padded rows write pages of requests that are running: the comparison notices."""
    monkeypatch.setattr(Ready, "reset", lambda *_: None)
    assert engine("program").main(["--backend", "cpu-capture", "--requests", "24", "--tokens", "64"]) == 1
    assert "NOT equal" in capsys.readouterr().out
