"""Whether an NPU is found, and why not, as far as that shows without torch_npu; tests/npu has the rest."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slotgraph.backends import choose, load, npu_presence
from slotgraph.dataflow.errors import BackendUnavailableError


def reason() -> str:
    """Why the backend says that it cannot run."""
    return load("npu").is_available().reason


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A torch_npu that is installed, and that no test before has tried to import."""
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    npu_presence._import.cache_clear()
    yield monkeypatch
    npu_presence._import.cache_clear()


def present(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    """A torch.npu with some calls, as torch_npu brings it."""
    found = {"_is_in_bad_fork": lambda: False, "is_available": lambda: True, **calls}
    monkeypatch.setattr(torch, "npu", SimpleNamespace(**found), raising=False)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the reason is the command that installs the one for this torch."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    version = torch.__version__.split("+")[0]
    assert f"`pip install torch_npu=={version}`" in reason()
    with pytest.raises(BackendUnavailableError, match="backend 'npu' cannot run here: torch_npu is not installed"):
        choose("npu")
    with pytest.raises(BackendUnavailableError, match="torch_npu is not installed"):
        load("npu")()


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libhccl.so: cannot open shared object file: No such file or directory"),
        OSError("libascendcl.so: cannot open shared object file"),
        RuntimeError("the versions of torch and torch_npu do not fit"),
    ],
)
def test_not_importable(package: pytest.MonkeyPatch, error: Exception) -> None:
    """A package that raises at its import is told from one that is missing, with what it said; it is tried once."""
    tries: list[str] = []
    really = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name != "torch_npu":
            return really(name, package)
        tries.append(name)
        raise error

    package.setattr(importlib, "import_module", refuse)
    for _ in range(2):
        assert str(error) in (said := reason())
        assert "set_env.sh" in said
    assert tries == ["torch_npu"]


def test_no_device(package: pytest.MonkeyPatch) -> None:
    """Package and driver without a device: the command that shows what the driver sees."""
    package.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    present(package, is_available=lambda: False)
    assert "but no NPU" in reason()
    assert "npu-smi" in reason()


def test_hidden_devices(package: pytest.MonkeyPatch) -> None:
    """Devices that the environment hides are told from devices that are not there."""
    package.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    present(package, is_available=lambda: False)
    assert "ASCEND_RT_VISIBLE_DEVICES='9'" in reason()


def test_driver_does_not_start(package: pytest.MonkeyPatch) -> None:
    """A driver that raises is told with its own words."""

    def refuse() -> bool:
        message = "Initialize:NPUToolkit.cpp NPU function error: aclInit, error code is 500000\nand a page more"
        raise RuntimeError(message)

    present(package, is_available=refuse)
    assert "error code is 500000" in reason()
    assert "page" not in reason()


def test_forked(package: pytest.MonkeyPatch) -> None:
    """A process that was forked after the NPU was used is told to be spawned."""
    present(package, _is_in_bad_fork=lambda: True)
    assert "'spawn'" in reason()


def test_forked_unseen(package: pytest.MonkeyPatch) -> None:
    """So is one whose fork torch_npu has not seen, since os.fork tells it nothing."""
    present(package, _original_pid=os.getpid() + 1)
    assert "'spawn'" in reason()
    present(package, _original_pid=os.getpid())
    assert not reason()


def test_something_else_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program put in the package's place, as tests of others do, is no NPU, and breaks nothing off."""
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    npu_presence._import.cache_clear()
    assert reason() == "what is imported as torch_npu brings no torch.npu"
    npu_presence._import.cache_clear()


def test_present(package: pytest.MonkeyPatch) -> None:
    """With all of it, the backend can run here."""
    present(package)
    assert load("npu").is_available()


def test_not_imported_before_it_is_asked_for() -> None:
    """Neither the package nor the adapter's own module brings torch_npu in."""
    program = (
        "import sys; import slotgraph; from slotgraph.backends import load, names; load('npu'); load('accelerator'); "
        "assert 'npu' in names(); sys.exit('torch_npu' in sys.modules)"
    )
    environment = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False, capture_output=True)  # noqa: S603
    assert not done.returncode, done.stderr.decode()
