"""Where events go: to structlog where it is configured, else to the logger `slotgraph`; never to standard output."""

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from tests.runners.models import Ids, decoder

PROGRAM = """
import json, sys, torch, slotgraph
from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, backends, copied, standard
from slotgraph.pool import InputPool
from slotgraph.speculative import DraftRunner
{setup}
runs, outputs = [], []
class Batch(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
class Drafts(Inputs):
    topk_p: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.int64, pad=0)
def step(view):
    runs.append(print())
    return view.ids * 3

backends.choose("auto")
runner = DecodeRunner(Batch, step, buckets=[2, 4], backend="cpu-capture", debug=True)
late = DecodeRunner(Batch, step, buckets=[2, 4], backend="cpu-capture", lazy=True)
eager = EagerRunner(Batch, step, backend="cpu")
draft = DraftRunner(Drafts, lambda *_: (torch.rand(4, 9), None), topk=2, steps=2, buckets=[2], backend="cpu-capture")
pool, shared = InputPool("a", "b"), {{"buckets": [2], "backend": "cpu-capture", "sharing": True}}
members = [DecodeRunner(Batch, step, phase=pool[one], **shared) for one in ("a", "b")]
for one in (runner, late, draft, *members):
    one.capture()
slotgraph.check(runner)
slotgraph.record(runner, "{path}")
for one in (runner, late, eager, *members):
    for rows in (1, 2, 5):
        outputs.append(one({{"ids": list(range(5, 5 + rows)), "idx": 1}}).tolist())
    one.log_stats()
draft({{"topk_p": [[0.5, 0.2]], "topk_index": [[1, 2]]}})
try:
    DecodeRunner(Batch, lambda view: view.ids.tolist(), buckets=[2], backend="cpu-capture").capture()
except slotgraph.errors.SlotGraphError:
    json.dump([len(runs), outputs], sys.stdout)
"""


def fall_back() -> None:
    """A step that makes events of all three levels: debug of the eager buffers, info of the capture, a warning."""
    runner = decoder(Ids, lambda view: view.ids * 3, buckets=[2], backend="cpu-capture")
    assert runner({"ids": [5, 6, 7]}).tolist() == [15, 18, 21]


WANTED = [("info", "captured"), ("debug", "grown"), ("warning", "fallback")]


@pytest.fixture(autouse=True)
def _unconfigured(_quiet_events: None) -> Iterator[None]:
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()


SETUPS = {
    "nothing": "",
    "terminal": "",
    "logging": "import logging; logging.basicConfig(format='%(levelname)s %(event)s: '); "
    "logging.getLogger('slotgraph').setLevel('DEBUG')",
    "structlog": "import structlog; structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr), "
    "processors=[lambda _, level, event: f'{level.upper()} {event[\"event\"]}: '])",
}
"""By name what a program sets up."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SETUPS)
def test_standard_output_is_the_programs_alone(name: str, tmp_path: Path) -> None:
    """Standard output is the program's alone, prints of its steps too; standard error has what was asked for."""
    program = PROGRAM.format(setup=SETUPS[name], path=tmp_path / "last.safetensors")
    reader, writer = pty.openpty() if name == "terminal" else os.pipe()
    errors, given = b"", {**os.environ, "TERM": "xterm", "FORCE_COLOR": "1"}  # which makes no terminal of a pipe
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=writer) as child:
        os.close(writer)
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while part := os.read(reader, 4096):
                errors += part
        printed, _ = child.communicate(timeout=120)
    os.close(reader)
    runs, outputs = json.loads(printed)
    assert (printed.count(b"\n"), outputs) == (runs, [[15], [15, 18], [15, 18, 21, 24, 27]] * 5)
    assert (b"capturing bucket" in errors, b"\x1b" in errors) == (name == "terminal", name == "terminal")
    found = set(re.findall(r"(?m)(?:^|\x1b\[2K)((?:[A-Z]+ )?[a-z_]+): ", errors.decode()))
    warnings = {"fallback", "capture_failed", "misspelt_key"}
    every = {"INFO captured", "INFO sealed", "INFO statistics", "DEBUG grown", *(f"WARNING {one}" for one in warnings)}
    assert found == (every if SETUPS[name] else warnings)


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
