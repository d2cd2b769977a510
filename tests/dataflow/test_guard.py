"""Guards: torch's own and the plain one let the same tensors through."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slotgraph.dataflow import guard as guards
from slotgraph.dataflow.guard import own_guard, plain_guard, torch_guard
from tests.strategies import noise

ONES = (noise((5, 3), torch.float32, 1), noise((4,), torch.int64, 2), noise((4,), torch.complex64, 3))
LIKE_FLOATS = (
    noise((5,), torch.float32, 3),
    noise((3, 5), torch.float32, 3).T,
    noise((5, 6), torch.float32, 3)[:, ::2],
    noise((5, 3), torch.float16, 3),
    torch.empty(5, 3, device="meta"),
    torch.nn.Parameter(noise((5, 3), torch.float32, 3), requires_grad=False),
    noise((5, 3), torch.float32, 3).to_sparse(),
    torch.view_as_complex(noise((5, 3, 2), torch.float32, 3)).conj().imag,
)
LIKE_NUMBERS = (
    noise((5,), torch.int64, 3),
    noise((4,), torch.int32, 3),
    noise((8,), torch.int64, 3)[::2],
    noise((4, 1), torch.int64, 3),
    torch.empty(4, dtype=torch.int64, device="meta"),
)
LIKE_COMPLEX = (noise((4,), torch.complex64, 3).conj(), vars(torch)["_neg_view"](noise((4,), torch.complex64, 3)))


@pytest.mark.parametrize("make", [own_guard, plain_guard, torch_guard])
def test_a_guard_stops_tensors_that_differ_in_anything(make: Any) -> None:
    """Others like them pass, at any address and of any values; one that differs in anything else stops all of them."""
    guard = make(ONES, [()] * len(ONES))
    assert guard(*ONES)
    assert guard(*[one.clone() for one in ONES])
    for place, others in enumerate((LIKE_FLOATS, LIKE_NUMBERS, LIKE_COMPLEX)):
        for other in others:
            given = [*ONES]
            given[place] = other
            assert not guard(*given), (place, other)


def test_a_guard_over_nothing_passes() -> None:
    """A guard over nothing passes."""
    assert own_guard([])()


def test_a_negated_tensor_passes_where_one_came_before() -> None:
    """A guard over a tensor whose elements are read with another sign lets such tensors pass, and no others."""
    for make in (torch.Tensor.conj, lambda one: one.conj().imag):
        like, again, other = [make(noise((4,), torch.complex64, seed)) for seed in range(3)]
        for guard in (own_guard([like]), plain_guard([like], [()])):
            assert guard(again)
            assert not guard(other.resolve_conj().resolve_neg())


def test_torchs_own_are_trusted() -> None:
    """With each torch that is tested here its own guards answer as the plain one, in 0.6 us in place of 4."""
    assert guards._IS_TRUSTED


ODD: dict[str, Any] = {
    "gone": lambda *_, **__: vars(guards)["no such name"],
    "takes other arguments": lambda tensor: tensor,
    "lets all pass": lambda *_, **__: SimpleNamespace(check=lambda *_: True),
    "lets none pass": lambda *_, **__: SimpleNamespace(check=lambda *_: False),
    "does not see strides": lambda *given, **_: SimpleNamespace(
        check=lambda one: (
            (type(one), one.dtype, one.device, one.shape, one.is_neg(), one.is_conj())
            == (type(given[0]), given[0].dtype, given[0].device, given[0].shape, given[0].is_neg(), given[0].is_conj())
        )
    ),
}


@pytest.mark.parametrize("how", ODD)
def test_guards_of_another_torch_are_not_trusted(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own are not trusted where they are gone, take other arguments, or answer in another way."""
    own: Any = torch._C
    monkeypatch.setattr(own._dynamo.guards, "TensorGuards", ODD[how])
    assert not guards._is_trusted()


@pytest.mark.parametrize("trusted", [False, True])
def test_one_tensor_at_several_places_passes_there_alone(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes at the same places again, whichever tensor that is; two of the same kind there do not."""
    monkeypatch.setattr("slotgraph.dataflow.guard._IS_TRUSTED", trusted)
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
    assert own_guard([one, other, third])(one, other, one) is not trusted, "torch's own takes no tensor twice"
