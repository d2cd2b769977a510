"""What all tests share: Hypothesis's profiles, quiet events, and the backends."""

import importlib
import os
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pytest
import structlog
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from slotgraph.backends.base import Backend

collect_ignore = ["typing"]  # only type-checked

BACKENDS = tuple(os.environ.get("SLOTGRAPH_TEST_BACKENDS", "cpu,cpu-capture,cuda,npu").split(","))
"""The adapters that tests are run on, or those that the environment names; each skips where it cannot run."""

_MARKS = {"cuda": pytest.mark.cuda, "npu": pytest.mark.npu, "accelerator": pytest.mark.accelerator}

# Time says nothing on shared machines where torch's first calls are slow; and one backend for all examples is meant.
_CALM = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("quick", max_examples=50, deadline=None, suppress_health_check=_CALM)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_CALM)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def _drop(_logger: object, _method: str, _event: MutableMapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def _quiet_events() -> Iterator[None]:
    """Drop all events; a test that is about them uses structlog.testing.capture_logs."""
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()


@pytest.fixture(params=[pytest.param(name, marks=_MARKS.get(name, ())) for name in BACKENDS])
def backend_name(request: pytest.FixtureRequest) -> str:
    """The name of each backend that can run here, one test after the other; skips with the reason where one cannot."""
    name = cast("str", request.param)
    backends = importlib.import_module("slotgraph.backends")
    if name not in backends.names():
        pytest.skip(f"this release has no adapter for {name!r}")
    available = backends.load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return name


@pytest.fixture
def backend(backend_name: str) -> "Backend":
    """Each backend that can run here."""
    backends = importlib.import_module("slotgraph.backends")
    return cast("Backend", backends.load(backend_name)())
