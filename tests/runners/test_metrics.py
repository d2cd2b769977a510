"""Metrics: Prometheus's own parser reads from the text what the runners' books say, zeros among it."""

import gc
import sys
import typing
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import ConfigError
from slotgraph.runners.metrics import Collector, exposition
from slotgraph.runners.statistics import Statistics, Why
from tests.runners.kinds import EVERY_KIND, Act, act, counted, schedules
from tests.runners.models import plain_runner, random_batch

Parsed = dict[str, dict[tuple[str, ...], float]]
STEPS = "slotgraph_steps_total"
WAY = ("runner", "path", "bucket", "reason")
LABELS = {
    "slotgraph_steps_total": WAY,
    "slotgraph_live_rows_total": WAY,
    "slotgraph_padded_rows_total": WAY,
    "slotgraph_fill_seconds_count": WAY,
    "slotgraph_fill_seconds_sum": WAY,
    "slotgraph_fills_total": ("runner", "lowering"),
    "slotgraph_capture_seconds_total": ("runner",),
    "slotgraph_exchanges_total": ("runner",),
    "slotgraph_forced_steps_total": ("runner", "rank", "reason"),
    "slotgraph_memory_bytes": ("runner", "kind"),
    "slotgraph_shared_memory_bytes": ("runner",),
    "slotgraph_graphs": ("runner",),
    "slotgraph_buckets": ("runner", "state"),
}


def parsed(text: str) -> Parsed:
    """Samples by name and by the values of their labels, which are those that a name has."""
    found: Parsed = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            assert sample.labels.keys() == set(LABELS[sample.name])
            key = tuple(sample.labels[label] for label in LABELS[sample.name])
            assert key not in found.setdefault(sample.name, {}), "said twice"
            found[sample.name][key] = sample.value
    return found


def expected(label: str, path: str, captured: Sequence[int], stats: Statistics) -> Parsed:
    """What must be told of a runner, from its books, but for the times of fills."""
    steps: dict[tuple[str, ...], tuple[float, ...]] = {}
    nothing = {"steps": 0, "live": 0, "padded": 0}
    for size in {*captured, *stats["buckets"]}:
        counts: Any = stats["buckets"].get(size, nothing)
        steps[label, path, str(size), "fits"] = (counts["steps"], counts["live"], counts["padded"])
    for why in typing.get_args(Why)[1:]:
        counts = stats["eager"].get(why, nothing)
        steps[label, "eager", "", why] = (counts["steps"], counts["live"], counts["live"])
    memory, capture = {**stats["memory"], "driver": stats["capture"]["driver"]}, stats["capture"]
    del memory["total"], memory["shared"]
    return {
        "slotgraph_steps_total": {key: counts[0] for key, counts in steps.items()},
        "slotgraph_live_rows_total": {key: counts[1] for key, counts in steps.items()},
        "slotgraph_padded_rows_total": {key: counts[2] for key, counts in steps.items()},
        "slotgraph_fills_total": {(label, name): stats["lowerings"].get(name, 0) for name in LADDER},
        "slotgraph_capture_seconds_total": {(label,): capture["seconds"]},
        "slotgraph_exchanges_total": {(label,): 0},
        "slotgraph_memory_bytes": {(label, kind): count for kind, count in memory.items()},
        "slotgraph_shared_memory_bytes": {(label,): stats["memory"]["shared"]},
        "slotgraph_graphs": {(label,): capture["graphs"]},
        "slotgraph_buckets": {
            (label, "captured"): len(capture["buckets"]),
            (label, "failed"): len(capture["failed"]),
        },
    }


def assert_fills(label: str, stats: Statistics, found: Parsed) -> None:
    """The fills that were timed are those of the books, and took as long."""
    paths = [*stats["steps"]]
    every = [(paths[0], str(size), "fits", times) for size, times in stats["fills"]["buckets"].items()]
    every += [("eager", "", why, times) for why, times in stats["fills"]["eager"].items()]
    for path, bucket, reason, times in every:
        way = (label, path, bucket, reason)
        assert found["slotgraph_fill_seconds_count"][way] == times["count"]
        assert found["slotgraph_fill_seconds_sum"][way] == pytest.approx(times["total"] / 1e6)


@pytest.mark.parametrize(("kind", "lowering"), EVERY_KIND)
@given(schedule=schedules)
@settings(max_examples=4)
def test_text_is_what_the_books_say(cpu: str, kind: str, lowering: str, schedule: list[tuple[Act, int]]) -> None:
    """Of every kind of runner after any steps, with a count of zero for what did not happen yet."""
    one = counted(kind, cpu, lowering)
    act(one, schedule)
    text, stats = exposition(mine=one.runner), one.runner.stats()
    found, path = parsed(text), next(iter(stats["steps"]))
    assert found.keys() >= {"slotgraph_steps_total", "slotgraph_memory_bytes"}
    wanted = expected("mine", path, stats["capture"]["buckets"], stats)
    assert {name: samples for name, samples in found.items() if not name.startswith("slotgraph_fill_seconds")} == wanted
    assert_fills("mine", stats, found)


def test_every_name_is_there_before_the_first_step(cpu: str) -> None:
    """Counts begin at zero: of all buckets, reasons and lowerings, and of the fills of all buckets."""
    found = parsed(exposition(mine=plain_runner(cpu)))
    assert found.keys() == LABELS.keys() - {"slotgraph_forced_steps_total"}  # no one else is there to force any
    for name in ("steps_total", "live_rows_total", "padded_rows_total", "fills_total"):
        assert set(found[f"slotgraph_{name}"].values()) == {0}
    assert {key[2] for key in found["slotgraph_fill_seconds_count"]} == {"4", "8"}
    assert found["slotgraph_buckets"]["mine", "captured"] == 2


@pytest.mark.usefixtures("_quick_collections")
def test_a_dropped_runner(cpu: str) -> None:
    """A registry keeps no runner alive: what is gone is told of no more, and the others go on."""
    registry, collector = CollectorRegistry(), Collector()
    registry.register(collector)
    kept, dropped = plain_runner(cpu), plain_runner(cpu)
    collector.add("kept", kept)
    collector.add("dropped", dropped)
    with pytest.raises(ConfigError, match=r"^label 'dropped' is that of another runner: give each its own"):
        collector.add("dropped", kept)

    def names() -> set[str]:
        return {key[0] for key in parsed(generate_latest(registry).decode())[STEPS]}

    assert names() == {"kept", "dropped"}
    del dropped
    gc.collect()
    kept(random_batch(3, seed=1))
    assert names() == {"kept"}
    registry.unregister(collector)
    assert generate_latest(registry) == b""


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    """Where prometheus-client is not installed, the command that installs it is named."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for use in (exposition, Collector):
        with pytest.raises(
            ModuleNotFoundError, match=r"metrics need prometheus-client: pip install 'slotgraph\[metrics\]'"
        ):
            use(mine=plain_runner(cpu))
