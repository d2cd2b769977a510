"""Where events go: to structlog where it is configured, else to the logger `slotgraph`; never to standard output."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, DecodeRunner, Inputs, copied

PROGRAM = """
import json
import sys

import torch

from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, backends, copied
from slotgraph.pool import InputPool

{setup}

class Batch(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def step(view):
    return view.ids * 3


backends.choose("auto")
runner = DecodeRunner(Batch, step, buckets=[2, 4], backend="cpu-capture")
late = DecodeRunner(Batch, step, buckets=[2, 4], backend="cpu-capture", lazy=True)
eager = EagerRunner(Batch, step, backend="cpu")
pool = InputPool("a", "b")
members = [
    DecodeRunner(Batch, step, buckets=[2], backend="cpu-capture", sharing=True, phase=pool[one]) for one in ("a", "b")
]
outputs = []
for one in (runner, late, *members):
    one.capture()
for one in (runner, late, eager, *members):
    for rows in {rows}:
        outputs.append(one({{"ids": list(range(5, 5 + rows))}}).tolist())
    one.log_stats()
json.dump(outputs, sys.stdout)
"""


class Batch(Inputs):
    """One slot."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


def fall_back() -> None:
    """A step that makes events of all three levels: debug of the eager buffers, info of the capture, a warning."""
    runner = DecodeRunner(Batch, lambda view: view.ids * 3, buckets=[2], backend="cpu-capture", progress=False)
    runner.capture()
    assert runner({"ids": [5, 6, 7]}).tolist() == [15, 18, 21]


WANTED = [("info", "captured"), ("debug", "grown"), ("warning", "fallback")]


@pytest.fixture(autouse=True)
def _unconfigured(_quiet_events: None) -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


def printed(setup: str, *rows: int) -> tuple[Any, str]:
    """What the program prints as JSON, and what it writes to standard error."""
    program = [sys.executable, "-c", PROGRAM.format(setup=setup, rows=rows)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - ours
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_program_that_prints_json() -> None:
    """Captures, pools, grown buffers and statistics write nothing; warnings go to standard error, a line each."""
    outputs, errors = printed("", 1, 2, 5)
    assert outputs == [[15], [15, 18], [15, 18, 21, 24, 27]] * 5
    lines = errors.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fallback"] * 4
    assert "runner='DecodeRunner' why='too_large'" in lines[0]


def test_a_program_that_configures_logging() -> None:
    """The handlers, levels and formats of `logging` hold, for all events."""
    setup = "import logging; logging.basicConfig(format='%(name)s %(levelname)s %(event)s')"
    outputs, errors = printed(f"{setup}; logging.getLogger('slotgraph').setLevel('DEBUG')", 5)
    assert outputs == [[15, 18, 21, 24, 27]] * 5
    events = {"INFO": ("captured", "sealed", "statistics"), "DEBUG": ("grown",), "WARNING": ("fallback",)}
    wanted = {f"slotgraph {level} {event}" for level, names in events.items() for event in names}
    assert set(errors.splitlines()) == wanted


def test_records_have_the_keys(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """A record's message names event and keys; a handler finds the keys as attributes, and the caller's file."""
    caplog.set_level(logging.DEBUG, logger="slotgraph")
    fall_back()
    assert [(record.levelname.lower(), vars(record)["event"]) for record in caplog.records] == WANTED
    last = caplog.records[-1]
    assert (last.name, vars(last)["why"]) == ("slotgraph", "too_large")
    assert last.getMessage().startswith("fallback: runner='DecodeRunner' why='too_large' reason=")
    assert last.filename != "log.py"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("own", [True, False], ids=["a processor of the user's own", "by way of logging"])
def test_a_structlog_that_is_configured_later_is_used(caplog: pytest.LogCaptureFixture, *, own: bool) -> None:
    """What counts is how structlog is configured when the event happens; after it is reset, logging has them again."""
    entries: list[Any] = []

    def keep(_logger: object, method: str, event: MutableMapping[str, Any]) -> Any:
        entries.append((method, event["event"]))
        raise structlog.DropEvent

    fall_back()
    caplog.clear()
    if own:
        structlog.configure(processors=[keep])
    else:
        structlog.configure(
            processors=[structlog.stdlib.filter_by_level, structlog.stdlib.render_to_log_kwargs],
            logger_factory=structlog.stdlib.LoggerFactory(),
            wrapper_class=structlog.stdlib.BoundLogger,
        )
    fall_back()
    entries += [(record.levelname.lower(), record.getMessage()) for record in caplog.records]
    structlog.reset_defaults()
    caplog.clear()
    fall_back()
    assert [vars(record)["event"] for record in caplog.records] == ["fallback"]
    assert entries == WANTED[0 if own else 2 :]


def test_captured_logs_leave_no_trace(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """`capture_logs()` has the events; it leaves structlog with its defaults, which print, and they are not used."""
    with capture_logs() as events:
        fall_back()
    assert [(event["log_level"], event["event"]) for event in events] == WANTED
    assert not caplog.records
    fall_back()
    assert [vars(record)["event"] for record in caplog.records] == ["fallback"]
    assert capsys.readouterr() == ("", "")
