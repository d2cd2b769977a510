"""No false alarms: sound runners of every kind, and those of the standard declarations, pass all checks."""

from typing import TYPE_CHECKING

import pytest
import torch

import slotgraph
from slotgraph import DecodeRunner, EagerRunner, Inputs, errors
from tests.runners.check.planted import OURS, runner_of, sound
from tests.runners.check.sound import KINDS, Found, standard_runner
from tests.runners.models import PlainInputs, plain_step
from tests.runners.standard.test_runs import WIDTHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from slotgraph.backends import Backend

OTHERS_READ = ("req_pool_indices", "seq_lens", "out_cache_loc", "num_correct_drafts", "num_accept_tokens")
"""Slots that the toy models of these tests have no use for."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind(backend: "Backend", kind: "Callable[[Backend], Found]") -> None:
    """Each runner on batches of its own, outside of inference mode and inside of it."""
    runner, batches = kind(backend)
    outside = [name for name in OTHERS_READ if name in runner.stage.declaration.slots]
    for inside in (False, True):
        with torch.inference_mode(mode=inside):
            report = slotgraph.check(runner, batches, read_outside=outside, progress=False)
        assert report.ok, str(report)
        assert report.steps["poison"] == report.steps["races"] > 4


@pytest.mark.parametrize("inputs", WIDTHS, ids=lambda inputs: inputs.__name__)
def test_standard_declarations(backend: "Backend", inputs: type[Inputs]) -> None:
    """Each declaration on drawn batches, through a step that reads every slot."""
    report = slotgraph.check(
        standard_runner(inputs, WIDTHS[inputs], backend), only=("poison", "coverage"), progress=False
    )
    assert report.ok, str(report)


@pytest.mark.parametrize("lowering", ["in_graph", "fused", "foreach", "slot_by_slot"])
def test_every_lowering(cpu: str, lowering: str) -> None:
    """However slots are filled, lazily captured or not, nothing is found in a sound runner, and a bug in another."""
    report = slotgraph.check(runner_of(sound, cpu, lowering=lowering, lazy=True), progress=False, rounds=1)
    assert report.ok, str(report)
    bug = OURS[0]
    report = slotgraph.check(runner_of(bug.step, cpu, lowering=lowering), only=("poison",), progress=False, rounds=1)
    assert [finding.slot for finding in report.findings] == [bug.slot]


def test_bucket_that_was_not_captured() -> None:
    """Its batches are passed over with the reason; the others are checked."""

    def step(view: PlainInputs) -> torch.Tensor:
        if view.ids.shape[0] == 8:
            view.ids.sum().item()
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[4, 8], backend="cpu-capture", progress=False)
    with pytest.raises(errors.CaptureError, match="1 of 2 buckets"):
        runner.capture()
    report = slotgraph.check(runner, progress=False)
    assert report.ok, str(report)
    assert report.steps["poison"] == 5
    assert report.notes[0].startswith("5 batches were passed over, which no graph takes: ")


def test_eager_runner(backend: "Backend") -> None:
    """A runner that captures nothing has nothing to check, and the report says so."""
    report = slotgraph.check(EagerRunner(PlainInputs, plain_step, backend=backend), progress=False)
    assert report.ok
    assert report.notes == ("it captures nothing: there are no tails, and nothing is replayed",)
