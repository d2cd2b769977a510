"""Class F: sources that do not fit and are taken all the same."""

from typing import Any

import pytest
import torch

from slotgraph import TOKENS, Inputs, copied
from slotgraph.dataflow.errors import BatchError
from tests.regressions.engines import ByHand, captured, draw


class TokenInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, 3, dtype=torch.int64, pad=0)


def both(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A number a token."""
    return ids * 100 + positions.sum(1)


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"ids": 1}, r"slot 'ids': expected int64 of shape \[3\] .*got shape \[1\]|'ids'"),
        ({"positions": 1}, "slot 'positions'"),
        ({"positions": 2}, "slot 'positions'"),
    ],
    ids=["one id for three", "positions of one token", "short positions"],
)
def test_trtllm_18207_a_source_of_another_length(spoilt: dict[str, int], says: str) -> None:
    """A source that is too short leaves the last step's rows behind it; one of a single row is spread over all."""
    sources = {"ids": draw(1, 9, (3,), 1), "positions": draw(1, 9, (3, 3), 2)}
    right = both(**sources)
    bad: dict[str, Any] = {**sources, **{name: sources[name][:rows] for name, rows in spoilt.items()}}

    engine = ByHand(
        lambda views: both(**views),
        4,
        ids=torch.zeros(4, dtype=torch.int64),
        positions=torch.zeros(4, 3, dtype=torch.int64),
    )
    engine(ids=draw(10, 19, (4,), 3), positions=draw(10, 19, (4, 3), 4))
    for name, source in bad.items():  # as `static[:n].copy_(source)` and `static[:live] = source` do it
        rows = 3 if len(source) == 1 else len(source)
        engine.buffers[name][:rows].copy_(source)
    engine.graph.replay()
    assert not torch.equal(engine.graph.outputs[:3], right)

    runner = captured(TokenInputs, lambda view: both(view.ids, view.positions))
    before = runner(sources).clone()
    with pytest.raises(BatchError, match=says):
        runner(bad)
    assert torch.equal(runner(sources), before)
    assert torch.equal(before, right)
