"""Each planted bug is found, by its check, and named: the slot, the row, both values."""

import re
from typing import TYPE_CHECKING

import pytest

import slotgraph
from tests.runners.check.planted import OURS, Planted, runner_of, sound

if TYPE_CHECKING:
    from slotgraph.backends import Backend

each_bug = pytest.mark.parametrize("bug", OURS, ids=lambda bug: bug.what)


@each_bug
def test_planted_bug_is_found(backend: "Backend", bug: Planted) -> None:
    """Its check finds it, and names its slot alone."""
    if bug.fatal and backend.device.type != "cpu":
        pytest.skip("it would stop the device for all tests to come")
    report = bug.report(backend, only=(bug.check,))
    if bug.noted is not None and backend.device.type != "cpu":
        assert bug.noted in report.notes, str(report)
        return
    assert [finding.slot for finding in report.findings] == [bug.slot], str(report)
    assert re.search(bug.said, report.findings[0].message), str(report)
    assert report.findings[0].check == bug.check


def test_sound_runner_has_no_findings(backend: "Backend") -> None:
    """The same step without a bug passes all checks, with notes on what was held."""
    report = slotgraph.check(runner_of(sound, backend), progress=False)
    assert report.ok, str(report)
    assert report.notes == ("slot 'places' was held to its pad=0: it says where the step writes",)
    assert report.steps == dict.fromkeys(("poison", "parity", "addresses", "coverage", "races"), 13)
