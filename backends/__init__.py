"""Device adapters: one file for each device over one abstract base, found by name and imported on first use.

The backends of this package have fixed names; those of other packages are found by their entry points.
"""

import importlib.metadata
import inspect
from collections.abc import Iterator
from typing import Final

from ..dataflow import environment, log
from ..dataflow.capabilities import AUTO, DEVICE, HOST, Capabilities, Placement
from ..dataflow.errors import BackendUnavailableError, ConfigError, hint
from ..dataflow.lowering import LOWERINGS
from ..dataflow.packet import Upload
from .base import NO_PARAMETERS, Availability, Backend, Event, Fusion, Graph, Interruption, Memory
from .ring import ring_on

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
    "ring_on",
]

GROUP: Final = "slotgraph.backends"
_OWN: Final = {
    name: importlib.metadata.EntryPoint(name, f"{__package__}.{value}", GROUP)
    for name, value in (
        ("cpu", "cpu:CpuBackend"),
        ("cpu-capture", "cpu_capture:CpuCaptureBackend"),
        ("cuda", "cuda:CudaBackend"),
        ("npu", "npu:NpuBackend"),
        ("accelerator", "accelerator:AcceleratorBackend"),
    )
}


_MEANT: Final = {
    **dict.fromkeys(("gpu", "nvidia", "rocm", "hip", "amd"), "cuda"),
    "ascend": "npu",
    **dict.fromkeys(("xpu", "mps", "musa", "hpu", "intel"), "accelerator"),
}
"""Other names of devices, and the backend that a user of the name probably means."""


def names() -> tuple[str, ...]:
    """Return the name of every backend: this package's own, then those found through entry points."""
    return (*_OWN, *_others())


def load(name: str) -> type[Backend]:
    """Return a backend's class, imported on first use. Raise BackendUnavailableError if there is none of that name."""
    point = _OWN.get(name) or _others().get(name)  # the metadata of all packages is read only where it must be
    if point is None:
        known = names()
        near = f"did you mean {_MEANT[name.lower()]!r}?" if name.lower() in _MEANT else hint(name, known)
        raise BackendUnavailableError(
            f"there is no backend {name!r}{f' ({near})' if near else ''}; known here: {', '.join(known)}"
        )
    try:
        found = point.load()
    except Exception as error:  # an import may raise any error
        raise BackendUnavailableError(f"backend {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendUnavailableError(f"backend {name!r}: {found!r} is not a subclass of slotgraph.backends.Backend")
    return found


def _others() -> dict[str, importlib.metadata.EntryPoint]:
    """Return other packages' entry points by name, but none that has a name of this package's own."""
    points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point for point in points if point.name not in _OWN}


def name_of(backend: str | Backend | type[Backend]) -> str:
    """Return a backend's name, as a configuration has it. Raise ConfigError for anything else."""
    if isinstance(backend, str):
        return backend
    kind = backend if isinstance(backend, type) else type(backend)
    if not issubclass(kind, Backend) or inspect.isabstract(kind):
        raise ConfigError(f"backend: expected a backend's name, a Backend or a class of them, got {backend!r:.80}")
    return backend.name


def choose(backend: str | Backend | type[Backend]) -> Backend:
    """Make a backend from its name or class. Return an instance as it is.

    For "auto", take the backend that SLOTGRAPH_BACKEND names, or the available one of highest priority.

    Raises BackendUnavailableError with the reason if the backend cannot run on this machine, and ConfigError for
    anything else, or if its record does not match its methods.
    """
    name = name_of(backend)
    if isinstance(backend, Backend):
        return _checked(backend)
    if name == AUTO:
        named = environment.text_of(environment.BACKEND) or AUTO
        if named == AUTO:
            return _checked(next(_available())())
        try:
            return choose(named)
        except BackendUnavailableError as error:
            raise BackendUnavailableError(f"{environment.BACKEND}: {error}") from error
    kind = load(backend) if isinstance(backend, str) else backend
    if not (available := kind.is_available()):
        raise BackendUnavailableError(f"backend {kind.name!r} cannot run here: {available.reason}")
    return _checked(kind())


def _checked(backend: Backend) -> Backend:
    """Return the backend.

    Raise ConfigError if its `capabilities` are no `Capabilities`, or promise a method that the class does not define.
    """
    record = backend.capabilities
    kind = type(backend)
    if not isinstance(record, Capabilities):
        raise ConfigError(f"backend {kind.name!r}: expected a Capabilities as its record, got {type(record).__name__}")
    fused = next((lowering for lowering in record.lowerings if LOWERINGS[lowering].has_kernel), None)
    uploads = "packed_uploads" if record.packed_uploads else fused
    if (fused and kind.fusion is Backend.fusion) or (uploads and kind.upload is Backend.upload):
        verbs = f"upload() and fusion(), for {fused}" if fused else "upload(), for packed_uploads"
        raise ConfigError(f"backend {kind.name!r}: its record asks for verbs that it does not define: {verbs}")
    return backend


def _available() -> Iterator[type[Backend]]:
    """Yield every backend that can run on this machine, the highest priority first, and skip any that raises.

    Each is tried only when it is needed, since trying may import a package that takes seconds.
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
