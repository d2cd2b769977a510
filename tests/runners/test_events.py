"""Events: the table of docs/statistics.md has every one that the code logs, with its level and its keys."""

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from slotgraph import EagerRunner
from tests.runners.models import PlainInputs, plain_step

ROOT = Path(__file__).parents[2]
LOGGERS = ("log",)
LEVELS = ("debug", "info", "warning", "error", "critical", "exception")
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| .* \| (.*) \|$", re.MULTILINE)
_KEY = re.compile(r"`(\w+)`")


def logged() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Name, level and explicit keys of each event in the code."""
    for folder in ("dataflow", "backends", "runners"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), path)):
                level = _level(node.func) if isinstance(node, ast.Call) else None
                if isinstance(node, ast.Call) and level is not None:
                    name = node.args[0]
                    assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: an event's name is a plain string"
                    keys = frozenset(one.arg for one in node.keywords if one.arg is not None)
                    yield str(name.value), level, keys


def _level(function: ast.expr) -> str | None:
    """The level that a call logs at, if it logs."""
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    return function.attr if function.value.id in LOGGERS and function.attr in LEVELS else None


def told() -> dict[str, tuple[str, frozenset[str]]]:
    """Level and keys of each event in the table."""
    page = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8").split("## Events")[1].split("\n## ")[0]
    return {name: (level, frozenset(_KEY.findall(keys))) for name, level, keys in _ROW.findall(page)}


def test_the_table_has_every_event() -> None:
    """What is logged is told, and what is told is logged, at that level."""
    assert {name: level for name, (level, _) in told().items()} == {name: level for name, level, _ in logged()}


def test_the_table_has_every_key() -> None:
    """Keys that the code names are told."""
    table = told()
    assert {name: sorted(keys - table[name][1]) for name, _, keys in logged() if keys - table[name][1]} == {}


def test_events_go_one_way() -> None:
    """One module logs: it decides between structlog and logging, and no other imports either."""
    imports = re.compile(r"^\s*(?:import|from) (?:structlog|logging)\b", re.MULTILINE)
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("dataflow", "backends", "runners", "src")
        for path in (ROOT / folder).rglob("*.py")
        if imports.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"dataflow/log.py"}


def test_keys_can_be_attributes_of_a_record() -> None:
    """Keys become attributes of a LogRecord, which has its own and refuses them."""
    runner = EagerRunner(PlainInputs, plain_step, backend="cpu")
    keys = {"event", *runner.stats()}.union(*(keys for _, keys in told().values()))
    assert keys & {*vars(logging.makeLogRecord({})), "message", "asctime"} == set()
