"""Statistics of runners for Prometheus. It needs prometheus-client, which the extra `metrics` installs."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import ConfigError
from .engine.config import checked
from .engine.runner import ONE_RUNNER, Runner
from .engine.statistics import EVERY, Counts, Statistics, Why

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FITS: Final = "fits"
"""The reason of a step that a graph ran, in a `Decision` and in the label."""


class Collector:
    """Provides the statistics of some runners to a registry of prometheus-client.

    Each runner has its keyword's name as a label. The collector does not keep runners alive: the metrics of a freed
    runner end. It works only during scrapes.
    """

    def __init__(self, **runners: Runner[Any]) -> None:
        _client()
        self._runners = weakref.WeakValueDictionary[str, Runner[Any]]()
        for label, runner in runners.items():
            self.add(label, runner)

    def add(self, label: str, runner: Runner[Any]) -> None:
        """Add one more runner, from the next scrape on.

        Raise ConfigError if it is no runner, or another has the label.
        """
        checked("label", "a text", label, str)
        checked(f"what label {label!r} names", ONE_RUNNER, runner, Runner)
        if self._runners.setdefault(label, runner) is not runner:
            raise ConfigError(f"label {label!r} belongs to another runner: give each a different one")

    def describe(self) -> "Iterable[Metric]":
        """Return the metrics without values, from which a registry reads the names."""
        return _metrics({})

    def collect(self) -> "Iterable[Metric]":
        """Return the metrics of all runners that still exist."""
        return _metrics({label: runner.stats() for label, runner in dict(self._runners).items()})


def exposition(**runners: Runner[Any]) -> str:
    """Return the statistics of some runners in Prometheus's text format, each under its label."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector(**runners))
    return str(client.generate_latest(registry), "utf-8")


def _client() -> Any:
    """Import the library. Raise ModuleNotFoundError, which names the command to install it, if it is missing."""
    try:
        import prometheus_client.core  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        reason = "metrics need prometheus-client: pip install 'slotgraph[metrics]'"
        raise ModuleNotFoundError(reason, name=error.name) from error
    return prometheus_client


_WAY: Final = ("path", "bucket", "reason")
_ROWS: Final = "Rows that steps were asked for: requests, or tokens where a prefill's inner layers are captured."
_TABLE: Final[Mapping[str, tuple[str, str, Sequence[str]]]] = {
    "steps": ("Counter", "Steps that were done.", _WAY),
    "live_rows": ("Counter", _ROWS, _WAY),
    "padded_rows": ("Counter", "Rows that were computed for these, with padding.", _WAY),
    "fill_seconds": ("Summary", f"What the host spent on fills, one in {EVERY} of them.", _WAY),
    "fills": ("Counter", "Fills of buckets.", ["lowering"]),
    "capture_seconds": ("Counter", "Time that captures took.", []),
    "exchanges": ("Counter", "Exchanges of the runner's ranks.", []),
    "memory_bytes": ("Gauge", "Memory of its own.", ["kind"]),
    "shared_memory_bytes": ("Gauge", "Memory of a pool that is used.", []),
    "graphs": ("Gauge", "Graphs that were captured.", []),
    "buckets": ("Gauge", "Buckets that were captured, or failed.", ["state"]),
    "forced_steps": ("Counter", "Steps that all ranks ran as one of them had to.", ["rank", "reason"]),
}
"""The kind of each metric, its meaning, and its labels besides the runner's."""


def _metrics(statistics: Mapping[str, Statistics]) -> "Iterable[Metric]":
    """Yield all metrics, each with the samples of every runner under its label."""
    samples = [(runner, *sample) for runner, stats in statistics.items() for sample in _samples(stats)]
    for name, (kind, what, labels) in _TABLE.items():
        family = getattr(_client().core, f"{kind}MetricFamily")(f"slotgraph_{name}", what, labels=["runner", *labels])
        for runner, of, values, *numbers in samples:
            if of == name:
                family.add_metric([runner, *values], *numbers)
        yield family


def _samples(stats: Statistics) -> Iterator[tuple[Any, ...]]:
    """Yield the name of each metric, the values of its labels, and its numbers, also if the count is zero."""
    path = next(iter(stats["steps"]))
    fills = stats["fills"]
    capture = stats["capture"]
    ranks = stats["ranks"]
    ways: dict[tuple[str, str, str], tuple[Any, Any]] = {}  # counts, and times of fills
    for bucket in sorted({*capture["buckets"], *stats["buckets"]}):
        times = fills["buckets"].get(bucket, Counts().times())
        ways[path, str(bucket), FITS] = stats["buckets"].get(bucket, {}), times
    for why in get_args(Why):
        if why != FITS:
            ways["eager", "", why] = stats["eager"].get(why, {}), fills["eager"].get(why)
    for way, (counts, times) in ways.items():
        live = counts.get("live", 0)
        yield "steps", way, counts.get("steps", 0)
        yield "live_rows", way, live
        yield "padded_rows", way, counts.get("padded", live)
        if times is not None:
            yield "fill_seconds", way, times["count"], times["total"] / 1_000_000
    for lowering in LADDER:
        yield "fills", [lowering], stats["lowerings"].get(lowering, 0)
    for kind in ("inputs", "graphs", "outputs", "uploads", "eager"):
        yield "memory_bytes", [kind], stats["memory"][kind]
    yield "memory_bytes", ["driver"], capture["driver"]
    yield "shared_memory_bytes", [], stats["memory"]["shared"]
    yield "graphs", [], capture["graphs"]
    yield "buckets", ["captured"], len(capture["buckets"])
    yield "buckets", ["failed"], len(capture["failed"])
    yield "capture_seconds", [], capture["seconds"]
    yield "exchanges", [], ranks["exchanges"]
    for rank in range(0 if ranks["quiet"] else ranks["size"]):
        for why in get_args(Why):
            yield "forced_steps", [str(rank), why], ranks["forced"].get(rank, {}).get(why, 0)
