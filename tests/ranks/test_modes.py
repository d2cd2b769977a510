"""Modes over ranks: all that get the same batches choose one mode; others are refused when the runner is made."""

from typing import Any

import pytest
import torch

from slotgraph import EagerRunner
from slotgraph.errors import ConfigError
from slotgraph.graphs import ModeRunner
from slotgraph.runners.ranks.group import Ranks
from tests.ranks.processes import Processes
from tests.ranks.stepping import soon
from tests.runners.test_modes import GIVEN, MIXED, UNIFORM, Serving, decode_part, is_uniform, mixed_part, mixed_step


def modes_of(ranks: Ranks) -> dict[str, Any]:
    """Runners of both modes on a rank."""
    given: dict[str, Any] = {"ranks": ranks, "backend": "cpu-capture"}
    return {"decode": decode_part(**given), "mixed": mixed_part(**given)}


def equal(_: int) -> list[torch.Tensor]:
    """The outputs of ranks that get the same batches."""
    runner = ModeRunner(modes_of(soon(equal=True)), when={"decode": is_uniform})
    runner.capture()
    return [runner(batch) for batch in (UNIFORM, MIXED, UNIFORM)]


def unequal(_: int) -> str:
    """Why ranks that get batches of their own are refused."""
    with pytest.raises(ConfigError) as refused:
        ModeRunner(modes_of(soon()), when={"decode": is_uniform})
    return str(refused.value)


def test_ranks_with_the_same_batches_have_the_same_modes(two: Processes) -> None:
    """They exchange nothing for it."""
    eager = EagerRunner(Serving, mixed_step, sizes=GIVEN["sizes"], backend="cpu")
    for found in two.run(equal):
        for batch, outputs in zip((UNIFORM, MIXED, UNIFORM), found, strict=True):
            assert torch.equal(outputs, eager(batch))


def test_ranks_with_batches_of_their_own_are_refused(two: Processes) -> None:
    """One could choose another mode than the others."""
    assert all("its ranks have batches of their own" in one for one in two.run(unequal))
