"""Guards: torch's own and the plain one let the same tensors through."""

from typing import Any

import pytest
import torch

from slotgraph.dataflow.guard import own_guard, plain_guard
from tests.strategies import noise

ONES = (noise((5, 3), torch.float32, 1), noise((4,), torch.int64, 2))


@pytest.mark.parametrize("make", [own_guard, plain_guard])
def test_others_like_them_pass(make: Any) -> None:
    """Values and addresses are nothing to a guard."""
    guard = make(ONES)
    assert guard(*ONES)
    assert guard(*[one.clone() for one in ONES])


@pytest.mark.parametrize("make", [own_guard, plain_guard])
@pytest.mark.parametrize(
    "other",
    [
        noise((5,), torch.int64, 3),
        noise((4,), torch.int32, 3),
        noise((8,), torch.int64, 3)[::2],
        noise((4, 1), torch.int64, 3),
        torch.empty(4, dtype=torch.int64, device="meta"),
        vars(torch)["_neg_view"](noise((4,), torch.int64, 3)),
        torch.nn.Parameter(noise((4,), torch.int64, 3), requires_grad=False),
        noise((4,), torch.int64, 3).to_sparse(),
    ],
    ids=["shape", "dtype", "strides", "rank", "device", "negated", "type", "layout"],
)
def test_whatever_differs_does_not(make: Any, other: Any) -> None:
    """One that differs in anything that a fill relies on stops all of them."""
    assert not make(ONES)(ONES[0], other)


def test_one_tensor_at_several_places() -> None:
    """It passes at the same places again, whichever tensor that is; two of the same kind there do not."""
    one, other, third = (noise((5, 3), torch.float32, seed) for seed in (4, 5, 6))
    guard = own_guard([one, ONES[1], one, one])
    assert guard(one, ONES[1], one, one)
    assert guard(other, ONES[1].clone(), other, other)
    assert not guard(one, ONES[1], one, other)
    assert not guard(one, ONES[1], other, other)
    assert not guard(one, one, one, one)
    assert not guard(one[:4], ONES[1], one[:4], one[:4])
    assert not own_guard([one, other, third])(one, other, one), "torch's own takes no tensor twice"


def test_nothing_to_guard() -> None:
    """A guard over no tensor has nothing against none."""
    assert own_guard([])()
