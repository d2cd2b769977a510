"""The example of a model with a sliding window: equal to generate(), and the known faults of it are found."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph import TOKENS, copied, keep
from tests.examples.demo import NEEDS, Module

pytest.importorskip("transformers", reason=NEEDS)

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "sliding_window"
QUICK = ("--requests", "4", "--max-new-tokens", "16", "--buckets", "1,4")


@pytest.fixture(scope="module")
def windows(serving: Module) -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    assert serving("cache")
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"windows.{name}")
    sys.path.remove(str(FOLDER))


def serve(windows: Module, *argv: str, **seams: Any) -> int:
    """Run the program, with a seam for a fault."""
    status: int = windows("program").serve(windows("options").parse([*QUICK, *argv]), **seams)
    return status


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(("--backend", "cpu-capture"), id="cpu-capture"),
        pytest.param(("--backend", "cpu"), id="cpu"),
        pytest.param(("--backend", "cuda"), id="cuda", marks=pytest.mark.cuda),
        pytest.param(("--window", "7", "--buckets", "3"), id="other window"),
        pytest.param(("--window", "2", "--seed", "5"), id="smallest window"),
        pytest.param(("--window", "500"), id="nothing out of the window"),
    ],
)
def test_equal_to_generate(windows: Module, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    """Token for token, on each backend and for windows of any size, without one look-up of a layer's places."""
    if "cuda" in argv and not torch.cuda.is_available():
        pytest.skip("cuda: torch sees no device")
    assert serve(windows, *argv) == 0
    said = capsys.readouterr().out
    assert "every token is the one that generate() chose" in said
    assert "look-ups         0 of a layer's places" in said


def test_texts_vary_and_outgrow_the_window(windows: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """The run is worth something: texts longer than the window, padded buckets, and many different tokens."""
    serve(windows)
    said = capsys.readouterr().out.splitlines()
    lines = {line[:17].strip(): line[17:] for line in said}
    assert int(lines["requests"].split(", ")[1].split()[0]) >= 3
    assert int(lines["tokens"].split(", ")[1].split()[0]) > 25
    assert lines["decode steps"].endswith(" 0 eagerly")
    assert any(line.startswith("  bucket") and " 0% waste" not in line for line in said)


def test_look_ups_where_nothing_is_lent(windows: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Without lending, the graph of each bucket holds a look-up in each of the four layers; the tokens are the same."""
    assert serve(windows, "--translate", "--buckets", "4") == 0
    said = capsys.readouterr().out
    prompts = 4  # at most so many prefill steps
    found = int(said.split("look-ups")[1].split()[0])
    assert found in {4 * (2 + steps) for steps in range(1, prompts + 1)}  # a warm-up, a capture, and the prompts


def rolled(batch: dict[str, Any]) -> dict[str, Any]:
    """Each request's keys and values go to where another one's belong."""
    places = batch["out_cache_loc_swa"]
    return {**batch, "out_cache_loc_swa": [*places[1:], places[0]]}


def late(batch: dict[str, Any]) -> dict[str, Any]:
    """One place too far."""
    return {**batch, "out_cache_loc_swa": [place + 1 for place in batch["out_cache_loc_swa"]]}


@pytest.mark.parametrize("plant", [rolled, late])
def test_wrong_places_are_found(
    windows: Module, capsys: pytest.CaptureFixture[str], plant: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """Places in the window pool that are not the request's own: exit status 1, with the first difference named."""
    assert serve(windows, prepare=plant) == 1
    assert "DIFFERENT from generate() in " in capsys.readouterr().out


def test_stale_tail_is_found(windows: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Padded rows that write to the places of an earlier step spoil a live request's keys and values."""

    class Stale(windows("inputs").DecodeInputs):  # type: ignore[misc]  # the example is no package that a checker finds
        """A declaration that someone wrote in good faith."""

        out_cache_loc_swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=keep("no one reads what they write"))

    assert serve(windows, "--buckets", "8", declaration=Stale) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_forgotten_translation_is_found(
    windows: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that no one keeps up spoils the slow path, and leaves the lent one alone."""
    monkeypatch.setattr(windows("pools").WindowPool, "place", lambda *_: None)
    assert serve(windows) == 0
    assert serve(windows, "--translate") == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_what_cannot_run_is_told(windows: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend that is not here, and a window that generate() itself gets wrong, end the program with status 2."""
    assert windows("program").main(["--backend", "no-such"]) == 2
    for argv in (["--window", "1"], ["--buckets", "0"]):
        with pytest.raises(SystemExit, match="2"):
            windows("program").main(argv)
    said = capsys.readouterr().err
    assert said.startswith("sliding_window: there is no backend 'no-such'")
    assert "expected a whole number of at least 2, got 1" in said


def test_help_says_what_it_does(windows: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """The help names the options and the exit status."""
    with pytest.raises(SystemExit, match="0"):
        windows("program").main(["--help"])
    said = capsys.readouterr().out
    assert all(f"--{name}" in said for name in ("backend", "window", "translate", "buckets", "max-new-tokens"))
    assert "exit status: 0 all is equal" in said
