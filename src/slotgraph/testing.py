"""For your own test suite: an assertion and a Hypothesis strategy. The pytest plugin has the fixtures."""

from slotgraph.runners.testing.fills import assert_fill_equals_oracle, batches

__all__ = ["assert_fill_equals_oracle", "batches"]
