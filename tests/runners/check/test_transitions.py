"""The check of transitions: rules whose live rows depend on the bucket are found, and no others are blamed."""

from typing import Any, Final

import pytest
import torch
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, check, copied, keep, output
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.extend import once
from slotgraph.runners.check.checks import CheckReport
from tests.life.test_functions import declarations, played


def report_on(inputs: type[Inputs], step: Any, **options: Any) -> CheckReport:
    """What the check says of a declaration."""
    runner_options = {name: options.pop(name) for name in ("lowering", "width") if name in options}
    runner = DecodeRunner(inputs, step, buckets=(2, 4, 8), backend="cpu-capture", output_rows=None, **runner_options)
    runner.capture()
    return check(runner, only=["transition"], progress=False, **options)


class Plain(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def step_of(view: Any) -> torch.Tensor:
    """A step that writes its output slot."""
    made: torch.Tensor = view.made.copy_(view.x + view.ids)
    return made


class ByLargest(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x: x - x.max())


class ByMean(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x: x + x.double().mean().mul(60).long())


class ByCount(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x: x + len(x))


class ByTail(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=5, then=lambda x: x + x.sum())


class ByKept(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("a test"), then=lambda x: x + x.amax())


class BySetOnce(Plain):
    y: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(0))
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x, y: x + y.sum())


class ByOutput(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x, made: x + made.amax())


WRONG: Final = (ByLargest, ByMean, ByCount, ByTail, ByKept, BySetOnce, ByOutput)


@pytest.mark.parametrize("inputs", WRONG, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lowering", LADDER)
def test_a_rule_that_depends_on_padded_rows_is_found(inputs: type[Inputs], lowering: str) -> None:
    """By their number, by a tail that is not neutral, or by tails that no rule tells."""
    report = report_on(inputs, step_of, lowering=lowering)
    assert [finding.slot for finding in report.findings] == ["x"], str(report)
    assert "have its then= make live rows of live ones alone" in report.findings[0].message


class ByNewTail(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda x, ids: x + ids.sum() + x.sum())


class ByOrder(Plain):
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7, then=lambda x: x.cumsum(0).remainder(9))


class OfLengths(Plain):  # which are never below 0, as their limit says
    x: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=20, then=lambda x: x + x.amax())


class OfFloats(Plain):  # whose sums differ in their last bits
    y: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, then=lambda y: y + y.sum() / 3)


RIGHT: Final = (ByNewTail, ByOrder, OfLengths, OfFloats)


@pytest.mark.parametrize("inputs", RIGHT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("lowering", LADDER)
def test_a_rule_over_neutral_tails_is_not_blamed(inputs: type[Inputs], lowering: str) -> None:
    """A rule may reduce over declared tails that change nothing."""
    assert report_on(inputs, step_of, lowering=lowering).ok


def test_numbers_below_0_are_not_made_up() -> None:
    """Batches of one's own, and ranges of values, say what slots hold."""
    batches = [{"ids": [1, 2, 3], "x": [4, 5, 6]}]
    assert report_on(ByLargest, step_of, batches=batches).ok
    assert report_on(ByLargest, step_of, values={"x": (1, 9)}).ok
    assert not report_on(ByLargest, step_of, values={"x": (-9, -1)}).ok


@pytest.mark.parametrize("lowering", LADDER)
def test_correct_declarations_are_not_blamed(lowering: str) -> None:
    """Random rules by row, sums over tails of 0 and sums of rows so far pass."""

    def game(draw: Any) -> None:
        width = draw(st.sampled_from([1, 2]))
        world = draw(declarations((BATCH, TOKENS, None), width=width, correct=True))
        report = report_on(world.inputs(), world.step, lowering=lowering, width=width)
        assert report.ok, str(report)

    played(game, 3)
