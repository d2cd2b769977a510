"""Whether an NPU can be used here, and what helps where it cannot. torch_npu is imported when someone asks."""

import functools
import importlib
import importlib.util
import os
import sys
from typing import Final

import torch

from .faults import first_line
from .npu_runtime import npu

_PACKAGE: Final = "torch_npu"
_VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"


def why_not() -> str:
    """Why no NPU can be used here; nothing where one can."""
    if sys.modules.get(_PACKAGE) is None and importlib.util.find_spec(_PACKAGE) is None:
        version = torch.__version__.split("+")[0]
        return f"torch_npu is not installed: `pip install torch_npu=={version}`, and CANN of the version that it needs"
    failed = _import()
    if failed:
        return failed
    if _is_forked():
        return "this process was forked after the NPU was used: start it with multiprocessing's 'spawn' method"
    try:
        return "" if npu().is_available() else _no_device()
    except RuntimeError as error:
        return f"the driver does not start: {first_line(error)}; `npu-smi info` shows what it sees"


@functools.cache  # a second try after a failure meets a package half imported, and says something else
def _import() -> str:
    """Import torch_npu; what went wrong, and the way out."""
    if getattr(torch, "npu", None) is not None:
        return ""
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"torch_npu is installed and cannot be imported ({first_line(error)}): install CANN, and `source "
            "set_env.sh` of its ascend-toolkit folder in the shell that starts this process"
        )
    return "" if getattr(torch, "npu", None) is not None else f"what is imported as {_PACKAGE} brings no torch.npu"


def _is_forked() -> bool:
    """Whether the NPU was used before a fork that made this process; torch_npu sees forks of multiprocessing alone."""
    started_in = getattr(npu(), "_original_pid", False)
    return bool(npu()._is_in_bad_fork()) or started_in not in {False, os.getpid()}  # noqa: SLF001 - no public name


def _no_device() -> str:
    visible = os.environ.get(_VISIBLE)
    if visible is not None:
        return f"no NPU is visible with {_VISIBLE}={visible!r}: unset it, or name a device; `npu-smi info` lists them"
    return "torch_npu and CANN are here, but no NPU: `npu-smi info` shows what the driver sees"
