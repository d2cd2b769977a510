"""`assert_padding_independent` and `assert_parity`: silent on what is right, and loud on each bug that is planted."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, DecodeRunner, Inputs, copied
from slotgraph.dataflow.errors import CheckError, FailedCheckError
from slotgraph.runners.testing.assertions import assert_padding_independent, assert_parity

TABLE = torch.arange(32.0).reshape(8, 4) + 1


class Rows(Inputs):
    """Rows of a table, and what each is taken times."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    factors: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1.0)


def right(view: Rows) -> torch.Tensor:
    """What one row holds, no other changes."""
    return TABLE[view.ids] * view.factors[:, None]


def mixing(view: Rows) -> torch.Tensor:
    """Each row hangs on all of them, padded ones too."""
    return right(view) + view.factors.max()


class Counting:
    """A step with a number of the host's own, which is frozen in a graph."""

    def __init__(self) -> None:
        self.count = 0.0

    def __call__(self, view: Rows) -> torch.Tensor:
        """One more each time."""
        self.count += 1
        return right(view) + self.count


def captured(step: Any) -> DecodeRunner[Rows]:
    """A runner with two buckets."""
    runner = DecodeRunner(Rows, step, buckets=[2, 4], backend="cpu-capture", progress=False)
    runner.capture()
    return runner


def test_what_is_right() -> None:
    """Both pass on drawn batches, on given ones, and on those that a function makes."""
    runner = captured(right)
    given = [{"ids": torch.tensor([3, 1, 2]), "factors": torch.tensor([1.5, 2.5, -1.0])}]

    def made(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {"ids": torch.arange(rows), "factors": torch.rand(rows, generator=generator)}

    for check in (assert_padding_independent, assert_parity):
        assert check(runner, values={"ids": (0, 7)}).ok
        assert sum(check(runner, given).steps.values()) == 1
        assert check(runner, made, rounds=2).ok


def test_padding_that_changes_a_live_row() -> None:
    """The slot through which it came is named."""
    with pytest.raises(FailedCheckError, match=r"poison: .*'factors'"):
        assert_padding_independent(captured(mixing))


def test_a_graph_that_does_something_else() -> None:
    """A host value frozen at capture is found, as an AssertionError and as a CheckError."""
    with pytest.raises(AssertionError, match="parity: ") as caught:
        assert_parity(captured(Counting()))
    assert isinstance(caught.value, CheckError)
