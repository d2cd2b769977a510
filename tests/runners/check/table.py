"""The table of planted bugs, as docs/checking.md must have it: the bug, what finds it, the slot and the message."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, Step, computed, copied
from slotgraph.runners.check.report import CheckReport
from tests.invariants.device import Device
from tests.runners.check.planted import OURS, Sound, runner_of, sound

PAGE: Final = Path(__file__).parents[3] / "docs" / "checking.md"
HEAD: Final = ("planted bug", "found by", "slot", "message")
CAPTURES: Final = "cpu-capture"
Row = tuple[str, ...]


def bucket_tokens(step: Step) -> int:
    """A count of padded rows, where one of live rows is due."""
    return step.padded(TOKENS)


class Counted(Sound):
    """With such a count."""

    count: torch.Tensor = computed(bucket_tokens, shape=1, dtype=torch.int64)


class Hosted(Inputs):
    """Lengths in the host's memory, which the graph copies to the device."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")


def frozen_number() -> CheckReport:
    """A number of the host's changes after capture."""
    host = {"scale": 2.0}
    runner = runner_of(lambda view: sound(view) * host["scale"], CAPTURES)
    host["scale"] = 3.0
    return _report(runner, "parity")


def count_of_the_bucket() -> CheckReport:
    """The step adds a count that is the bucket's."""
    return _report(runner_of(lambda view: sound(view) + view.count, CAPTURES, Counted), "parity")


def exchanged_tensor() -> CheckReport:
    """A bias is replaced by another tensor after capture."""
    held = {"bias": torch.ones(4)}
    runner = runner_of(lambda view: sound(view) + held["bias"], CAPTURES)
    held["bias"] = torch.zeros(4)
    return _report(runner, "addresses")


def moved_slot() -> CheckReport:
    """A slot's buffer is another tensor."""
    runner = runner_of(sound, CAPTURES)
    buffer = runner.graphs.buffers["weights"]
    buffer.tensor = buffer.tensor.clone()
    return _report(runner, "addresses")


def broken_ring() -> CheckReport:
    """Host memory that an upload reads is written again while the upload is in flight."""
    backend = Device("mark")
    runner = DecodeRunner(Sound, sound, buckets=[4, 8], backend=backend, lowering="in_graph", progress=False)
    runner.capture()
    with backend.later():
        return slotgraph.check(runner, only=("races",), progress=False, state=[])


def overtaken_copy() -> CheckReport:
    """A fill does not wait for the copy out of host memory that the last replay has yet to make."""
    backend = Device()

    def step(view: Hosted) -> torch.Tensor:
        return view.ids + view.lens.clone()

    runner = DecodeRunner(Hosted, step, buckets=[4, 8], backend=backend, lowering="in_graph", progress=False)
    runner.capture()
    hosts: Any = runner.graphs.filler.hosts
    hosts.wait = lambda: None
    with backend.later():
        return slotgraph.check(runner, _hosted, only=("races",), progress=False, state=[])


def _hosted(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randint(1, 99, (rows,), generator=generator) for name in ("ids", "lens")}


def _report(runner: Any, check: str) -> CheckReport:
    report: CheckReport = slotgraph.check(runner, only=(check,), progress=False)
    return report


OTHERS: Final[tuple[tuple[str, Callable[[], CheckReport]], ...]] = (
    ("a number of the host's, which the step reads, is frozen in the graph", frozen_number),
    ("a count is the bucket's, where the batch's is due", count_of_the_bucket),
    ("a tensor that the step reads is exchanged after capture", exchanged_tensor),
    ("the buffer of a slot is another one than at capture", moved_slot),
    ("host memory is written again while its upload is in flight", broken_ring),
    ("a fill overtakes a copy out of a slot in host memory", overtaken_copy),
)
"""Bugs that the other checks find."""


def rows_of() -> Iterator[Row]:
    """Each bug with the first finding that names it."""
    for bug in OURS:
        yield _row(bug.what, bug.report(CAPTURES, only=(bug.check,)))
    for what, make in OTHERS:
        yield _row(what, make())


def _row(what: str, report: CheckReport) -> Row:
    finding = report.findings[0]
    message = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", finding.message)
    return what, finding.check, f"`{finding.slot}`" if finding.slot else "-", message.replace("|", "\\|")


def table() -> list[str]:
    """The lines of the table."""
    rows = itertools.chain([HEAD, ("---",) * len(HEAD)], rows_of())
    return [f"| {' | '.join(row)} |" for row in rows]
