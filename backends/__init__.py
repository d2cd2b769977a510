"""Device adapters: one file a device over one abstract base, loaded by name on first use."""

from .base import (
    DEVICE,
    HOST,
    NO_PARAMETERS,
    Availability,
    Backend,
    Capabilities,
    Event,
    Fusion,
    Graph,
    Interruption,
    Memory,
    Placement,
    Upload,
)
from .registry import choose, load, names

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
