"""Device adapters: one file a device over one abstract base, found by name and imported on first use.

Those of this package are known by name, those of others by their entry points.
"""

import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Final

from ..dataflow import log
from ..dataflow.capabilities import AUTO, DEVICE, HOST, Capabilities, Placement
from ..dataflow.errors import BackendUnavailableError, ConfigError, hint
from ..dataflow.lowering import LOWERINGS
from ..dataflow.packet import Upload
from .base import NO_PARAMETERS, Availability, Backend, Event, Fusion, Graph, Interruption, Memory

__all__ = [
    "DEVICE",
    "HOST",
    "NO_PARAMETERS",
    "Availability",
    "Backend",
    "Capabilities",
    "Event",
    "Fusion",
    "Graph",
    "Interruption",
    "Memory",
    "Placement",
    "Upload",
    "choose",
    "load",
    "names",
]

GROUP: Final = "slotgraph.backends"
_OWN: Final = {
    "cpu": "cpu:CpuBackend",
    "cpu-capture": "cpu_capture:CpuCaptureBackend",
    "cuda": "cuda:CudaBackend",
    "npu": "npu:NpuBackend",
    "accelerator": "accelerator:AcceleratorBackend",
}


_MEANT: Final = {
    **dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "amd"), "cuda"),
    "ascend": "npu",
    **dict.fromkeys(("xpu", "mps", "musa", "hpu", "intel"), "accelerator"),
}
"""Other names of devices, and the backend that each is meant for."""


def names() -> tuple[str, ...]:
    """Every backend that can be named: this package's own, then those found through entry points."""
    return tuple(_points())


def load(name: str) -> type[Backend]:
    """A backend's class, imported on first use. BackendUnavailableError where there is none of that name."""
    points = _points()
    if name not in points:
        near = f"did you mean {_MEANT[name.lower()]!r}?" if name.lower() in _MEANT else hint(name, points)
        raise BackendUnavailableError(
            f"there is no backend {name!r}{f' ({near})' if near else ''}; known here: {', '.join(points)}"
        )
    try:
        found = points[name].load()
    except Exception as error:  # whatever a package raises that has no place here
        raise BackendUnavailableError(f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailableError(f"backend {name!r}: {found!r} is not a subclass of slotgraph.backends.Backend")
    return found


def _points() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points by name; those of this package first, whose names no other takes."""
    own = [importlib.metadata.EntryPoint(name, f"{__package__}.{value}", GROUP) for name, value in _OWN.items()]
    others = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point for point in (*own, *(other for other in others if other.name not in _OWN))}


def name_of(backend: str | Backend | type[Backend]) -> str:
    """A backend's name, as it is written in a configuration. ConfigError where it is none of these."""
    if isinstance(backend, str):
        return backend
    kind = backend if isinstance(backend, type) else type(backend)
    if not issubclass(kind, Backend) or inspect.isabstract(kind):
        raise ConfigError(f"backend: expected a backend's name, a Backend or a class of them, got {backend!r:.80}")
    return backend.name


def choose(backend: str | Backend | type[Backend]) -> Backend:
    """A backend by name or class, or "auto" for the available one of highest priority; an instance as it is.

    Raises BackendUnavailableError with the reason where it cannot run here, ConfigError for anything else, and for a
    backend whose record does not suit it.
    """
    name = name_of(backend)
    if isinstance(backend, Backend):
        return _checked(backend)
    if name == AUTO:
        return _checked(next(_available())())
    kind = load(backend) if isinstance(backend, str) else backend
    if not (available := kind.is_available()):
        raise BackendUnavailableError(f"backend {kind.name!r} cannot run here: {available.reason}")
    return _checked(kind())


def _checked(backend: Backend) -> Backend:
    """The backend. ConfigError where its record is none, or names what needs a verb that it has not."""
    record, kind = backend.capabilities, type(backend)
    if not isinstance(record, Capabilities):
        raise ConfigError(f"backend {kind.name!r}: expected a Capabilities as its record, got {type(record).__name__}")
    fused = next((lowering for lowering in record.lowerings if LOWERINGS[lowering].has_kernel), None)
    uploads = "packed_uploads" if record.packed_uploads else fused
    if (fused and kind.fusion is Backend.fusion) or (uploads and kind.upload is Backend.upload):
        verbs = f"upload() and fusion(), for {fused}" if fused else "upload(), for packed_uploads"
        raise ConfigError(f"backend {kind.name!r}: its record asks for verbs that it does not define: {verbs}")
    return backend


def _available() -> Iterator[type[Backend]]:
    """Every backend that can run here, the highest priority first; one that breaks when it is asked is passed over.

    Each is asked only when its turn comes: to ask may import a package that takes seconds.
    """
    kinds = list[type[Backend]]()
    for name in names():
        try:
            kinds.append(load(name))
        except BackendUnavailableError as error:
            log.warning("backend_broken", backend=name, reason=str(error))
    for kind in sorted(kinds, key=lambda kind: kind.priority, reverse=True):
        try:
            if kind.is_available():
                yield kind
        except Exception as error:  # noqa: BLE001 - likewise
            log.warning("backend_broken", backend=kind.name, reason=f"{type(error).__name__}: {error}")
