"""The drawing of a step's time: recorded in three ways, and drawn as SVG."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import attrs
import pytest
import torch

from slotgraph.backends import choose
from slotgraph.runners.commands.workload import draw
from tests.examples.demo import Module

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "timeline"
SVG = "{http://www.w3.org/2000/svg}"
TINY = ("--layers", "1", "--hidden", "8")


@pytest.fixture(scope="module")
def spans() -> Iterator[Module]:
    """The program's modules by name, as they are found when the folder is run."""
    sys.path.insert(0, str(FOLDER))
    yield lambda name: importlib.import_module(f"spans.{name}")
    sys.path.remove(str(FOLDER))


@attrs.frozen
class Drawn:
    """A run on the CPU: its drawing, and what was printed."""

    file: Path
    out: str

    @property
    def words(self) -> list[str]:
        """The drawing's letters, which are letters and not paths."""
        return ["".join(text.itertext()) for text in ET.parse(self.file).iter(f"{SVG}text")]  # noqa: S314


def drawn(spans: Module, folder: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> Drawn:
    """Run the program as on a command line."""
    pytest.importorskip("matplotlib", reason="drawings: pip install 'slotgraph[plot]'")
    file = folder / "pictures" / "timeline.svg"
    assert spans("program").main(["--out", str(file), *TINY, *argv]) == 0
    return Drawn(file, capsys.readouterr().out)


def test_all_ways_are_drawn(spans: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each way has a host row and a device row, each call its number, and the axis its unit; the file is small."""
    run = drawn(spans, tmp_path, capsys, "--backend", "cpu-capture")
    for words in ("one copy a slot, then the replay", "slotgraph, foreach", "slotgraph, in_graph"):
        assert run.words.count(words) == 1
        assert f"{words}: a step took host " in run.out
    assert [run.words.count(row) for row in ("host", "device", "the host is the device")] == [3, 3, 3]
    assert [run.words.count(number) for number in ("1", "2", "3")] == [3, 3, 3]
    assert any(words.startswith("microseconds since the first call") for words in run.words)
    assert "of 256 rows live" in ET.parse(run.file).findtext(f"{SVG}title", "")  # noqa: S314 - our own file
    assert run.file.stat().st_size < 100_000


def test_ways_compute_the_same(spans: Module) -> None:
    """The three ways are three ways to one answer, step after step."""
    ways, backend = spans("ways"), choose("cpu-capture")
    inputs, three = ways.make_ways(backend, 8, 2)
    for batch in [draw(inputs, backend, rows) for rows in ways.LIVE]:
        one, *others = [way.call(batch).clone() for way in three]
        assert one.shape == (batch.rows, 8)
        assert one.any()
        assert all(torch.equal(one, other) for other in others)


def event(cat: str, name: str, start: float, took: float, correlation: int | None = None) -> dict[str, Any]:
    """One event of a profiler's trace."""
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": 1000.0 + start, "dur": took, "args": args}


def test_trace_of_a_device(spans: Module) -> None:
    """What a graph brings is the step, but for the fused kernel; what came before the first call is left out."""
    record = spans("record")
    trace = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("kernel", "an earlier pass", -50.0, 5.0, 1),
        event("user_annotation", record.STEP, 0.0, 17.0),
        event("gpu_user_annotation", record.STEP, 4.0, 60.0),
        event("cpu_op", "aten::copy_", 1.0, 3.0),
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 4.0, 1.0, 2),
        event("cuda_runtime", "cudaGraphLaunch", 6.0, 8.0, 3),
        event("kernel", "fill_lanes", 9.0, 2.0, 3),
        event("kernel", "ampere_gemm", 12.0, 5.0, 3),
    ]
    bars = [(bar.kind, bar.start, bar.stop) for bar in record.bars_of(trace)]
    assert bars == [("call", 0.0, 17.0), ("inputs", 4.0, 5.0), ("inputs", 9.0, 11.0), ("step", 12.0, 17.0)]
    assert record.Recording("way", record.bars_of(trace)).took("inputs") == 3.0


def test_what_cannot_run_is_told(
    spans: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend that is not here, and a missing matplotlib, end the program with a sentence and status 2."""
    main = spans("program").main
    assert main(["--backend", "no-such"]) == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert main([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("timeline: there is no backend 'no-such'") or said[0].startswith("timeline: a drawing")
    assert said[-1] == "timeline: a drawing needs matplotlib: pip install 'slotgraph[plot]'"


def test_own_kernel_goes_by_that_name(spans: Module) -> None:
    """The trace is searched for the name that the kernel has."""
    kernel = Path(importlib.import_module("slotgraph.backends").__path__[0], "cuda_kernel.py")
    assert f"def {spans('record').FILL}(" in kernel.read_text(encoding="utf-8")
