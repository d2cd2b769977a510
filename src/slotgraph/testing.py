"""For suites of one's own: an assertion and a Hypothesis strategy. The fixtures are the pytest plugin's."""

from slotgraph.runners.testing.fills import assert_fill_equals_oracle, batches

__all__ = ["assert_fill_equals_oracle", "batches"]
