"""One runner of several modes: whole steps, pieces and eager steps over one declaration and one set of buffers."""

from slotgraph import _publish
from slotgraph.runners.modes import ModeRunner

__all__ = ["ModeRunner"]

_publish(__name__)
