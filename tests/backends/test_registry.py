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

from slotgraph.backends import Availability, Backend, choose, load, names, registry
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


class EagerToServe(CpuBackend):  # type: ignore[misc]  # likewise
    """A backend that is there, and that wants to be chosen."""

    name = "eager-to-serve"
    priority = 1000


class BrokenBackend(CpuBackend):  # type: ignore[misc]  # likewise
    """A backend that breaks when it is asked whether it can run."""

    name = "broken"
    priority = 1000

    @classmethod
    def is_available(cls) -> Availability:
        """Raises."""
        message = "the driver said something unheard of"
        raise ValueError(message)


class NoBackend:
    """Something else that an entry point leads to."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes entry points look installed: name and object."""

    def install(**points: str) -> None:
        found = [EntryPoint(name.replace("_", "-"), value, registry.GROUP) for name, value in points.items()]
        everything = importlib.metadata.entry_points

        def entry_points(**wanted: Any) -> Any:
            own = everything(**wanted)
            return EntryPoints([*own, *found]) if wanted.get("group") == registry.GROUP else own

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def here(name: str) -> str:
    """An entry point's value for a class of this file, which pytest imports under a name of its own."""
    return f"{__name__}:{name}"


def test_own_names() -> None:
    """The backends of this package are there, whatever else is."""
    assert {"cpu", "cpu-capture"} <= set(names())
    assert len(set(names())) == len(names())


@pytest.mark.parametrize(("name", "near"), [("cpu_capture", "cpu-capture"), ("cpuu", "cpu")])
def test_unknown_name(name: str, near: str) -> None:
    """A name that is none is refused with the nearest one, and all that are known."""
    for use in (choose, load):
        with pytest.raises(
            BackendUnavailableError, match=rf"no backend '{name}'.*did you mean '{near}'\?.*cpu-capture"
        ):
            use(name)


def test_unknown_name_near_nothing() -> None:
    """A name that is near none is told all that are known."""
    with pytest.raises(
        BackendUnavailableError, match=r"there is no backend 'quantum'\W+[Kk]nown here: cpu, cpu-capture"
    ):
        choose("quantum")


def test_instance_as_it_is() -> None:
    """An instance is used as it is, and a class or a name makes one."""
    backend = CpuBackend()
    assert choose(backend) is backend
    assert type(choose("cpu")) is CpuBackend
    assert type(choose(CpuBackend)) is CpuBackend


def test_auto(installed: Any) -> None:
    """Of those that can run here, auto takes the one of highest priority; one that cannot run is passed over."""
    before = choose("auto")
    assert before.priority == max(load(name).priority for name in names() if load(name).is_available())
    installed(absent=here("AbsentBackend"))
    assert type(choose("auto")) is type(before)
    installed(absent=here("AbsentBackend"), eager_to_serve=here("EagerToServe"))
    assert choose("auto").name == "eager-to-serve"


def test_unavailable(installed: Any) -> None:
    """A backend that cannot run here is refused with its own reason."""
    installed(absent=here("AbsentBackend"))
    assert "absent" in names()
    with pytest.raises(BackendUnavailableError, match="'absent' cannot run here: no such card here: pip install card"):
        choose("absent")


def test_entry_point_that_is_no_backend(installed: Any) -> None:
    """An entry point that leads to something else is refused with what it leads to."""
    installed(strange=here("NoBackend"), function=here("here"))
    for name in ("strange", "function"):
        with pytest.raises(BackendUnavailableError, match=rf"backend '{name}': .* is no subclass of .*Backend"):
            choose(name)


def test_backend_that_breaks_when_it_is_asked(installed: Any) -> None:
    """A backend that raises when it is asked whether it can run is a warning for auto, which goes on."""
    before = type(choose("auto"))
    installed(broken=here("BrokenBackend"))
    with capture_logs() as events:
        assert type(choose("auto")) is before
    assert [(event["log_level"], event["backend"]) for event in events] == [("warning", "broken")]
    assert "something unheard of" in events[0]["reason"]


def test_package_that_raises_at_its_import(installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a package raises at its import is an error with that reason by name, and a warning for auto."""
    (tmp_path / "card_driver.py").write_text("raise RuntimeError('no card in slot 3')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = type(choose("auto"))
    installed(card="card_driver:Adapter")
    with pytest.raises(BackendUnavailableError, match="'card' cannot be loaded: RuntimeError: no card in slot 3"):
        choose("card")
    with capture_logs() as events:
        assert type(choose("auto")) is before
    assert [event["log_level"] for event in events] == ["warning"]


@pytest.mark.parametrize("value", ["no_such_module:Adapter", "slotgraph.backends.cpu:NoSuchClass"])
def test_broken_entry_point(installed: Any, value: str) -> None:
    """A package that does not load is an error with the reason by name, and a warning for auto, which goes on."""
    before = type(choose("auto"))
    installed(broken=value)
    with pytest.raises(BackendUnavailableError, match=r"'broken'.*(no_such_module|NoSuchClass)"):
        choose("broken")
    with capture_logs() as events:
        assert type(choose("auto")) is before
    assert [event["log_level"] for event in events] == ["warning"]
    assert "broken" in str(events[0])


def test_own_names_cannot_be_taken(installed: Any) -> None:
    """Another package cannot put itself in the place of one of this package's backends."""
    installed(cpu=here("EagerToServe"))
    assert load("cpu") is CpuBackend
    assert names().count("cpu") == 1


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


def test_abstract_base() -> None:
    """A class that leaves out a verb cannot be made, and says which."""

    class Half(Backend):
        name = "half"

    half: Any = Half
    with pytest.raises(TypeError, match=r"abstract methods? .*capture.*"):
        half()
