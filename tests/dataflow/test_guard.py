"""Guards: torch's own and the plain one let the same tensors through."""

from typing import Any

import pytest
import torch

from slotgraph.dataflow.guard import _IS_TRIED, own_guard, plain_guard
from tests.strategies import noise

ONES = (noise((5, 3), torch.float32, 1), noise((4,), torch.int64, 2))


OTHERS = (
    noise((5,), torch.int64, 3),
    noise((4,), torch.int32, 3),
    noise((8,), torch.int64, 3)[::2],
    noise((4, 1), torch.int64, 3),
    torch.empty(4, dtype=torch.int64, device="meta"),
    vars(torch)["_neg_view"](noise((4,), torch.int64, 3)),
    torch.nn.Parameter(noise((4,), torch.int64, 3), requires_grad=False),
    noise((4,), torch.int64, 3).to_sparse(),
)


@pytest.mark.parametrize("make", [own_guard, plain_guard])
def test_whatever_differs_does_not(make: Any) -> None:
    """Others like them pass, at any address and of any values; one that differs in anything else stops all of them."""
    guard = make(ONES)
    assert guard(*ONES)
    assert guard(*[one.clone() for one in ONES])
    for other in OTHERS:
        assert not guard(ONES[0], other), other
    assert make([])()


@pytest.mark.parametrize("tried", sorted({_IS_TRIED, False}))
def test_one_tensor_at_several_places(tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 - a case
    """It passes at the same places again, whichever tensor that is; two of the same kind there do not."""
    monkeypatch.setattr("slotgraph.dataflow.guard._IS_TRIED", tried)
    one, other, third = (noise((5, 3), torch.float32, seed) for seed in (4, 5, 6))
    guard = own_guard([one, ONES[1], one, one])
    assert guard(one, ONES[1], one, one)
    assert guard(other, ONES[1].clone(), other, other)
    for stopped in (
        (one, ONES[1], one, other),
        (one, ONES[1], other, other),
        (one,) * 4,
        (one[:4], ONES[1], one[:4], one[:4]),
    ):
        assert not guard(*stopped)
    assert own_guard([one, other, third])(one, other, one) is not tried, "torch's own takes no tensor twice"
