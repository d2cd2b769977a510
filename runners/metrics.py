"""Runners' books for Prometheus; needs prometheus-client, which the extra `metrics` brings."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

import attrs

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import ConfigError
from .coordination import RanksData
from .decision import EVERY, EagerData, FillTimes, FillTimesData, Why
from .runner import Runner
from .statistics import Statistics

if TYPE_CHECKING:
    from prometheus_client.core import Metric

INSTALL: Final = "pip install 'slotgraph[metrics]'"
FITS: Final = "fits"
"""The reason of a step that a graph did, in a `Decision` as in the label."""
EDGES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of the histogram of fills, in microseconds: bounds of `FillTimes` too, so that no bin is split."""
_PER_SECOND: Final = 1_000_000
_WAY: Final = ("runner", "path", "bucket", "reason")
_COUNTED: Final = (
    ("steps", "Steps that were done."),
    ("live_rows", "Rows that steps were asked for: requests, or tokens where a prefill's inner layers are captured."),
    ("padded_rows", "Rows that were computed for these, with padding."),
)
Values: TypeAlias = Callable[[Statistics], Mapping[str, float]]
"""Numbers of one runner by the value of a label; by an empty one, where there is no label beside the runner's."""


@attrs.frozen
class _Way:
    """Steps of one runner that went one way: their labels, their counts, and what some of their fills took."""

    labels: tuple[str, str, str, str]
    steps: int
    live: int
    padded: int
    times: FillTimesData | None = None


class Collector:
    """Gives the books of some runners to a registry of prometheus-client, whenever it asks.

    Each runner has a label, its keyword's name; those without one are told by their kind, with a number from the
    second of a kind on. It is held weakly: once a runner is gone, so are its metrics. Nothing is spent between scrapes.
    """

    def __init__(self, *runners: Runner[Any], **named: Runner[Any]) -> None:
        _client()
        self._runners: dict[str, weakref.ref[Runner[Any]]] = {}
        for label, runner in named.items():
            self.add(runner, label)
        for runner in runners:
            self.add(runner)

    def add(self, runner: Runner[Any], label: str | None = None) -> str:
        """Tell of one more runner, from the next scrape on; its label. ConfigError where another has that label."""
        living = {name: found for name, one in self._runners.items() if (found := one()) is not None}
        if label is None:
            kind = runner.parts.name
            numbered = (kind if number == 1 else f"{kind}-{number}" for number in range(1, len(self._runners) + 2))
            label = next(name for name in numbered if name not in self._runners)
        elif living.get(label, runner) is not runner:
            message = f"label {label!r} is that of another runner: give each its own"
            raise ConfigError(message)
        self._runners[label] = weakref.ref(runner)
        return label

    def describe(self) -> "Iterable[Metric]":
        """The metrics without a value, for a registry that wants to know their names."""
        return _metrics({})

    def collect(self) -> "Iterable[Metric]":
        """The metrics of all runners that are still there."""
        found = {label: runner for label, one in self._runners.copy().items() if (runner := one()) is not None}
        return _metrics({label: runner.stats() for label, runner in found.items()})


def exposition(*runners: Runner[Any], **named: Runner[Any]) -> str:
    """The books of some runners in Prometheus's text format; labels as a `Collector` gives them."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(Collector(*runners, **named))
    text: str = client.generate_latest(registry).decode()
    return text


def _client() -> Any:
    """The library. ModuleNotFoundError that names the command, where it is not here."""
    try:
        import prometheus_client  # noqa: PLC0415 - optional
        import prometheus_client.core  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        message = f"metrics need prometheus-client: {INSTALL}"
        raise ModuleNotFoundError(message, name=error.name) from error
    return prometheus_client


def _metrics(books: Mapping[str, Statistics]) -> "Iterator[Metric]":
    """All metrics, of each runner by its label."""
    core = _client().core
    ways = [way for label, stats in books.items() for way in _ways(label, stats)]
    yield from _of_steps(core, ways)
    kinds: tuple[tuple[Any, str, str, str, Values], ...] = (
        (core.CounterMetricFamily, "fills", "Fills of buckets.", "lowering", _lowerings),
        (core.CounterMetricFamily, "detours", "Fills by a later lowering than the runner's.", "reason", _detours),
        (core.CounterMetricFamily, "capture_seconds", "Time that captures took.", "", _capture_seconds),
        (core.CounterMetricFamily, "exchanges", "Exchanges of the runner's ranks.", "", _exchanges),
        (core.GaugeMetricFamily, "memory_bytes", "Memory of its own.", "kind", _memory),
        (core.GaugeMetricFamily, "shared_memory_bytes", "Memory of a pool that is used.", "", _shared),
        (core.GaugeMetricFamily, "graphs", "Graphs that were captured.", "", _graphs),
        (core.GaugeMetricFamily, "buckets", "Buckets that were captured, or failed.", "state", _buckets),
    )
    for family, name, what, label, values in kinds:
        made = family(f"slotgraph_{name}", what, labels=["runner", label] if label else ["runner"])
        for runner, stats in books.items():
            for value, number in values(stats).items():
                made.add_metric([runner, value] if label else [runner], number)
        yield made
    yield _forced(core, books)


def _forced(core: Any, books: Mapping[str, Statistics]) -> "Metric":
    """Steps by the rank that forced them and why: each rank and reason, where ranks agree on steps at all."""
    what = "Steps that all ranks ran as one of them had to."
    made = core.CounterMetricFamily("slotgraph_forced_steps", what, labels=["runner", "rank", "reason"])
    for runner, stats in books.items():
        for rank, why, steps in _forcing(stats["ranks"]):
            made.add_metric([runner, str(rank), why], steps)
    metric: Metric = made
    return metric


def _forcing(ranks: RanksData) -> Iterator[tuple[int, str, int]]:
    for rank in range(0 if ranks["quiet"] else ranks["size"]):
        counts = ranks["forced"].get(rank, {})
        yield from ((rank, why, counts.get(why, 0)) for why in get_args(Why))


def _of_steps(core: Any, ways: Sequence[_Way]) -> "Iterator[Metric]":
    """What is counted for each bucket and each reason."""
    families = [core.CounterMetricFamily(f"slotgraph_{name}", what, labels=_WAY) for name, what in _COUNTED]
    fills = core.HistogramMetricFamily(
        "slotgraph_fill_seconds", f"What the host spent on fills, one in {EVERY} of them.", labels=_WAY
    )
    for way in ways:
        for family, number in zip(families, (way.steps, way.live, way.padded), strict=True):
            family.add_metric(way.labels, number)
        if way.times is not None:
            fills.add_metric(way.labels, _cumulated(way.times), way.times["total"] / _PER_SECOND)
    yield from families
    yield fills


def _ways(runner: str, stats: Statistics) -> Iterator[_Way]:
    """Every bucket that was captured and every reason, so that a count begins at zero and not with its first step."""
    path, none = next(iter(stats["steps"])), FillTimes().as_data()
    times, eager = stats["fills"]["buckets"], stats["fills"]["eager"]
    for bucket in sorted({*stats["capture"]["buckets"], *stats["buckets"]}):
        labels, counts = (runner, path, str(bucket), FITS), stats["buckets"].get(bucket)
        numbers = (counts["steps"], counts["live"], counts["padded"]) if counts is not None else (0, 0, 0)
        yield _Way(labels, *numbers, times.get(bucket, none))
    for why in get_args(Why):
        if why != FITS:
            unpadded = stats["eager"].get(why, EagerData(steps=0, live=0))
            rows = unpadded["live"]
            yield _Way((runner, "eager", "", why), unpadded["steps"], rows, rows, eager.get(why))


def _cumulated(times: FillTimesData) -> list[tuple[str, float]]:
    """How many fills took at most as long as each edge, and at last all."""
    bins = times["histogram"]
    upto = [
        (str(edge / _PER_SECOND), sum(count for bound, count in bins if bound is not None and bound <= edge))
        for edge in EDGES
    ]
    return [*upto, ("+Inf", times["count"])]


def _lowerings(stats: Statistics) -> Mapping[str, float]:
    return {**dict.fromkeys(LADDER, 0), **stats["lowerings"]}


def _detours(stats: Statistics) -> Mapping[str, float]:
    return {"foreign_stream": 0, **stats["detours"]}


def _capture_seconds(stats: Statistics) -> Mapping[str, float]:
    return {"": stats["capture"]["seconds"]}


def _exchanges(stats: Statistics) -> Mapping[str, float]:
    return {"": stats["ranks"]["exchanges"]}


def _memory(stats: Statistics) -> Mapping[str, float]:
    held = {kind: number for kind, number in stats["memory"].items() if kind not in ("shared", "total")}
    return {**held, "driver": stats["capture"]["driver"]}


def _shared(stats: Statistics) -> Mapping[str, float]:
    return {"": stats["memory"]["shared"]}


def _graphs(stats: Statistics) -> Mapping[str, float]:
    return {"": stats["capture"]["graphs"]}


def _buckets(stats: Statistics) -> Mapping[str, float]:
    return {"captured": len(stats["capture"]["buckets"]), "failed": len(stats["capture"]["failed"])}
