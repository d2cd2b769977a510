"""The pytest plugin of slotgraph.

It is loaded in every run, so it imports slotgraph and torch only if a test needs them.
"""

import functools
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotgraph.backends import Backend
    from slotgraph.runners.testing.timing import Figures

BACKEND: Final = "slotgraph_backend"
BACKENDS: Final = "slotgraph_backends"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the setting of a project."""
    group = parser.getgroup("slotgraph")
    group.addoption(
        "--slotgraph-backends",
        metavar="NAMES",
        help="backends that slotgraph_backend takes, by name with commas between; each that can run here if not "
        f"given, nor in SLOTGRAPH_TEST_BACKENDS or the setting {BACKENDS}",
    )
    parser.addini(BACKENDS, "backends that slotgraph_backend takes", type="args", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    what = "the backends that slotgraph_backend takes in this test; by default all"
    config.addinivalue_line("markers", f"{BACKENDS}(*names): {what}")
    if not config.pluginmanager.hasplugin("benchmark"):
        config.pluginmanager.register(_NoBenchmark())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses a backend once for each backend, with the project's marker of that name, if any."""
    if BACKEND in metafunc.fixturenames:
        known = {line.partition(":")[0].strip() for line in metafunc.config.getini("markers")}
        chosen = [
            pytest.param(name, marks=(getattr(pytest.mark, name),) if name in known else ())
            for name in _chosen(metafunc.config, metafunc.definition.get_closest_marker(BACKENDS))
        ]
        metafunc.parametrize(BACKEND, chosen, indirect=True)


def _chosen(config: pytest.Config, marker: pytest.Mark | None) -> list[str]:
    """Return the backends of one test: the marker's or the project's, limited to those that the run names."""
    from slotgraph.dataflow import environment  # noqa: PLC0415 - a test has asked for it

    run = _names(config.getoption(BACKENDS) or environment.text_of(environment.TEST_BACKENDS))
    if marker is None and (named := run or _names(" ".join(config.getini(BACKENDS)))):
        return named
    from slotgraph.backends import load, names  # noqa: PLC0415 - as above

    if marker is None:
        return [name for name in names() if load(name).is_available()]
    return [name for name in marker.args or names() if name in run or not run]


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split()


@pytest.fixture
def slotgraph_backend(request: pytest.FixtureRequest) -> "Backend":
    """Each backend of the run, one test after another.

    Skips, with the reason, if a named one cannot run on this machine.
    """
    from slotgraph.backends import load, names  # noqa: PLC0415 - as above
    from slotgraph.errors import BackendUnavailableError  # noqa: PLC0415 - as above

    name = str(request.param)
    try:
        kind = load(name)
    except BackendUnavailableError:
        if name in (known := names()):
            raise
        pytest.skip(f"there is no backend {name!r} here, only {', '.join(known)}")
    available = kind.is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    return kind()


class _NoBenchmark:
    """Stands for the fixture of pytest-benchmark if that is not installed."""

    @pytest.fixture
    def benchmark(self, request: pytest.FixtureRequest) -> None:
        """Fail the test with the package to install."""
        asked = " and ".join(sorted({"benchmark_fill", "benchmark_ways"} & {*request.fixturenames})) or "benchmark"
        pytest.fail(f"{asked} needs pytest-benchmark, which is not there: pip install 'slotgraph[testing]'")


@pytest.fixture
def benchmark_fill(benchmark: object, slotgraph_backend: "Backend") -> "Callable[..., Figures]":
    """Times a declaration's fills on each backend: `benchmark_fill(MyInputs, padded={BATCH: 256}, most=1.0)`."""
    from slotgraph.runners.testing.benchmarks import Timer  # noqa: PLC0415 - as above

    return functools.partial(Timer(benchmark).fill, slotgraph_backend)


@pytest.fixture
def benchmark_ways(benchmark: object, slotgraph_backend: "Backend") -> "Callable[..., Figures]":
    """Times your own variants in turn: `benchmark_ways({"by hand": fill, "ours": runner.fill}, batches, "fill")`."""
    from slotgraph.runners.testing.benchmarks import Timer  # noqa: PLC0415 - as above

    return functools.partial(Timer(benchmark).ways, slotgraph_backend)
