"""What the tests on the stand-in runtime share: which mode this is, and that all skip where there is no stand-in."""

import ctypes
import importlib
import importlib.util
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def mode() -> str:
    """The mode of the stand-in, as its environment says it: zero devices, lazy streams, or eager ones."""
    if os.environ.get("STANDIN_NPU_COUNT") == "0":
        return "zero"
    return "lazy" if os.environ.get("STANDIN_LAZY") == "1" else "eager"


@cache
def lacking() -> str | None:
    """What is not there for these tests, if anything."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed here: make test-npu does that, into an environment of its own"
    try:
        runtime = ctypes.CDLL("libascendcl.so")
    except OSError:
        return "torch_npu finds no runtime: make test-npu builds the stand-in"
    return None if hasattr(runtime, "standin_submit") else "torch_npu finds a runtime that is not the stand-in"


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker, and start the device before any test, so that each finds it alike."""
    config.addinivalue_line(
        "markers", "modes(*names): the modes of the stand-in that a test runs in; eager if unmarked"
    )
    if lacking() is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a device's set-up warns of this and that
            importlib.import_module("torch_npu")
            if mode() != "zero":
                importlib.import_module("torch").zeros(1, device="npu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other modes; where there is no stand-in, all but one, which skips and says why."""
    ours, eager = [item for item in items if HERE in item.path.parents], pytest.mark.modes("eager").mark
    others = [item for item in ours if mode() not in (item.get_closest_marker("modes") or eager).args]
    others = others if lacking() is None else ours[1:]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup() -> None:
    """Skip where there is no stand-in: here, so that a report has one line for all of this folder."""
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def npu() -> Any:
    """The namespace torch.npu, which type checkers do not know."""
    return importlib.import_module("torch_npu").npu
