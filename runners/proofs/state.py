"""The state of a runner's step: see `runners.state`."""

from collections.abc import Iterable
from typing import Any

import torch

from ..runner import Runner
from ..state import State
from .eagerly import ran_eagerly, slot_spans
from .report import Case
from .together import Together


def state_of(runner: Runner[Any], cases: Iterable[Case], tensors: Iterable[torch.Tensor] | None = None) -> State:
    """The state of a runner's step: the one given here or to the runner, or what its operators write on some batches.

    CheckError where it is too large to be copied.
    """
    parts = runner.parts
    tensors = parts.stage.state if tensors is None else tensors
    if tensors is not None:
        return State.of(parts.stage.backend, tensors)
    found, together = State(parts.stage.backend), Together(parts)
    for case in cases:
        view = runner.fill(case.batch, **case.side)
        with together.raising("the look at what a step changes"):
            found = found.joined(state_on(runner, view))
    return found


def state_on(runner: Runner[Any], view: Any) -> State:
    """What a runner's step changes on the view that was filled last, whose slots it leaves as it writes them."""
    parts = runner.parts
    if parts.stage.state is not None:
        return State.of(parts.stage.backend, parts.stage.state)
    return State.found(parts.stage.backend, slot_spans(parts), lambda: ran_eagerly(parts, view))
