"""The books of every kind of runner, its metrics and its events: what is counted, told and logged at any time."""

import ast
import gc
import json
import logging
import re
import sys
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from slotgraph import EagerRunner
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import ConfigError
from slotgraph.runners.engine.runner import Runner
from slotgraph.runners.engine.statistics import EVERY, FIRST, Statistics, Why
from slotgraph.runners.metrics import Collector, exposition
from tests.runners.kinds import EVERY_KIND, Act, act, added_by, anew, books_of, counted, schedules
from tests.runners.models import PlainInputs, plain_runner, plain_step, random_batch

each_kind = pytest.mark.parametrize(("kind", "lowering"), EVERY_KIND)
Labels = tuple[tuple[str, str], ...]
Parsed = dict[str, dict[Labels, float]]


def labels_of(**labels: str) -> Labels:
    """All labels of a sample, in order."""
    return tuple(sorted({"runner": "mine", **labels}.items()))


def parsed(text: str) -> Parsed:
    """Samples by name and labels."""
    found: Parsed = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            key = labels_of(**sample.labels)
            assert key not in found.setdefault(sample.name, {}), "said twice"
            found[sample.name][key] = sample.value
    return found


def told(path: str, stats: Statistics) -> Parsed:
    """What metrics must tell of a runner, from its books, but for the times of fills."""
    ways: dict[Labels, Any] = {}
    nothing = {"steps": 0, "live": 0, "padded": 0}
    memory, capture = {**stats["memory"], "driver": stats["capture"]["driver"]}, stats["capture"]
    buckets, failed = capture["buckets"], capture["failed"]
    for size in {*capture["buckets"], *stats["buckets"]}:
        ways[labels_of(path=path, bucket=str(size), reason="fits")] = stats["buckets"].get(size, nothing)
    for why in typing.get_args(Why)[1:]:
        counts: Any = stats["eager"].get(why, nothing)
        ways[labels_of(path="eager", bucket="", reason=why)] = {**counts, "padded": counts["live"]}
    del memory["total"], memory["shared"]
    found: dict[str, dict[Labels, float]] = {
        "steps_total": {way: counts["steps"] for way, counts in ways.items()},
        "live_rows_total": {way: counts["live"] for way, counts in ways.items()},
        "padded_rows_total": {way: counts["padded"] for way, counts in ways.items()},
        "fills_total": {labels_of(lowering=name): stats["lowerings"].get(name, 0) for name in LADDER},
        "capture_seconds_total": {labels_of(): capture["seconds"]},
        "exchanges_total": {labels_of(): 0},
        "memory_bytes": {labels_of(kind=kind): count for kind, count in memory.items()},
        "shared_memory_bytes": {labels_of(): stats["memory"]["shared"]},
        "graphs": {labels_of(): capture["graphs"]},
        "buckets": {labels_of(state=one): len(of) for one, of in (("captured", buckets), ("failed", failed))},
    }
    return {f"slotgraph_{name}": samples for name, samples in found.items()}


@each_kind
@given(schedule=schedules)
@settings(max_examples=8)
def test_every_step_is_counted(cpu: str, kind: str, lowering: str, schedule: list[tuple[Act, int]]) -> None:
    """Of every kind of runner, by shortcut, watched or not: what was done is counted, and what was refused is not."""
    one = counted(kind, cpu, lowering)
    before = one.runner.stats()
    act(one, schedule)
    after = one.runner.stats()
    books = books_of(after)
    assert books == books_of(before) + added_by(one, schedule)
    assert sum(after["steps"].values()) == sum(count for key, count in books.items() if key[0] == "steps")
    assert after["capture"]["seconds"] >= before["capture"]["seconds"]
    memory = after["memory"]
    assert sum(memory.values()) == 2 * memory["total"] + memory["shared"]
    json.dumps(after, allow_nan=False)
    found, path = parsed(exposition(mine=one.runner)), next(iter(after["steps"]))
    wanted = told(path, after)
    assert {name: samples for name, samples in found.items() if not name.startswith("slotgraph_fill_seconds")} == wanted
    fills = after["fills"]
    every = [(path, str(size), "fits", times) for size, times in fills["buckets"].items()]
    for of, bucket, reason, times in every + [("eager", "", why, times) for why, times in fills["eager"].items()]:
        way = labels_of(path=of, bucket=bucket, reason=reason)
        assert found["slotgraph_fill_seconds_count"][way] == times["count"]
        assert found["slotgraph_fill_seconds_sum"][way] == pytest.approx(times["total"] / 1e6)


@each_kind
def test_fills_are_timed(cpu: str, kind: str, lowering: str) -> None:
    """Of every kind of runner the second fill is timed, and then one in so many, for the bucket that it was of."""
    one = anew(kind, cpu, lowering)
    for _ in range(3 + EVERY):
        one.runner(one.batch(2))
    fills = one.runner.stats()["fills"]
    (times,) = fills["buckets"].values() if one.buckets else fills["eager"].values()
    assert times["count"] == 2
    assert times["mean"] == times["total"] / 2 > 0
    assert fills["every"] == EVERY


def test_metrics_tell_captures_and_memory(cpu: str) -> None:
    """Buckets, graphs, seconds and bytes are those of the report; larger buffers of eager steps are told apart."""
    runner = plain_runner(cpu)
    stats, report = runner.stats(), runner.report
    assert report is not None
    capture = {"buckets": [4, 8], "failed": {}, "graphs": 2, "seconds": report.seconds, "driver": report.driver}
    capture |= {"functions": {}}  # none is compiled here
    assert stats["capture"] == capture
    assert (stats["memory"]["total"], stats["memory"]["eager"]) == (report.memory.total, 0)
    runner(random_batch(30, seed=1))
    grown = runner.stats()["memory"]
    assert grown["total"] == stats["memory"]["total"] + grown["eager"] > stats["memory"]["total"]


def test_one_event_has_all_counts(cpu: str) -> None:
    """Books are logged when someone asks for it, by the runner's name."""
    for runner in (plain_runner(cpu), EagerRunner(PlainInputs, plain_step, backend=cpu)):
        anyone: Runner[Any] = runner
        anyone(random_batch(3, seed=1))
        with capture_logs() as events:
            anyone.log_stats()
        assert events == [dict(anyone.stats(), event="statistics", log_level="info", runner=type(runner).__name__)]


@pytest.mark.parametrize("lowering", ["foreach", "in_graph"])
def test_captures_in_a_fill_are_no_time_of_fills(cpu: str, lowering: str) -> None:
    """A bucket that is captured when its first batch comes, or what fills it by itself, takes none of a fill's time."""
    runner = plain_runner(cpu, lazy=True, lowering=lowering)
    for _ in range(FIRST - 1):
        runner(random_batch(3, 1))
    runner.fill(random_batch(7, 2))
    runner(random_batch(7, 3))
    assert runner.stats()["fills"]["buckets"][8]["count"] == 0
    for seed in range(EVERY):
        runner.replay(runner.fill(random_batch(7, seed)))
    assert runner.stats()["fills"]["buckets"][8]["count"] == 1


def test_statistics_can_be_read_while_steps_run(cpu: str) -> None:
    """Another thread may read the books and the metrics all the time: no count ever falls, and none is lost."""
    runner, done = plain_runner(cpu, lowering="in_graph"), threading.Event()
    seen: list[Statistics] = []

    def read() -> None:
        while not done.is_set():
            seen.append(runner.stats())
            assert exposition(mine=runner)

    reader = threading.Thread(target=read)
    reader.start()
    steps = 0
    while steps < 200 or len(seen) < 4:
        runner(random_batch(1 + steps * 7 % 9, seed=steps % 3))
        steps += 1
    done.set()
    reader.join()
    for totals in ([sum(stats[of].values()) for stats in (*seen, runner.stats())] for of in ("steps", "lowerings")):
        assert totals == sorted(totals)
        assert len(set(totals)) > 2
    assert sum(runner.stats()["steps"].values()) == steps


@pytest.mark.usefixtures("_quick_collections")
def test_a_dropped_runner_leaves_the_metrics(cpu: str) -> None:
    """A registry keeps no runner alive: what is gone is told of no more, and the others go on."""
    registry, collector = CollectorRegistry(), Collector()
    registry.register(collector)
    kept, dropped = plain_runner(cpu), plain_runner(cpu)
    collector.add("kept", kept)
    collector.add("dropped", dropped)
    with pytest.raises(ConfigError, match=r"^label 'dropped' belongs to another runner: give each a different one"):
        collector.add("dropped", kept)

    def names() -> set[str]:
        return {dict(key)["runner"] for key in parsed(generate_latest(registry).decode())["slotgraph_steps_total"]}

    assert names() == {"kept", "dropped"}
    del dropped
    gc.collect()
    kept(random_batch(3, seed=1))
    assert names() == {"kept"}
    registry.unregister(collector)
    assert generate_latest(registry) == b""


def test_metrics_without_the_library_say_what_to_install(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    """Where prometheus-client is not installed, the command that installs it is named."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for use in (exposition, Collector):
        with pytest.raises(ModuleNotFoundError, match=r"prometheus-client: pip install 'slotgraph\[metrics\]'"):
            use(mine=plain_runner(cpu))


ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", re.MULTILINE)


def logged() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name, level and explicit keys of each event in the code."""
    for path in [path for folder in ("dataflow", "backends", "runners") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
            match node:
                case ast.Call(ast.Attribute(ast.Name("log"), level), [ast.Constant(name), *_], keywords):
                    yield str(name), level, frozenset(one.arg for one in keywords if one.arg is not None)


def test_the_table_of_events_is_that_of_the_code() -> None:
    """What is logged is told, at that level and with those keys, none of which a LogRecord has; and the other way."""
    page = (ROOT / "docs" / "observe.md").read_text(encoding="utf-8").split("## Events")[1].split("\n## ")[0]
    table = {name: (level, frozenset(re.findall(r"`(\w+)`", keys))) for name, level, keys in _ROW.findall(page)}
    assert {name: level for name, (level, _) in table.items()} == {name: level for name, level, _ in logged()}
    assert {name: keys - table[name][1] for name, _, keys in logged() if keys - table[name][1]} == {}
    runner = EagerRunner(PlainInputs, plain_step, backend="cpu")
    keys = {"event", *runner.stats()}.union(*(keys for _, keys in table.values()))
    assert keys & {*vars(logging.makeLogRecord({})), "message", "asctime"} == set()
