"""The example of shared memory: what whole cycles of runners take at serving sizes, and how it is told."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from slotgraph.dataflow.capabilities import Capabilities
from tests.examples.demo import Module

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "shared_memory"


@pytest.fixture(scope="module")
def cycles() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"cycles.{name}")
    sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("arenas", [pytest.param(True, id="arena"), pytest.param(False, id="blocks")])
@pytest.mark.parametrize("batch", [8, 512])
def test_standard_runners_take_little_more_than_must_hold_at_once(cycles: Module, batch: int, arenas: bool) -> None:  # noqa: FBT001
    """Within a tenth of the peak of live bytes, and hardly more than one memory for each name, right or not."""
    scale = cycles("members").Scale(batch=batch)
    found = [*cycles("program").figures(scale, Capabilities(arenas=arenas))]
    assert len(found) == 6
    for one in found:
        assert one.peak <= one.shared <= 1.1 * one.peak, one.cycle
        assert one.shared <= min(one.by_name, 1.001 * one.blindly), one.cycle


def test_a_server_saves_hundreds_of_megabytes(cycles: Module) -> None:
    """At 512 requests, a vocabulary of 152k and 8k wide: what the page says."""
    found = {one.cycle: one for one in cycles("program").figures(cycles("members").Scale())}
    one = found["prefills, draft, verify, extend"]
    assert (one.apart - one.shared) // 10**6 == 833
    assert (one.by_name - one.shared) // 10**6 == 445


def test_the_program_prints_all_cycles(
    cycles: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table and as JSON."""
    monkeypatch.setenv("COLUMNS", "160")
    assert cycles("program").main([]) == 0
    assert "prefills, draft, verify, extend" in capsys.readouterr().out
    assert cycles("program").main(["--json", "--batch", "8"]) == 0
    assert [one["runners"] for one in json.loads(capsys.readouterr().out)] == [2, 3, 3, 5, 5, 3]


def test_the_program_prints_one_layout(cycles: Module, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a cycle that there is, and says which there are."""
    assert cycles("program").main(["--layout", "prefill, decode"]) == 0
    assert "shares with" in capsys.readouterr().out
    assert cycles("program").main(["--layout", "none"]) == 2
    assert "no cycle 'none': there are prefill, decode; draft" in capsys.readouterr().err


def test_a_layout_prints_every_slot_and_the_bytes_saved(cycles: Module) -> None:
    """As a wide terminal shows them."""
    layout = next(iter(cycles("members").cycles(cycles("members").Scale(batch=8)))).layout
    console = Console(width=200)
    with console.capture() as captured:
        console.print(layout)
    said = captured.get()
    assert all(str(place) in said for place in layout.places)
    assert "prefill -> decode" in said
    assert f"{layout.saved:,}" in said
