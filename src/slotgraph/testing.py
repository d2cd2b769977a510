"""For suites of one's own: assertions and Hypothesis strategies. The fixtures are the pytest plugin's."""

from slotgraph.runners.testing.assertions import assert_fill_equals_oracle, assert_padding_independent, assert_parity
from slotgraph.runners.testing.strategies import Turn, batches, schedules, sizes

__all__ = [
    "Turn",
    "assert_fill_equals_oracle",
    "assert_padding_independent",
    "assert_parity",
    "batches",
    "schedules",
    "sizes",
]
