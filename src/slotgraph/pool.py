"""Input memory that several runners share."""

from slotgraph.runners.engine.pool import InputPool

__all__ = ["InputPool"]
