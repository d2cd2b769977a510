"""What the tests of backends share."""

import pytest

from slotgraph.backends import Backend


@pytest.fixture
def interrupting(backend: Backend) -> Backend:
    """Each backend that can run here and says that it can interrupt a capture."""
    if type(backend).interrupt is Backend.interrupt:
        pytest.skip(f"{backend.name} cannot interrupt a capture")
    return backend
