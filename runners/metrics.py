"""Runners' books for Prometheus; needs prometheus-client, which the extra `metrics` brings."""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast, get_args

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import ConfigError
from .runner import Runner
from .statistics import EVERY, Counts, FillTimesData, Statistics, Why

if TYPE_CHECKING:
    from prometheus_client.core import Metric

INSTALL: Final = "pip install 'slotgraph[metrics]'"
FITS: Final = "fits"
"""The reason of a step that a graph did, in a `Decision` as in the label."""
_PER_SECOND: Final = 1_000_000
Samples: TypeAlias = Iterable[tuple[Any, ...]]
"""The values of the labels of one metric, and what it counts."""


class Collector:
    """Gives the books of some runners to a registry of prometheus-client, whenever it asks.

    Each runner has a label, its keyword's name, and is held weakly: once it is gone, so are its metrics. Nothing is
    spent between scrapes.
    """

    def __init__(self, **runners: Runner[Any]) -> None:
        _client()
        self._runners: dict[str, weakref.ref[Runner[Any]]] = {}
        for label, runner in runners.items():
            self.add(label, runner)

    def add(self, label: str, runner: Runner[Any]) -> None:
        """Tell of one more runner, from the next scrape on. ConfigError where another has that label."""
        if self._living().get(label, runner) is not runner:
            raise ConfigError(f"label {label!r} is that of another runner: give each its own")
        self._runners[label] = weakref.ref(runner)

    def _living(self) -> dict[str, Runner[Any]]:
        return {label: runner for label, one in self._runners.copy().items() if (runner := one()) is not None}

    def describe(self) -> "Iterable[Metric]":
        """The metrics without a value, for a registry that wants to know their names."""
        return _metrics({})

    def collect(self) -> "Iterable[Metric]":
        """The metrics of all runners that are still there."""
        return _metrics({label: runner.stats() for label, runner in self._living().items()})


def exposition(**runners: Runner[Any]) -> str:
    """The books of some runners in Prometheus's text format, each under its label."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector(**runners))
    text: str = client.generate_latest(registry).decode()
    return text


def _client() -> Any:
    """The library. ModuleNotFoundError that names the command, where it is not here."""
    try:
        import prometheus_client.core  # noqa: PLC0415 - optional
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"metrics need prometheus-client: {INSTALL}", name=error.name) from error
    return prometheus_client


def _metrics(books: Mapping[str, Statistics]) -> "Iterator[Metric]":
    """All metrics, of each runner by its label."""
    core = _client().core
    for kind, name, what, labels, samples in _TABLE:
        made = getattr(core, f"{kind}MetricFamily")(f"slotgraph_{name}", what, labels=["runner", *labels])
        for runner, stats in books.items():
            for values, *numbers in samples(stats):
                made.add_metric([runner, *values], *numbers)
        yield made


def _ways(stats: Statistics) -> Iterator[tuple[tuple[str, str, str], tuple[int, int, int], FillTimesData | None]]:
    """Labels of each way that steps go, their steps, live and padded rows, and what some of their fills took.

    Every bucket that was captured and every reason is there, so that counts begin at zero.
    """
    path, none = next(iter(stats["steps"])), Counts().times()
    times, eager = stats["fills"]["buckets"], stats["fills"]["eager"]
    for bucket in sorted({*stats["capture"]["buckets"], *stats["buckets"]}):
        one = stats["buckets"].get(bucket)
        numbers = (0, 0, 0) if one is None else (one["steps"], one["live"], one["padded"])
        yield (path, str(bucket), FITS), numbers, times.get(bucket, none)
    for why in get_args(Why):
        if why != FITS:
            unpadded = stats["eager"].get(why, {"steps": 0, "live": 0})
            yield ("eager", "", why), (unpadded["steps"], unpadded["live"], unpadded["live"]), eager.get(why)


def _counted(place: int) -> Callable[[Statistics], Samples]:
    """Steps, live rows or padded rows of each way."""
    return lambda stats: ((labels, numbers[place]) for labels, numbers, _ in _ways(stats))


def _fills(stats: Statistics) -> Samples:
    """How many fills were timed, and how long they took together."""
    timed = ((labels, times) for labels, _, times in _ways(stats) if times is not None)
    return ((labels, times["count"], times["total"] / _PER_SECOND) for labels, times in timed)


def _forced(stats: Statistics) -> Samples:
    """Steps by the rank that forced them and why: each rank and reason, where ranks agree on steps at all."""
    ranks = stats["ranks"]
    for rank in range(0 if ranks["quiet"] else ranks["size"]):
        counts = ranks["forced"].get(rank, {})
        yield from (([str(rank), why], counts.get(why, 0)) for why in get_args(Why))


def _each(numbers: Callable[[Any], Mapping[str, float]]) -> Callable[[Statistics], Samples]:
    """A number for each value of one label."""
    return lambda stats: (([label], number) for label, number in numbers(stats).items())


def _one(*path: str) -> Callable[[Statistics], Samples]:
    """A number without a label."""
    return lambda stats: [((), functools.reduce(operator.getitem, path, cast("Any", stats)))]


def _memory(stats: Statistics) -> Mapping[str, float]:
    held = {kind: number for kind, number in stats["memory"].items() if kind not in ("shared", "total")}
    return {**held, "driver": stats["capture"]["driver"]}


def _buckets(stats: Statistics) -> Mapping[str, float]:
    return {"captured": len(stats["capture"]["buckets"]), "failed": len(stats["capture"]["failed"])}


_WAY: Final = ("path", "bucket", "reason")
_ROWS: Final = "Rows that steps were asked for: requests, or tokens where a prefill's inner layers are captured."
_FILLS: Final = f"What the host spent on fills, one in {EVERY} of them."
_LOWERINGS: Final = _each(lambda stats: {**dict.fromkeys(LADDER, 0), **stats["lowerings"]})
_TABLE: Final[tuple[tuple[str, str, str, Sequence[str], Callable[[Statistics], Samples]], ...]] = (
    ("Counter", "steps", "Steps that were done.", _WAY, _counted(0)),
    ("Counter", "live_rows", _ROWS, _WAY, _counted(1)),
    ("Counter", "padded_rows", "Rows that were computed for these, with padding.", _WAY, _counted(2)),
    ("Summary", "fill_seconds", _FILLS, _WAY, _fills),
    ("Counter", "fills", "Fills of buckets.", ["lowering"], _LOWERINGS),
    ("Counter", "capture_seconds", "Time that captures took.", [], _one("capture", "seconds")),
    ("Counter", "exchanges", "Exchanges of the runner's ranks.", [], _one("ranks", "exchanges")),
    ("Gauge", "memory_bytes", "Memory of its own.", ["kind"], _each(_memory)),
    ("Gauge", "shared_memory_bytes", "Memory of a pool that is used.", [], _one("memory", "shared")),
    ("Gauge", "graphs", "Graphs that were captured.", [], _one("capture", "graphs")),
    ("Gauge", "buckets", "Buckets that were captured, or failed.", ["state"], _each(_buckets)),
    ("Counter", "forced_steps", "Steps that all ranks ran as one of them had to.", ["rank", "reason"], _forced),
)
"""Kind, name, meaning, labels beside the runner's, and samples of each metric."""
