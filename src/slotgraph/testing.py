"""For your own test suite: an assertion, a Hypothesis strategy, and a benchmark. The pytest plugin has the fixtures."""

from slotgraph import _publish
from slotgraph.runners.testing.bench import bench
from slotgraph.runners.testing.fills import assert_fill_equals_oracle, batches

__all__ = ["assert_fill_equals_oracle", "batches", "bench"]

_publish(__name__)
