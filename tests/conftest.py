"""What all tests share: Hypothesis's profiles, quiet events, and the backends."""

import functools
import gc
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings

if TYPE_CHECKING:
    from slotgraph.backends.base import Backend

HERE = Path(__file__).parent
collect_ignore = ["typing"]  # only type-checked
SLOW = ("benchmarks", "examples", "ranks")
"""Folders whose tests are slow, all of them: each benchmark once, whole programs, and groups of processes."""

# Time says nothing on shared machines where torch's first calls are slow; and one backend for all examples is meant.
_CALM = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": _CALM}
settings.register_profile("few", max_examples=10, **_COMMON)  # what ran elsewhere, on one more device
settings.register_profile("quick", max_examples=50, **_COMMON)
settings.register_profile("thorough", max_examples=200, **_COMMON)
settings.register_profile("long", max_examples=5000, **_COMMON)  # games for a night
settings.register_profile("unshrunk", max_examples=50, phases=[Phase.explicit, Phase.generate], **_COMMON)  # faults
os.environ.pop("COLUMNS", None)  # tests tell how wide a table may be; workers of pytest-xdist are told 80
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the slow folders at once where nothing slow is asked for: they import what nobody else needs."""
    if config.option.markexpr == "not slow" and collection_path.parent == HERE and collection_path.name in SLOW:
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of those folders; of a backend that is not here, keep one test, which skips and says why."""
    kept, left, absent = list[pytest.Item](), list[pytest.Item](), set[str]()
    for item in items:
        if {*item.path.relative_to(item.config.rootpath).parts[:2]} & {*SLOW}:
            item.add_marker(pytest.mark.slow)
        name = getattr(getattr(item, "callspec", None), "params", {}).get("slotgraph_backend")
        (left if name in absent else kept).append(item)
        if name is not None and not _is_here(name):
            absent.add(name)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@functools.cache
def _is_here(name: str) -> bool:
    from slotgraph.backends import load, names  # noqa: PLC0415 - a test has asked for it

    return name not in names() or bool(load(name).is_available())


def _drop(_logger: object, _method: str, _event: MutableMapping[str, Any]) -> NoReturn:
    raise structlog.DropEvent


@pytest.fixture(autouse=True)
def _quiet_events() -> Iterator[None]:
    """Drop all events; a test that is about them uses structlog.testing.capture_logs."""
    logging.getLogger("slotgraph").setLevel(logging.NOTSET)  # programs that other tests ran may have set it
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _process_left_as_it_was() -> Iterator[None]:
    """Fail a test that leaves its process otherwise: with gradients off, inference mode on, or more garbage frozen."""
    torch = sys.modules.get("torch")
    frozen = gc.get_freeze_count()
    yield
    if gc.get_freeze_count() > frozen + 10_000:  # Python 3.12 itself freezes objects that live for good
        gc.unfreeze()
        pytest.fail("the test left objects frozen, which the garbage collector passes over from now on")
    if torch is not None and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        torch.set_grad_enabled(True)
        pytest.fail("the test left torch with gradients off or inference mode on")


@pytest.fixture
def _quick_collections() -> Iterator[None]:
    """For tests that collect garbage often: what was there before them is passed over."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def backend(slotgraph_backend: "Backend") -> "Backend":
    """Each backend that can run here, one test after the other: those of pyproject.toml, or SLOTGRAPH_TEST_BACKENDS."""
    return slotgraph_backend


@pytest.fixture
def backend_name(slotgraph_backend: "Backend") -> str:
    """The name of each."""
    return slotgraph_backend.name
