"""Fixtures of these tests."""

import pytest

from slotgraph.backends import choose
from slotgraph.runners.recording.keeping import Keeper


@pytest.fixture
def backend_cpu() -> Keeper:
    """What copies values of a runner on the CPU."""
    return Keeper(choose("cpu"), 1 << 20)
