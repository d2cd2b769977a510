"""Options of runners from a file, and their buckets."""

from slotgraph.runners.config import Buckets, RunnerConfig

__all__ = ["Buckets", "RunnerConfig"]
