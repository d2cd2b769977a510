"""Input memory that several runners share."""

from slotgraph import _publish
from slotgraph.runners.engine.pool import InputPool

__all__ = ["InputPool"]

_publish(__name__)
