"""What is measured on: the backend that every machine has, and CUDA where there is a device."""

import pytest

from slotgraph import backends


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend_name(request: pytest.FixtureRequest) -> str:
    """The name of a backend; skips with the reason where it cannot run."""
    name = str(request.param)
    available = backends.load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return name
