"""Options of runners from a file, and their buckets."""

from slotgraph.runners.buckets import Buckets
from slotgraph.runners.config import RunnerConfig

__all__ = ["Buckets", "RunnerConfig"]
