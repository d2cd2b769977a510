"""A whole step under each habit of serving loops, beside the same step without it: held to the oracle, and timed.

pytest tests/benchmarks/test_habits.py -s
"""

import pytest
from rich.console import Console

from slotgraph.backends import load
from slotgraph.runners.commands.bench import FULL, Effort, measured_habits, show_habits


@pytest.mark.parametrize("name", ["cpu", "cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_no_habit_leaves_its_lowering(name: str, pytestconfig: pytest.Config) -> None:
    """All habits by all lowerings, round by round in turn."""
    available = load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    shown = pytestconfig.getoption("capture") == "no"
    rows = measured_habits(load(name)(), FULL if shown else Effort(rounds=1, steps=2, device_rounds=0))
    show_habits(rows, Console(width=180))
    assert {(row["habit"], row["lowering"]): row["detours"] for row in rows if row["detours"]} == {}
