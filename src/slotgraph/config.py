"""Runner options from a file, and buckets: by default, and from the sizes of steps that were run."""

from slotgraph import _publish
from slotgraph.runners.engine.config import Buckets, RunnerConfig
from slotgraph.runners.engine.ladder import PlannedBuckets, plan_buckets

__all__ = ["Buckets", "PlannedBuckets", "RunnerConfig", "plan_buckets"]

_publish(__name__)
