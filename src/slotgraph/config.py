"""Runner options from a file, and their buckets."""

from slotgraph.runners.engine.config import Buckets, RunnerConfig

__all__ = ["Buckets", "RunnerConfig"]
