"""Graphs over several keys: buckets with sizes on several axes, variants of graphs, and one runner of several modes."""

from slotgraph import _publish
from slotgraph.runners.engine.selection import Variant, variant
from slotgraph.runners.grid import GraphRunner
from slotgraph.runners.modes import ModeRunner

__all__ = ["GraphRunner", "ModeRunner", "Variant", "variant"]

_publish(__name__)
