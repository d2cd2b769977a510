"""No false alarms: in the middle of each example program its runners pass all checks, and the program goes on."""

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import slotgraph
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.decode import CapturingRunner
from slotgraph.runners.engine.runner import Runner
from tests.examples.demo import NEEDS, SMALL, module
from tests.examples.test_programs import SHORT, needs

MOST = 4


@attrs.define(eq=False)
class Kept:
    """The first batches of a runner, one of each size, in memory of their own."""

    runner: Any
    batches: dict[Any, Any] = attrs.field(factory=dict)
    report: CheckReport | None = None

    def take(self, batch: Any, side: dict[str, Any]) -> Any:
        """The batch, after a check if there are enough of them."""
        if self.report is not None or self.runner.decide(batch, **side).bucket is None:
            return batch
        batch = copy.deepcopy(batch)  # it may lie in memory of the graph
        self.batches.setdefault(self.runner.size(batch, side), copy.deepcopy((batch, side)))
        if len(self.batches) == MOST:
            self.check()
        return batch

    def check(self) -> None:
        """Check the runner on them."""
        self.report = CheckReport(runner="", findings=(), steps={})  # which its own steps must not do
        with torch.no_grad():
            self.report = slotgraph.check(self.runner, [*self.batches.values()], progress=False)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    """Of each runner that is captured from now on."""
    found, capture = list[Kept](), CapturingRunner.capture

    def watched(self: Any) -> Any:
        report = capture(self)
        found.append(Kept(self))
        return report

    def looked_at(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, batch: Any, **side: Any) -> Any:
            mine = [one for one in found if one.runner is self]
            return method(self, mine[0].take(batch, side) if mine else batch, **side)

        return call

    monkeypatch.setattr(CapturingRunner, "capture", watched)
    for name in ("__call__", "fill"):
        monkeypatch.setattr(Runner, name, looked_at(getattr(Runner, name)))
    return found


def assert_sound(kept: list[Kept]) -> None:
    """No runner has a finding, but that an example's step may have no use for a slot."""
    for one in kept:
        if one.report is None and one.batches:
            one.check()
        found = () if one.report is None else one.report.findings
        assert [str(each) for each in found if not each.message.startswith("nothing reads slot")] == []


RUNNERS = {"twins": 1, "windows": 1, "speculating": 3, "states": 1, "images": 1, "paging": 1, "batching": 1}
"""Runners of each program that have as many batches in a short run."""


@pytest.mark.parametrize("package", SHORT)
def test_programs_go_on_after_their_runners_were_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: list[Kept], package: str
) -> None:
    """Each program goes on as before after its runners were checked."""
    needs(package)
    monkeypatch.chdir(tmp_path)  # where one of them draws a picture
    with contextlib.redirect_stdout(io.StringIO()):
        assert module(f"{package}.program").main(SHORT[package]) == 0
    assert sum(len(one.batches) == MOST for one in kept) == RUNNERS.get(package, 0)
    assert_sound(kept)


def test_a_cycle_in_one_launch_passes_all_checks(kept: list[Kept]) -> None:
    """Its runner is called for the first cycle of a loop alone."""
    needs("speculating")
    with contextlib.redirect_stdout(io.StringIO()):
        assert module("speculating.program").main([*SHORT["speculating"], "--one-launch"]) == 0
    assert [len(one.batches) > 0 for one in kept] == [True]
    assert_sound(kept)


@pytest.mark.parametrize("prefill", ["breakable", "piecewise"])
def test_the_demo_goes_on_after_its_runners_were_checked(kept: list[Kept], prefill: str) -> None:
    """The demo chooses the same tokens as generate() after its prefill and its decode runner were checked."""
    pytest.importorskip("transformers", reason=NEEDS)
    options = module("serving.options").parse([*SMALL, "--prefill", prefill])
    with contextlib.redirect_stdout(io.StringIO()):
        assert module("serving.program").generate(options) == 0
    assert [len(one.batches) for one in kept] == [MOST, MOST]
    assert_sound(kept)
