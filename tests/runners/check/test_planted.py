"""Each planted bug is found by its check, with its slot alone, in the words of the page."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, Inputs, Step, computed, copied
from slotgraph.runners.check.checks import CheckReport
from tests.invariants.device import Device
from tests.runners.check.planted import OURS, Planted, Sound, runner_of, sound

if TYPE_CHECKING:
    from slotgraph.backends import Backend

PAGE: Final = Path(__file__).parents[3] / "docs" / "verify.md"
CAPTURES: Final = "cpu-capture"


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
    runner = runner_of(sound, backend, buckets=[4, 8], lowering="in_graph")
    with backend.later():
        return _report(runner, "races", state=[])


def overtaken_copy() -> CheckReport:
    """A fill does not wait for the copy out of host memory that the last replay has yet to make."""
    backend = Device()
    runner = runner_of(lambda view: view.ids + view.lens.clone(), backend, Hosted, buckets=[4, 8], lowering="in_graph")
    runner.graphs.filler.hosts.wait = lambda: None

    def batches(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {name: torch.randint(1, 99, (rows,), generator=generator) for name in ("ids", "lens")}

    with backend.later():
        return _report(runner, "races", batches=batches, state=[])


def _report(runner: Any, check: str, **options: Any) -> CheckReport:
    return slotgraph.check(runner, only=(check,), progress=False, **options)


OTHERS: Final[tuple[tuple[str, Callable[[], CheckReport]], ...]] = (
    ("a number of the host's, which the step reads, is frozen in the graph", frozen_number),
    ("a count is the bucket's, where the batch's is due", count_of_the_bucket),
    ("a tensor that the step reads is exchanged after capture", exchanged_tensor),
    ("the buffer of a slot is another one than at capture", moved_slot),
    ("host memory is written again while its upload is in flight", broken_ring),
    ("a fill overtakes a copy out of a slot in host memory", overtaken_copy),
)
"""Bugs that the other checks find."""


def row_of(what: str, report: CheckReport) -> str:
    """A row of the page's table: the bug, the check that finds it, the slot and the message."""
    finding = report.findings[0]
    message = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", finding.message)
    slot = f"`{finding.slot}`" if finding.slot else "-"
    return f"| {what} | {finding.check} | {slot} | {message.replace('|', chr(92) + '|')} |"


def rows_of_page() -> Iterator[str]:
    """The rows of the table of planted bugs."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition("| planted bug | found by | slot | message |\n")
    yield from (line for line in table.partition("\n\n")[0].splitlines()[1:])


def assert_on_page(what: str, report: CheckReport) -> None:
    """The page has the row, but for numbers, in which devices and releases of torch differ."""
    (known,) = (row for row in rows_of_page() if row.startswith(f"| {what} | "))
    numberless = [re.sub(r"-?\d+(\.\d+)?|nan|-?inf", "#", row) for row in (row_of(what, report), known)]
    assert numberless[0] == numberless[1]


@pytest.mark.parametrize("bug", OURS, ids=lambda bug: bug.what)
def test_planted_bug_is_found(backend: "Backend", bug: Planted) -> None:
    """Its check finds it, and names its slot alone."""
    if bug.fatal and backend.device.type != "cpu":
        pytest.skip("it would stop the device for all tests to come")
    report = bug.report(backend)
    if bug.noted is not None and backend.device.type != "cpu":
        assert bug.noted in report.notes, str(report)
        return
    assert [finding.slot for finding in report.findings] == [bug.slot], str(report)
    assert report.findings[0].check == bug.check
    assert_on_page(bug.what, report)


@pytest.mark.parametrize(("what", "report"), OTHERS, ids=[what for what, _ in OTHERS])
def test_other_bugs_are_found(what: str, report: Callable[[], CheckReport]) -> None:
    """The other checks find theirs, once."""
    found = report()
    assert len(found.findings) == 1
    assert_on_page(what, found)


def test_the_page_has_no_other_rows() -> None:
    """Every row of it is planted here, in this order."""
    known = [*(bug.what for bug in OURS), *(what for what, _ in OTHERS)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows_of_page()] == known


def test_sound_runner_has_no_findings(backend: "Backend") -> None:
    """The same step without a bug passes all checks, with notes on what was held."""
    report = slotgraph.check(runner_of(sound, backend), progress=False)
    assert report.ok, str(report)
    assert report.notes == ("slot 'places' was held to its pad=0: it says where the step writes",)
    assert report.steps == dict.fromkeys(("poison", "parity", "addresses", "coverage", "races"), 13)
