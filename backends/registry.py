"""Finding backends: those of this package by name, those of others by entry point, each loaded on first use."""

import difflib
import importlib
import importlib.metadata
from typing import Final

from ..dataflow.errors import BackendUnavailableError
from .base import Backend

GROUP: Final = "slotgraph.backends"
AUTO: Final = "auto"
_OWN: Final = {"cpu": "cpu", "cpu-capture": "cpu_capture"}


def names() -> tuple[str, ...]:
    """Every backend that can be named: this package's own, then those found through entry points."""
    return (*_OWN, *sorted(point.name for point in _plugins() if point.name not in _OWN))


def load(name: str) -> type[Backend]:
    """A backend's class, imported on first use. BackendUnavailableError where there is none of that name."""
    own = _OWN.get(name)
    found = importlib.import_module(f".{own}", __package__).Adapter if own else _plugin(name).load()
    if not (isinstance(found, type) and issubclass(found, Backend)):
        message = f"backend {name!r}: {found!r} is no subclass of slotgraph.backends.Backend"
        raise BackendUnavailableError(message)
    return found


def choose(backend: str | Backend) -> Backend:
    """A backend by name, or "auto" for the available one of highest priority; an instance as it is.

    Raises BackendUnavailableError with the reason where it cannot run here.
    """
    if isinstance(backend, Backend):
        return backend
    if backend == AUTO:
        return max((kind for kind in map(load, names()) if kind.is_available()), key=lambda kind: kind.priority)()
    kind = load(backend)
    available = kind.is_available()
    if not available:
        message = f"backend {backend!r} cannot run here: {available.reason}"
        raise BackendUnavailableError(message)
    return kind()


def _plugins() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=GROUP)


def _plugin(name: str) -> importlib.metadata.EntryPoint:
    for point in _plugins():
        if point.name == name:
            return point
    near = difflib.get_close_matches(name, names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    message = f"there is no backend {name!r}{hint} Known here: {', '.join(names())}"
    raise BackendUnavailableError(message)
