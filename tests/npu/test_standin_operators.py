"""Operators on the stand-in's device: the same results as on the CPU, eagerly and in a graph."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

from tests.npu.elementwise_operators import ARITHMETIC, COMPARISONS, LISTS, UNARY
from tests.npu.operators import Operator
from tests.npu.programs import output
from tests.npu.shaped_operators import INDEXING, MATRICES, MOVES, REDUCTIONS

pytestmark = [  # what the wheel says once in a process
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning"),
]

OPERATORS = [*ARITHMETIC, *UNARY, *COMPARISONS, *MOVES, *REDUCTIONS, *INDEXING, *MATRICES, *LISTS]
IN_GRAPHS = [attrs.evolve(operator, dtypes=operator.dtypes[:1]) for operator in OPERATORS if operator.graph]
RANDOM: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(99, device="npu"),
    "randn": lambda: torch.randn(99, device="npu"),
    "randint": lambda: torch.randint(3, 9, (99,), device="npu"),
    "randint_int32": lambda: torch.randint(9, (99,), device="npu", dtype=torch.int32),
    "uniform_": lambda: torch.empty(99, device="npu").uniform_(-2, 5),
    "normal_": lambda: torch.empty(99, device="npu").normal_(-2, 5),
    "multinomial": lambda: torch.multinomial(torch.ones(9, device="npu") / 9, 99, replacement=True),
}
ONCE: dict[str, Callable[[], torch.Tensor]] = {
    **RANDOM,
    "bernoulli_": lambda: torch.empty(99, device="npu").bernoulli_(0.5),
    "randperm": lambda: torch.randperm(99, device="npu"),
}


def cases(operators: Sequence[Operator]) -> list[Any]:
    """One case for each operator and type."""
    return [
        pytest.param(operator, dtype, id=f"{operator.name}-{str(dtype)[6:]}")
        for operator in operators
        for dtype in operator.dtypes
    ]


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the device, in every second place of a larger tensor."""
    room = torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device="npu")
    room[..., 1].copy_(tensor)
    return room[..., 1]


def leaves(result: Any) -> list[torch.Tensor]:
    """Results as a list."""
    return [result] if isinstance(result, torch.Tensor) else list(result)


def assert_same(results: Any, expected: Any) -> None:
    """Types, shapes and numbers alike; rounded ones nearly: the wheel cuts some operators into others than the CPU."""
    for result, wanted in zip(leaves(results), leaves(expected), strict=True):
        torch.testing.assert_close(result.cpu(), wanted, equal_nan=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("operator", "dtype"), cases(OPERATORS))
def test_operator(operator: Operator, dtype: torch.dtype) -> None:
    """An operator gives on the device what it gives on the CPU, wherever the elements of its inputs lie."""
    inputs = operator.made(dtype)
    expected = operator.call(*inputs)
    assert_same(operator.call(*(tensor.to("npu") for tensor in inputs)), expected)
    assert_same(operator.call(*map(spread, inputs)), expected)


@pytest.mark.modes("eager", "lazy")
@pytest.mark.parametrize(("operator", "dtype"), cases(IN_GRAPHS))
def test_operator_in_a_graph(npu: Any, operator: Operator, dtype: torch.dtype) -> None:
    """A replay reads what its inputs hold then, not what they held at capture; so does a stream that runs late."""
    before = operator.made(dtype)
    inputs = [tensor.to("npu") for tensor in before]
    assert_same(operator.call(*inputs), operator.call(*before))
    graph = npu.NPUGraph()
    with npu.graph(graph):
        results = operator.call(*inputs)
    for _ in range(2):
        others = operator.made(dtype)
        for place, other in zip(inputs, others, strict=True):
            place.copy_(other)
        graph.replay()
        assert_same(results, operator.call(*others))


@pytest.mark.parametrize("name", ONCE)
def test_random_numbers_follow_the_seed(npu: Any, name: str) -> None:
    """One seed gives the same numbers again; the next call and another seed give others."""
    npu.manual_seed(3)
    first, second = ONCE[name]().cpu(), ONCE[name]().cpu()
    npu.manual_seed(3)
    assert torch.equal(ONCE[name]().cpu(), first)
    npu.manual_seed(4)
    assert not torch.equal(ONCE[name]().cpu(), first)
    assert not torch.equal(second, first)


@pytest.mark.modes("eager", "lazy")
@pytest.mark.parametrize("name", RANDOM)
def test_replays_draw_new_random_numbers(npu: Any, name: str) -> None:
    """Each replay moves the generator on, and a seed set between two replays brings its numbers back."""
    graph = npu.NPUGraph()
    with npu.graph(graph):
        numbers = RANDOM[name]()
    drawn = []
    for seed in (3, None, 3):
        if seed is not None:
            npu.manual_seed(seed)
        graph.replay()
        drawn.append(numbers.cpu())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_random_numbers_keep_to_their_bounds() -> None:
    """Bounds and kinds are those that were asked for."""
    low, high = RANDOM["uniform_"]().aminmax()
    assert -2 <= low.item() <= high.item() < 5
    assert set(RANDOM["randint"]().tolist()) == set(range(3, 9))
    assert RANDOM["randint_int32"]().dtype is torch.int32
    assert sorted(ONCE["randperm"]().tolist()) == list(range(99))
    assert abs(RANDOM["normal_"]().mean().item() + 2) < 3


def test_tensors_can_be_printed() -> None:
    """Printing selects, compares and reduces on the device, then reads single numbers."""
    numbers = torch.tensor([1.5, -2.25, float("inf")])
    assert repr(numbers.to("npu")) == repr(numbers)[:-1] + ", device='npu:0')"


def test_kernel_that_fails_is_named() -> None:
    """What a kernel refuses, as a place outside of a table, reaches the caller as an error with the kernel's name."""
    printed = output(
        """
        import torch, torch_npu
        table, places = torch.ones(4, 2, device="npu"), torch.tensor([1, 9], device="npu")
        try:
            print(table.index_select(0, places).cpu())
            torch.npu.synchronize()
        except RuntimeError as error:
            print(error)
        """
    )
    assert "aclnnIndexSelect" in printed
