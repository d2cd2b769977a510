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


class PreferredBackend(CpuBackend):  # type: ignore[misc]  # final to users; here it is another device's stand-in
    """A backend that is there, and that wants to be chosen."""

    name = "preferred"
    priority = 1000


class AbsentBackend(PreferredBackend):  # type: ignore[misc]  # as above
    """A backend whose device is never there."""

    name = "absent"

    @classmethod
    def is_available(cls) -> Availability:
        return Availability(available=False, reason="no such card here: pip install card")


class BrokenBackend(PreferredBackend):  # type: ignore[misc]  # as above
    """A backend that breaks when it is asked whether it can run."""

    name = "broken"

    @classmethod
    def is_available(cls) -> Availability:
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


def test_own_names(installed: Any) -> None:
    """The backends of this package are there, whatever else is, and another package cannot take their place."""
    installed(cpu=f"{__name__}:PreferredBackend")
    assert {"cpu", "cpu-capture"} <= set(names())
    assert len(set(names())) == len(names())
    assert load("cpu") is CpuBackend


def test_unknown_name() -> None:
    """A name that is none is refused with the nearest one, if there is one, and all that are known."""
    for name, hint in (("cpu_capture", r" \(did you mean 'cpu-capture'\?\)"), ("quantum", "")):
        for use in (choose, load):
            with pytest.raises(BackendUnavailableError, match=rf"no backend '{name}'{hint}; known here: cpu, cpu-cap"):
                use(name)


def test_auto(installed: Any) -> None:
    """Of those that can run here, auto takes the one of highest priority; one that cannot run is passed over."""
    before = choose("auto")
    assert before.priority == max(load(name).priority for name in names() if load(name).is_available())
    installed(absent=f"{__name__}:AbsentBackend")
    assert "absent" in names()
    assert type(choose("auto")) is type(before)
    with pytest.raises(BackendUnavailableError, match="'absent' cannot run here: no such card here: pip install card"):
        choose("absent")
    installed(absent=f"{__name__}:AbsentBackend", preferred=f"{__name__}:PreferredBackend")
    assert choose("auto").name == "preferred"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:Adapter", "'broken' cannot be loaded: .*no_such_module"),
        ("slotgraph.backends.cpu:NoSuchClass", "'broken' cannot be loaded: .*NoSuchClass"),
        ("card_driver:Adapter", "'broken' cannot be loaded: RuntimeError: no card in slot 3"),
        (f"{__name__}:EntryPoint", "'broken': .* is no subclass of .*Backend"),
        (f"{__name__}:test_own_names", "'broken': .* is no subclass of .*Backend"),
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
loaded = lambda: {name.rpartition(".")[2] for name in sys.modules if name.startswith("slotgraph.backends.")}
before = loaded()
assert not before & {"cpu", "cpu_capture", "cuda", "npu", "accelerator"}, before
assert "npu" in slotgraph.backends.names()
assert loaded() == before, loaded()
slotgraph.backends.choose("cpu")
assert "cpu" in loaded() and "cpu_capture" not in loaded(), loaded()
slotgraph.backends.choose("cpu-capture")
assert "cpu_capture" in loaded()
slotgraph.backends.load("npu"), slotgraph.backends.load("accelerator")
assert not {"triton", "torch_npu", "transformers", "matplotlib", "typer", "torch._dynamo"} & set(sys.modules)
"""


def test_loaded_on_first_use() -> None:
    """Importing slotgraph, and listing backends, loads no adapter; choosing one loads that one and no other."""
    path = os.pathsep.join([str(Path(__file__).parents[2] / "src"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", LAZY], env=environment, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr
