"""Runner options from a file, and their buckets."""

from slotgraph import _publish
from slotgraph.runners.engine.config import Buckets, RunnerConfig

__all__ = ["Buckets", "RunnerConfig"]

_publish(__name__)
