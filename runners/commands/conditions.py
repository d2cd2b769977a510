"""What a reader must know to judge a run's figures: the machine, the device, and the versions of what drives it."""

import importlib.metadata
import platform
from typing import Any

import torch

from ...backends.base import Backend
from .timing import THREADS


def conditions_of(backend: Backend) -> dict[str, Any]:
    """Names and versions; None for what is not there."""
    return {
        "backend": backend.name,
        "device": str(backend.device),
        **_device(backend.device),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
        "threads": THREADS,
    }


def _device(device: torch.device) -> dict[str, Any]:
    """A CUDA device's name, and the CUDA versions of the driver and of torch."""
    if device.type != "cuda":
        return {"device_name": None, "driver": None, "cuda": None}
    return {
        "device_name": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def _driver() -> str | None:
    """The newest CUDA that the driver knows, as 13.0; None where torch cannot tell."""
    version: Any = getattr(torch._C, "_cuda_getDriverVersion", None)  # noqa: SLF001 - torch has no public name for it
    if version is None:
        return None
    number = int(version())
    return f"{number // 1000}.{number % 1000 // 10}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
