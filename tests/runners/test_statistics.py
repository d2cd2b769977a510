"""The books of every kind of runner, and its events: what is counted and logged, and may be read at any time."""

import ast
import json
import logging
import re
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from structlog.testing import capture_logs

from slotgraph import DecodeRunner, EagerRunner
from slotgraph.dataflow.errors import ReplayError
from slotgraph.pool import InputPool
from slotgraph.runners.metrics import exposition
from slotgraph.runners.runner import Runner
from slotgraph.runners.statistics import (
    EVERY,
    FIRST,
    BucketData,
    CaptureData,
    EagerData,
    FillsData,
    FillTimesData,
    Statistics,
)
from tests.runners.kinds import EVERY_KIND, Act, Books, act, anew, counted, schedules
from tests.runners.models import PlainInputs, plain_runner, plain_step, random_batch

each_kind = pytest.mark.parametrize(("kind", "lowering"), EVERY_KIND)
MEMORY = {"inputs", "graphs", "outputs", "uploads", "shared", "eager", "total"}


def assert_whole(stats: Statistics) -> None:
    """Every key is there, on every level, and JSON bears it."""
    assert stats.keys() == typing.get_type_hints(Statistics).keys()
    assert stats["fills"].keys() == FillsData.__annotations__.keys()
    assert stats["capture"].keys() == CaptureData.__annotations__.keys()
    assert stats["memory"].keys() == MEMORY
    assert (
        sum(bytes_ for kind, bytes_ in stats["memory"].items() if kind not in ("shared", "total"))
        == stats["memory"]["total"]
    )
    assert stats["buckets"].keys() == stats["fills"]["buckets"].keys()
    assert stats["eager"].keys() == stats["fills"]["eager"].keys()
    assert all(one.keys() == BucketData.__annotations__.keys() for one in stats["buckets"].values())
    assert all(one.keys() == EagerData.__annotations__.keys() for one in stats["eager"].values())
    for times in (*stats["fills"]["buckets"].values(), *stats["fills"]["eager"].values()):
        assert times.keys() == FillTimesData.__annotations__.keys()
    json.dumps(stats, allow_nan=False)


@each_kind
@given(schedule=schedules)
@settings(max_examples=8)
def test_every_step_is_counted(cpu: str, kind: str, lowering: str, schedule: list[tuple[Act, int]]) -> None:
    """Of every kind of runner, by shortcut, watched or not: what was done is counted, and what was refused is not."""
    one = counted(kind, cpu, lowering)
    before, books = one.runner.stats(), Books.of(one.runner.stats())
    act(one, schedule)
    books.expect(one, schedule)
    after = one.runner.stats()
    assert Books.of(after) == books
    assert sum(after["steps"].values()) == sum(count for (what, _), count in after_steps(books) if what == "steps")
    assert after["capture"]["seconds"] >= before["capture"]["seconds"]
    assert_whole(after)


def after_steps(books: Books) -> list[tuple[tuple[str, Any], int]]:
    """All that was counted."""
    return [*books.buckets.items(), *books.eager.items()]


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


def test_a_step_that_raises_is_none(cpu: str) -> None:
    """A step that raises, by a graph, by a shortcut or eagerly, is not counted, however often it is tried."""

    def step(view: PlainInputs) -> torch.Tensor:
        if view.live.item() == 3 and raises:
            raise ValueError("planted")
        return plain_step(view)

    raises = False
    for lowering in ("in_graph", "foreach"):
        runner = DecodeRunner(PlainInputs, step, buckets=[4], backend="cpu", lowering=lowering)
        runner.capture()
        for rows in (2, 3, 3, 3):
            runner(random_batch(rows, seed=rows))
        before, raises = runner.stats(), True
        for _ in range(3):
            with pytest.raises(ReplayError, match="planted"):
                runner(random_batch(3, seed=3))
        raises = False
        after = runner.stats()
        assert (after["steps"], after["buckets"]) == (before["steps"], before["buckets"])
    eager = EagerRunner(PlainInputs, step, backend=cpu)
    raises = True
    with pytest.raises(ValueError, match="planted"):
        eager(random_batch(3, seed=3))
    assert eager.stats()["steps"] == {"graph": 0, "eager": 0}


def test_captures_and_memory(cpu: str) -> None:
    """Buckets, graphs, seconds and bytes are those of the report; larger buffers of eager steps are told apart."""
    runner = plain_runner(cpu)
    stats, report = runner.stats(), runner.report
    assert report is not None
    assert stats["capture"] == {
        "buckets": [4, 8],
        "failed": {},
        "graphs": 2,
        "seconds": report.seconds,
        "driver": report.driver,
    }
    assert stats["memory"]["total"] == report.memory.total
    assert stats["memory"]["eager"] == 0
    runner(random_batch(30, seed=1))
    grown = runner.stats()["memory"]
    assert grown["eager"] > 0
    assert grown["total"] == stats["memory"]["total"] + grown["eager"]


def test_memory_of_a_pool(cpu: str) -> None:
    """What a pool's runners share is told by each of them, and is in no one's total."""
    pool = InputPool("first", "second")
    runners = [
        DecodeRunner(PlainInputs, plain_step, buckets=[8], backend=cpu, phase=pool[phase], sharing=True)
        for phase in ("first", "second")
    ]
    for runner in runners:
        runner.capture()
        runner(random_batch(5, seed=1))
    for stats in (runner.stats() for runner in runners):
        assert_whole(stats)
        assert stats["memory"]["shared"] > 0
        assert stats["memory"]["inputs"] == 0
        assert stats["buckets"][8]["live"] == 5


def test_one_event_with_all_books(cpu: str) -> None:
    """Books are logged when someone asks for it, by the runner's name."""
    for runner in (plain_runner(cpu), EagerRunner(PlainInputs, plain_step, backend=cpu)):
        anyone: Runner[Any] = runner
        anyone(random_batch(3, seed=1))
        with capture_logs() as events:
            anyone.log_stats()
        assert events == [
            {"event": "statistics", "log_level": "info", "runner": type(runner).__name__, **anyone.stats()}
        ]


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


@pytest.mark.usefixtures("_brisk_threads")
def test_read_while_steps_run(cpu: str) -> None:
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


ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", re.MULTILINE)


def logged() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name, level and explicit keys of each event in the code."""
    for path in [path for folder in ("dataflow", "backends", "runners") for path in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
            match node:
                case ast.Call(ast.Attribute(ast.Name("log"), level), [ast.Constant(name), *_], keywords):
                    yield str(name), level, frozenset(one.arg for one in keywords if one.arg is not None)


def test_the_table_of_events() -> None:
    """What is logged is told, at that level and with those keys, and what is told is logged.

    Keys become attributes of a LogRecord, which has its own and refuses them.
    """
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8").split("## Events")[1].split("\n## ")[0]
    table = {name: (level, frozenset(re.findall(r"`(\w+)`", keys))) for name, level, keys in _ROW.findall(page)}
    assert {name: level for name, (level, _) in table.items()} == {name: level for name, level, _ in logged()}
    assert {name: keys - table[name][1] for name, _, keys in logged() if keys - table[name][1]} == {}
    runner = EagerRunner(PlainInputs, plain_step, backend="cpu")
    keys = {"event", *runner.stats()}.union(*(keys for _, keys in table.values()))
    assert keys & {*vars(logging.makeLogRecord({})), "message", "asctime"} == set()


def test_events_go_one_way() -> None:
    """One module logs: it decides between structlog and logging, and no other imports either."""
    imports = re.compile(r"^\s*(?:import|from) (?:structlog|logging)\b", re.MULTILINE)
    files = [path for folder in ("dataflow", "backends", "runners", "src") for path in (ROOT / folder).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in files if imports.search(path.read_text(encoding="utf-8"))}
    assert found == {"dataflow/log.py"}
