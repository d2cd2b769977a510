"""Fixtures of these tests."""

import pytest

from slotgraph.backends import choose
from slotgraph.runners.recording.recorder import Window


@pytest.fixture
def backend_cpu() -> Window:
    """What copies values of a runner on the CPU."""
    return Window(choose("cpu"), 1, 1 << 20)
