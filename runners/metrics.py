"""Runners' books for Prometheus; needs prometheus-client, which the extra `metrics` brings."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias, get_args

from ..dataflow.capabilities import LADDER
from ..dataflow.errors import ConfigError
from .runner import Runner
from .statistics import EVERY, FillTimes, FillTimesData, Statistics, Why

if TYPE_CHECKING:
    from prometheus_client.core import Metric

INSTALL: Final = "pip install 'slotgraph[metrics]'"
FITS: Final = "fits"
"""The reason of a step that a graph did, in a `Decision` as in the label."""
EDGES: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""Upper bounds of the histogram of fills, in microseconds: bounds of `FillTimes` too, so that no bin is split."""
_PER_SECOND: Final = 1_000_000
Samples: TypeAlias = Iterable[tuple[Sequence[str], Sequence[Any]]]
"""Values of one metric by the values of its labels."""


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
        if label is None:
            kind = runner.parts.name
            numbered = (kind if number == 1 else f"{kind}-{number}" for number in range(1, len(self._runners) + 2))
            label = next(name for name in numbered if name not in self._runners)
        elif self._living().get(label, runner) is not runner:
            raise ConfigError(f"label {label!r} is that of another runner: give each its own")
        self._runners[label] = weakref.ref(runner)
        return label

    def _living(self) -> dict[str, Runner[Any]]:
        return {label: runner for label, one in self._runners.copy().items() if (runner := one()) is not None}

    def describe(self) -> "Iterable[Metric]":
        """The metrics without a value, for a registry that wants to know their names."""
        return _metrics({})

    def collect(self) -> "Iterable[Metric]":
        """The metrics of all runners that are still there."""
        return _metrics({label: runner.stats() for label, runner in self._living().items()})


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
            for values, numbers in samples(stats):
                made.add_metric([runner, *values], *numbers)
        yield made


def _ways(stats: Statistics) -> Iterator[tuple[tuple[str, str, str], tuple[int, int, int], FillTimesData | None]]:
    """Labels of each way that steps go, their steps, live and padded rows, and what some of their fills took.

    Every bucket that was captured and every reason is there, so that counts begin at zero.
    """
    path, none = next(iter(stats["steps"])), FillTimes().as_data()
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
    return lambda stats: ((labels, [numbers[place]]) for labels, numbers, _ in _ways(stats))


def _fills(stats: Statistics) -> Samples:
    """How many fills took at most as long as each edge, and at last all; and how long they took together."""
    for labels, _, times in _ways(stats):
        if times is not None:
            bins = [(bound, count) for bound, count in times["histogram"] if bound is not None]
            upto = [(str(edge / _PER_SECOND), sum(n for bound, n in bins if bound <= edge)) for edge in EDGES]
            yield labels, [[*upto, ("+Inf", times["count"])], times["total"] / _PER_SECOND]


def _forced(stats: Statistics) -> Samples:
    """Steps by the rank that forced them and why: each rank and reason, where ranks agree on steps at all."""
    ranks = stats["ranks"]
    for rank in range(0 if ranks["quiet"] else ranks["size"]):
        counts = ranks["forced"].get(rank, {})
        yield from (([str(rank), why], [counts.get(why, 0)]) for why in get_args(Why))


def _each(numbers: Mapping[str, float]) -> Samples:
    return [([label], [number]) for label, number in numbers.items()]


def _memory(stats: Statistics) -> Samples:
    held = {kind: number for kind, number in stats["memory"].items() if kind not in ("shared", "total")}
    return _each({**held, "driver": stats["capture"]["driver"]})


_WAY: Final = ("path", "bucket", "reason")
_TABLE: Final[tuple[tuple[str, str, str, Sequence[str], Callable[[Statistics], Samples]], ...]] = (
    ("Counter", "steps", "Steps that were done.", _WAY, _counted(0)),
    (
        "Counter",
        "live_rows",
        "Rows that steps were asked for: requests, or tokens where a prefill's inner layers are captured.",
        _WAY,
        _counted(1),
    ),
    ("Counter", "padded_rows", "Rows that were computed for these, with padding.", _WAY, _counted(2)),
    ("Histogram", "fill_seconds", f"What the host spent on fills, one in {EVERY} of them.", _WAY, _fills),
    (
        "Counter",
        "fills",
        "Fills of buckets.",
        ["lowering"],
        lambda stats: _each({**dict.fromkeys(LADDER, 0), **stats["lowerings"]}),
    ),
    (
        "Counter",
        "detours",
        "Fills by a later lowering than the runner's.",
        ["reason"],
        lambda stats: _each({"foreign_stream": 0, **stats["detours"]}),
    ),
    ("Counter", "capture_seconds", "Time that captures took.", [], lambda stats: [([], [stats["capture"]["seconds"]])]),
    (
        "Counter",
        "exchanges",
        "Exchanges of the runner's ranks.",
        [],
        lambda stats: [([], [stats["ranks"]["exchanges"]])],
    ),
    ("Gauge", "memory_bytes", "Memory of its own.", ["kind"], _memory),
    (
        "Gauge",
        "shared_memory_bytes",
        "Memory of a pool that is used.",
        [],
        lambda stats: [([], [stats["memory"]["shared"]])],
    ),
    ("Gauge", "graphs", "Graphs that were captured.", [], lambda stats: [([], [stats["capture"]["graphs"]])]),
    (
        "Gauge",
        "buckets",
        "Buckets that were captured, or failed.",
        ["state"],
        lambda stats: _each({"captured": len(stats["capture"]["buckets"]), "failed": len(stats["capture"]["failed"])}),
    ),
    ("Counter", "forced_steps", "Steps that all ranks ran as one of them had to.", ["rank", "reason"], _forced),
)
"""Kind, name, meaning, labels beside the runner's, and samples of each metric."""
