"""Statistics of runners for Prometheus. It needs prometheus-client, which the extra `metrics` installs."""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import ConfigError
from .engine.config import checked
from .engine.runner import Runner
from .engine.statistics import EVERY, Counts, Statistics, Why

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FITS: Final = "fits"
"""The reason of a step that a graph ran, in a `Decision` and in the label."""
_EAGER: Final = tuple(why for why in get_args(Why) if why != FITS)


class Collector:
    """Gives the statistics of some runners to a registry of prometheus-client, whenever it asks.

    Each runner has a label, its keyword's name, and is referred to weakly: once it is gone, so are its metrics. Nothing
    is spent between scrapes.
    """

    def __init__(self, **runners: Runner[Any]) -> None:
        _client()
        self._runners: dict[str, weakref.ref[Runner[Any]]] = {}
        for label, runner in runners.items():
            self.add(label, runner)

    def add(self, label: str, runner: Runner[Any]) -> None:
        """Add one more runner, from the next scrape on.

        Raise ConfigError if it is no runner, or another has the label.
        """
        checked("label", "a text", label, str)
        checked(f"what label {label!r} names", "a runner", runner, Runner)
        if self._living().get(label, runner) is not runner:
            raise ConfigError(f"label {label!r} is that of another runner: give each its own")
        self._runners[label] = weakref.ref(runner)

    def _living(self) -> dict[str, Runner[Any]]:
        return {label: runner for label, one in self._runners.copy().items() if (runner := one()) is not None}

    def describe(self) -> "Iterable[Metric]":
        """Return the metrics without a value, for a registry that wants to know their names."""
        return _metrics({})

    def collect(self) -> "Iterable[Metric]":
        """Return the metrics of all runners that still exist."""
        return _metrics({label: runner.stats() for label, runner in self._living().items()})


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
        said = "metrics need prometheus-client: pip install 'slotgraph[metrics]'"
        raise ModuleNotFoundError(said, name=error.name) from error
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


def _metrics(books: Mapping[str, Statistics]) -> "Iterable[Metric]":
    """Return all metrics, with those of each runner under its label."""
    core, made = _client().core, dict[str, Any]()
    for name, (kind, what, labels) in _TABLE.items():
        made[name] = getattr(core, f"{kind}MetricFamily")(f"slotgraph_{name}", what, labels=["runner", *labels])
    for runner, stats in books.items():
        for name, values, *numbers in _samples(stats):
            made[name].add_metric([runner, *values], *numbers)
    return made.values()


def _samples(stats: Statistics) -> Iterator[tuple[Any, ...]]:
    """Yield the name of each metric, the values of its labels, and its numbers, also if the count is zero."""
    path, fills, capture, ranks = next(iter(stats["steps"])), stats["fills"], stats["capture"], stats["ranks"]
    counted: dict[Any, Any] = {**stats["buckets"], **stats["eager"]}
    keys: list[Any] = [*sorted({*capture["buckets"], *stats["buckets"]}), *_EAGER]
    for key in keys:
        one, eager = counted.get(key, {}), key in _EAGER
        way = ("eager", "", key) if eager else (path, str(key), FITS)
        yield "steps", way, one.get("steps", 0)
        yield "live_rows", way, one.get("live", 0)
        yield "padded_rows", way, one.get("padded", one.get("live", 0))
        times: Any = fills["eager"].get(key) if eager else fills["buckets"].get(key, Counts().times())
        if times is not None:
            yield "fill_seconds", way, times["count"], times["total"] / 1_000_000
    numbers: dict[str, dict[str, Any]] = {
        "fills": {**dict.fromkeys(LADDER, 0), **stats["lowerings"]},
        "memory_bytes": {**stats["memory"], "driver": capture["driver"]},
        "buckets": {"captured": len(capture["buckets"]), "failed": len(capture["failed"])},
    }
    for name, of in numbers.items():
        yield from ((name, (label,), number) for label, number in of.items() if label not in ("shared", "total"))
    yield "capture_seconds", (), capture["seconds"]
    yield "exchanges", (), ranks["exchanges"]
    yield "shared_memory_bytes", (), stats["memory"]["shared"]
    yield "graphs", (), capture["graphs"]
    for rank in range(0 if ranks["quiet"] else ranks["size"]):
        yield from (
            ("forced_steps", (str(rank), why), ranks["forced"].get(rank, {}).get(why, 0)) for why in get_args(Why)
        )
