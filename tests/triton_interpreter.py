"""Triton's kernels in Triton's interpreter, which needs no device."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest


def need_triton() -> None:
    """Skip where there is none."""
    if sys.platform != "linux" or importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, or not made for this system: it is for Linux")


def need_interpreter() -> None:
    """Skip where Triton has no interpreter that does what tests need."""
    need_triton()
    triton = importlib.import_module("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        what = "its interpreter leaves the language changed for compiled kernels, and has no loops with today's numpy"
        pytest.skip(f"triton {triton.__version__}: {what}")


def interpreted(name: str) -> ModuleType:
    """A kernel's module once more, under another name, for Triton's interpreter. triton itself stays as it is."""
    need_interpreter()
    found = importlib.util.find_spec(name)
    assert found is not None
    spec: Any = importlib.util.spec_from_file_location(name + "_interpreted", found.origin)
    module: ModuleType = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module
