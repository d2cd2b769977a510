"""Graphs over several keys: runners whose buckets have sizes on several axes, and variants of their graphs."""

from slotgraph import _publish
from slotgraph.runners.engine.selection import Variant, variant
from slotgraph.runners.grid import GraphRunner

__all__ = ["GraphRunner", "Variant", "variant"]

_publish(__name__)
