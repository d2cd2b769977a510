"""Input memory that several runners share."""

from slotgraph.runners.pool import InputPool

__all__ = ["InputPool"]
