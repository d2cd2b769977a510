"""No false alarms: sound runners of every kind, and those of the standard declarations, pass all checks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, errors
from slotgraph.dataflow.slots import Output
from tests.runners import prefilled
from tests.runners.check.test_planted import OURS, passed, runner_of, sound
from tests.runners.models import PlainInputs, decoder, plain_runner, plain_step, random_batch, recording
from tests.runners.standard.batches import fixed_of
from tests.runners.standard.test_runs import SHARDING, WIDTHS
from tests.runners.test_draft import batch_of as drafted
from tests.runners.test_draft import captured as draft_runner
from tests.runners.test_draft_extend import batch_of as extended
from tests.runners.test_draft_extend import captured as extend_runner
from tests.runners.test_draft_extend import chained

if TYPE_CHECKING:
    from slotgraph.backends import Backend

Make = Callable[[int, torch.Generator], Any]
Found = tuple[Any, Make]


def plain(backend: Any) -> Found:
    """Decode."""
    return plain_runner(backend), lambda rows, generator: random_batch(rows, generator.initial_seed(), backend.device)


def draft(backend: Any) -> Found:
    """A tree of drafts."""
    runner = draft_runner(backend.name, 2, 3)
    return runner, lambda rows, generator: drafted(rows, 2, 3, generator.initial_seed(), backend.device)


def draft_extend(backend: Any) -> Found:
    """Three tokens a request, one row of it."""
    return extend_runner(backend.name, 3), lambda rows, generator: extended(
        rows, 3, generator.initial_seed(), backend.device
    )


def multi_layer(backend: Any) -> Found:
    """Three layers, each of which writes what the next one reads."""
    return chained(backend.name), lambda rows, generator: extended(
        rows, 3, generator.initial_seed(), backend.device, whole=True
    )


def breakable(backend: Any, kind: str = "breakable") -> Found:
    """A stack in pieces, by breaks."""

    def make(tokens: int, generator: torch.Generator) -> Any:
        ends = sorted({*torch.randint(1, tokens + 1, (4,), generator=generator).tolist(), tokens})
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]  # of five requests at most
        return prefilled.batch_of(lengths, generator.initial_seed(), backend.device)

    return prefilled.captured(kind, backend.name)[0], make


def piecewise(backend: Any) -> Found:
    """A stack in pieces, split at an operator."""
    return breakable(backend, "piecewise")


KINDS = (plain, draft, draft_extend, multi_layer, breakable, piecewise)


def every_slot(view: Inputs) -> torch.Tensor:
    """A step that reads all slots on the device, each row for itself, and writes the outputs among them."""
    info = view._slotgraph_view
    assert info is not None
    sizes, total = info.step.padded_sizes, None
    for name, slot in info.declaration.slots.items():
        tensor = vars(view)[name]
        if tensor is None or isinstance(slot, Output) or slot.placement == "host":
            continue
        rows = _by_token(tensor, sizes[BATCH], sizes[TOKENS])
        total = rows if total is None else total + rows
    assert total is not None
    for name, slot in info.declaration.slots.items():
        if isinstance(slot, Output):
            out = vars(view)[name]
            out.copy_(total[: out.shape[0], None].expand_as(out))
    return total


def _by_token(tensor: torch.Tensor, requests: int, tokens: int) -> torch.Tensor:
    """One number a token, made of its own part of a slot, or of its request's."""
    exact = tensor.double()
    if exact.dim() == 2 and exact.shape[0] == 3 and exact.shape[1] == tokens:
        return exact.sum(0)
    rows = next((count for count in (tokens, requests) if exact.dim() and exact.shape[0] % count == 0), None)
    if rows is None or exact.numel() < requests:
        return exact.sum().expand(tokens)
    return exact.reshape(rows, -1).sum(1).repeat_interleave(tokens // rows)


OTHERS_READ = ("req_pool_indices", "seq_lens", "out_cache_loc", "num_correct_drafts", "num_accept_tokens")
"""Slots that the toy models of these tests have no use for."""


@recording
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind(backend: "Backend", kind: "Callable[[Backend], Found]") -> None:
    """Each runner on batches of its own, outside of inference mode and inside of it."""
    runner, batches = kind(backend)
    outside = [name for name in OTHERS_READ if name in runner.stage.declaration.slots]
    for inside in (False, True):
        with torch.inference_mode(mode=inside):
            report = passed(runner, batches, read_outside=outside)
        assert report.steps["poison"] == report.steps["races"] > 4


@recording
@pytest.mark.parametrize("inputs", WIDTHS, ids=lambda inputs: inputs.__name__)
def test_standard_declarations(backend: "Backend", inputs: type[Inputs]) -> None:
    """Each declaration on drawn batches, with every optional slot and none, through a step that reads every slot."""
    optional = {name for name, slot in inputs.slotgraph.slots.items() if slot.optional}
    given = {"width": WIDTHS[inputs], "sizes": fixed_of(inputs), "settings": SHARDING, "backend": backend}
    runner = decoder(inputs, every_slot, buckets=[2, 5], absent=[optional] if optional else [], **given)
    passed(runner, only=("poison", "coverage"))


@pytest.mark.parametrize("lowering", ["in_graph", "fused", "foreach", "slot_by_slot"])
def test_every_lowering(lowering: str) -> None:
    """However slots are filled, lazily captured or not, nothing is found in a sound runner, and a bug in another."""
    passed(runner_of(sound, "cpu-capture", lowering=lowering, lazy=True), rounds=1)
    bug = OURS[0]
    runner = runner_of(bug.step, "cpu-capture", lowering=lowering)
    report = slotgraph.check(runner, only=("poison",), progress=False, rounds=1)
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
    report = passed(runner)
    assert report.steps["poison"] == 5
    assert report.notes[0].startswith("5 batches were passed over, which no graph takes: ")


def test_eager_runner(backend: "Backend") -> None:
    """A runner that captures nothing has nothing to check, and the report says so."""
    report = passed(EagerRunner(PlainInputs, plain_step, backend=backend))
    assert report.notes == ("it captures nothing: there are no tails, and nothing is replayed",)
