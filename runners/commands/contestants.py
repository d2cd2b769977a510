"""The contestants of `slotgraph bench`: a step as engines hand-write it, by this library's lowerings, and a bare replay.

All that fill are held to the oracle, byte for byte, before anything is timed.
"""

import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch

from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.capabilities import Lowering
from ...dataflow.errors import WrongBytesError
from ...dataflow.sources import look_up
from ..capture import capture_step, warm_up
from ..decode import DecodeRunner
from ..testing.by_hand import FillByHand
from ..testing.bytes import difference, differences
from ..testing.contests import PER_SLOT, REGROUPED, SETS
from .workload import Case, Way, plus_one

BARE: Final = "bare"
ORACLE: Final = "slot_by_slot"
FILL: Final = "fill"
STEP: Final = "step"


@attrs.frozen(kw_only=True, eq=False)
class Contestant:
    """One way to run a case.

    Args:
        name: A lowering's, or that of a way by hand.
        step: Fill, view and replay.
        fill: Fill and view alone, where that is measured.
        view: Every row of the slots; None where its steps fill none.
        runner: Whose it is, where it is this library's.
    """

    name: str
    step: Way
    fill: Way | None = None
    view: Callable[[], Any] | None = None
    runner: DecodeRunner[Any] | None = None


def contestants(case: Case) -> list[Contestant]:
    """Two by hand, a runner for each lowering that the backend has, and a bare replay."""
    lowerings = [by_lowering(case, lowering) for lowering in case.backend.capabilities.lowerings]
    return [by_hand(case, PER_SLOT), by_hand(case, REGROUPED), *lowerings, by_hand(case, BARE)]


def by_lowering(case: Case, lowering: Lowering) -> Contestant:
    """A captured runner: the public path, with sizing, routing and checks."""
    options: dict[str, Any] = {"buckets": [case.padded], "absent": case.absent, "progress": False}
    runner = DecodeRunner(case.inputs, plus_one, backend=case.backend, lowering=lowering, **options)
    runner.capture()
    buffers = runner.graphs.buffers  # `runner.inputs` would have the runner distrust its slots

    def view() -> Any:
        return types.SimpleNamespace(**{name: buffers[name].tensor for name in case.inputs.slotgraph.slots})

    fill = None if lowering == ORACLE else runner.fill
    return Contestant(name=lowering, step=case.call(runner), fill=fill, view=view, runner=runner)


def by_hand(case: Case, name: str) -> Contestant:
    """A way that engines hand-write, or a bare replay: of a graph that holds the step, and nothing of a fill."""
    backend, declaration = case.backend, case.inputs.slotgraph
    axes = declaration.varying
    filled = FillByHand(declaration, backend, dict.fromkeys(axes, case.padded), grouped=name == REGROUPED)
    captured = torch.no_grad()(functools.partial(plus_one, filled.slots))
    warm_up(backend, captured)
    graph = capture_step(backend, captured, pool=backend.pool())

    def fill(batch: Any) -> Any:
        return filled(batch, (batch.rows,) * len(axes))

    def step(batch: Any) -> Any:
        filled.fill(batch, (batch.rows,) * len(axes))
        graph.replay()
        return graph.outputs[: batch.rows]

    if name == BARE:
        return Contestant(name=name, step=lambda _: graph.replay())
    return Contestant(name=name, step=step, fill=fill, view=lambda: filled.slots)


def verify(case: Case, found: Sequence[Contestant], whats: Sequence[str] = (FILL, STEP)) -> None:
    """Hold what each contestant leaves in the slots, and returns, to the oracle. WrongBytesError says a difference.

    Batches are those of the case, and then others that grow and shrink.
    """
    oracle, slots = by_lowering(case, ORACLE), case.inputs.slotgraph.slots
    for number, rows in enumerate([*case.sizes[: 2 * SETS], case.padded, 1, *case.sizes[:2]]):
        batch = case.draw(rows, number)
        wanted, outputs = _ran(case, oracle, STEP, batch)
        for one, what in itertools.product(found, whats):
            if getattr(one, what) is None or one.view is None:
                continue
            held, returned = _ran(case, one, what, batch)
            fault = next(differences(held, wanted, slots, {BATCH: rows, TOKENS: rows}), None)
            if what == STEP and (returned.shape != outputs.shape or difference(returned, outputs)):
                fault = fault or "it returned other outputs"
            if fault is not None:
                message = f"{case.name}, {rows}/{case.padded} rows, the {what} of {one.name}: {fault}"
                raise WrongBytesError(message)


def _ran(case: Case, one: Contestant, what: str, batch: Any) -> tuple[dict[str, torch.Tensor | None], Any]:
    """What a fill or a step leaves in every slot that is not absent, and what it returns."""
    with torch.no_grad(), case.around():
        returned = getattr(one, what)(batch)
    case.backend.synchronize()
    view = returned if what == FILL or one.view is None else one.view()
    slots = case.inputs.slotgraph.slots.items()
    gone = {name for name, slot in slots if slot.reads(name) is not None and look_up(batch, name) is None}
    return {name: None if name in gone else getattr(view, name) for name, _ in slots}, returned
