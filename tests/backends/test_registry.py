"""The registry: backends by name, loaded on first use, the nearest name for a wrong one, and what others bring."""

import importlib.metadata
import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from slotgraph.backends import GROUP, Availability, choose, load, names
from slotgraph.backends.cpu import CpuBackend
from slotgraph.dataflow.errors import BackendUnavailableError


class AbsentBackend(CpuBackend):  # type: ignore[misc]  # final to users; here it is another device's stand-in
    """A backend whose device is never there."""

    name = "absent"
    priority = 1000

    @classmethod
    def is_available(cls) -> Availability:
        """Never."""
        return Availability(available=False, reason="no such card here: pip install card")


class PreferredBackend(CpuBackend):  # type: ignore[misc]  # likewise
    """A backend that is there, and that wants to be chosen."""

    name = "preferred"
    priority = 1000


class BrokenBackend(PreferredBackend):  # type: ignore[misc]  # likewise
    """A backend that breaks when it is asked whether it can run."""

    name = "broken"

    @classmethod
    def is_available(cls) -> Availability:
        """Raises."""
        raise ValueError("the driver said something unheard of")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes entry points look installed: name and object."""

    def install(**points: str) -> None:
        found = [EntryPoint(name.replace("_", "-"), value, GROUP) for name, value in points.items()]
        everything = importlib.metadata.entry_points

        def entry_points(**wanted: Any) -> Any:
            own = everything(**wanted)
            return EntryPoints([*own, *found]) if wanted.get("group") == GROUP else own

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def here(name: str) -> str:
    """An entry point's value for a class of this file, which pytest imports under a name of its own."""
    return f"{__name__}:{name}"


def test_own_names(installed: Any) -> None:
    """The backends of this package are there, whatever else is, and another package cannot take their place."""
    installed(cpu=here("PreferredBackend"))
    assert {"cpu", "cpu-capture"} <= set(names())
    assert len(set(names())) == len(names())
    assert load("cpu") is CpuBackend


@pytest.mark.parametrize(
    ("name", "hint"),
    [("cpu_capture", r" \(did you mean 'cpu-capture'\?\)"), ("cpuu", r" \(did you mean 'cpu'\?\)"), ("quantum", "")],
)
def test_unknown_name(name: str, hint: str) -> None:
    """A name that is none is refused with the nearest one, if there is one, and all that are known."""
    for use in (choose, load):
        with pytest.raises(BackendUnavailableError, match=rf"no backend '{name}'{hint}; known here: cpu, cpu-capture"):
            use(name)


def test_auto(installed: Any) -> None:
    """Of those that can run here, auto takes the one of highest priority; one that cannot run is passed over."""
    before = choose("auto")
    assert before.priority == max(load(name).priority for name in names() if load(name).is_available())
    installed(absent=here("AbsentBackend"))
    assert "absent" in names()
    assert type(choose("auto")) is type(before)
    with pytest.raises(BackendUnavailableError, match="'absent' cannot run here: no such card here: pip install card"):
        choose("absent")
    installed(absent=here("AbsentBackend"), preferred=here("PreferredBackend"))
    assert choose("auto").name == "preferred"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:Adapter", "'broken' cannot be loaded: .*no_such_module"),
        ("slotgraph.backends.cpu:NoSuchClass", "'broken' cannot be loaded: .*NoSuchClass"),
        ("card_driver:Adapter", "'broken' cannot be loaded: RuntimeError: no card in slot 3"),
        (f"{__name__}:EntryPoint", "'broken': .* is no subclass of .*Backend"),
        (f"{__name__}:here", "'broken': .* is no subclass of .*Backend"),
        (f"{__name__}:BrokenBackend", "the driver said something unheard of"),
    ],
)
def test_what_breaks(installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, says: str) -> None:
    """Whatever is wrong with a package is an error with the reason by name, and a warning for auto, which goes on."""
    (tmp_path / "card_driver.py").write_text("raise RuntimeError('no card in slot 3')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = type(choose("auto"))
    installed(broken=value)
    with pytest.raises((BackendUnavailableError, ValueError), match=says):
        choose("broken")
    with capture_logs() as events:
        assert type(choose("auto")) is before
    assert [(event["log_level"], event["backend"]) for event in events] == [("warning", "broken")]


LAZY = """
import sys
import slotgraph
import slotgraph.backends
loaded = lambda: sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("slotgraph.backends."))
before = loaded()
assert not set(before) & {"cpu", "cpu_capture", "cuda", "npu", "accelerator"}, before
slotgraph.backends.names()
assert loaded() == before, loaded()
slotgraph.backends.choose("cpu")
assert "cpu" in loaded() and "cpu_capture" not in loaded(), loaded()
slotgraph.backends.choose("cpu-capture")
assert "cpu_capture" in loaded()
assert not {"triton", "torch_npu", "transformers", "matplotlib", "typer", "torch._dynamo"} & set(sys.modules)
"""


def test_loaded_on_first_use() -> None:
    """Importing slotgraph, and listing backends, loads no adapter; choosing one loads that one and no other."""
    root = Path(__file__).parents[2]
    done = subprocess.run(  # noqa: S603 - this test's own program
        [sys.executable, "-c", LAZY],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
