"""For suites of one's own: an assertion and Hypothesis strategies. The fixtures are the pytest plugin's."""

from slotgraph.runners.testing.fills import Turn, assert_fill_equals_oracle, batches, schedules

__all__ = ["Turn", "assert_fill_equals_oracle", "batches", "schedules"]
