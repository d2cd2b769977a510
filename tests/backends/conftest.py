"""The backends that the contract is held to: this project's, and every other that is installed here."""

import os

import pytest

from slotgraph import backends
from slotgraph.backends import Backend
from tests.conftest import BACKENDS

OTHERS = (
    () if "SLOTGRAPH_TEST_BACKENDS" in os.environ else tuple(one for one in backends.names() if one not in BACKENDS)
)
_MARKS = {"cuda": pytest.mark.cuda, "npu": pytest.mark.npu, "accelerator": pytest.mark.accelerator}


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in (*BACKENDS, *OTHERS)])
def backend_name(request: pytest.FixtureRequest) -> str:
    """As the one for all tests, with the backends of other packages, found through their entry points."""
    name = str(request.param)
    if name not in backends.names():
        pytest.skip(f"this release has no adapter for {name!r}")
    available = backends.load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return name


@pytest.fixture
def interrupting(backend: Backend) -> Backend:
    """Each backend that can run here and says that it can interrupt a capture."""
    if type(backend).interrupt is Backend.interrupt:
        pytest.skip(f"{backend.name} cannot interrupt a capture")
    return backend
