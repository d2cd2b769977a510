"""Random programs of operators: a captured one gives the bytes of an eager one, on data that it was not captured on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from slotgraph.backends.cpu_capture import Adapter

HIDDEN: Any = torch  # the foreach functions are not exported
ROWS, COLUMNS = 4, 6
Operator = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


def _masked_fill(one: torch.Tensor, other: torch.Tensor, number: int) -> torch.Tensor:
    one[other > number] = float(number)
    return one


def _foreach(one: torch.Tensor, other: torch.Tensor, number: int) -> torch.Tensor:
    HIDDEN._foreach_add_([one, other], float(number))
    products: list[torch.Tensor] = HIDDEN._foreach_mul([one, other], [other, one])
    return products[number % 2]


def _loop(one: torch.Tensor, other: torch.Tensor, number: int) -> torch.Tensor:
    for row in one.unbind(0)[: number % ROWS]:
        other = other + row
    return other


OPERATORS: dict[str, Operator] = {
    "add": lambda a, b, n: torch.add(a, b, alpha=n),
    "mul": lambda a, b, _: a * b,
    "div": lambda a, b, _: a / b,
    "rsub": lambda a, _, n: n - a,
    "maximum": lambda a, b, _: torch.maximum(a, b),
    "where": lambda a, b, n: torch.where(a > n, b, 0.5),
    "exp": lambda a, _b, _n: a.exp(),
    "silu": lambda a, _b, _n: torch.nn.functional.silu(a),
    "softmax": lambda a, _, n: a.softmax(n % 2),
    "layer_norm": lambda a, b, _: torch.nn.functional.layer_norm(a, (COLUMNS,), b[0]),
    "cumsum": lambda a, _, n: a.cumsum(n % 2),
    "sum": lambda a, _, n: a.sum(n % 2, keepdim=True) + torch.zeros(ROWS, COLUMNS),
    "linear": lambda a, b, _: torch.nn.functional.linear(a, b) @ b,
    "transposed": lambda a, _b, _n: a.t().contiguous().t(),
    "reshaped": lambda a, _b, _n: a.reshape(COLUMNS, ROWS).reshape(ROWS, COLUMNS),
    "rolled": lambda a, _, n: a.roll(n, 1),
    "catenated": lambda a, b, n: torch.cat((a, b))[n % ROWS : n % ROWS + ROWS],
    "sorted": lambda a, _, n: a.sort(n % 2).values,
    "top": lambda a, _b, _n: a.topk(COLUMNS).values,
    "gathered": lambda a, b, _: a.gather(1, b.argsort(1)),
    "indexed": lambda a, b, _: a[b[:, 0].argsort()],
    "scattered": lambda a, b, _: a.scatter_add_(1, b.argsort(1), b),
    "index_put": lambda a, b, n: a.index_put_((b[:, n % COLUMNS].argsort(),), b),
    "mask": _masked_fill,
    "copy": lambda a, b, _: a.copy_(b),
    "row": lambda a, b, n: a[n % ROWS].add_(b[0]).expand(ROWS, COLUMNS) + 0,
    "column": lambda a, b, n: (a[:, n % COLUMNS].mul_(2), b.clone())[1],
    "fill": lambda a, _, n: torch.full_like(a, n),
    "arange": lambda a, _, n: a + torch.arange(n, n + COLUMNS),
    "random": lambda a, _b, _n: a + torch.rand_like(a),
    "dropped": lambda a, _b, _n: torch.nn.functional.dropout(a, 0.5, training=True),
    "cast": lambda a, b, _: (a.to(torch.float64) * b).to(torch.float32),
    "low": lambda a, b, _: (a.bfloat16() + b.bfloat16()).float(),
    "bits": lambda a, b, _: (a.view(torch.int32) & b.view(torch.int32)).view(torch.float32),
    "foreach": _foreach,
    "loop": _loop,
    "alias": lambda a, _b, _n: a.view(-1).view(ROWS, COLUMNS),
    "squeezed": lambda a, _b, _n: (a * 2).unsqueeze_(0).squeeze_(0),
    "out": lambda a, b, _: torch.sub(a, b, out=torch.empty_like(a)),
}


class Line(NamedTuple):
    """One line of a program: an operator, two earlier values, and a number that is baked."""

    operator: str
    one: int
    other: int
    number: int


lines = st.builds(Line, st.sampled_from(sorted(OPERATORS)), st.integers(0, 9), st.integers(0, 9), st.integers(-2, 3))


def run(program: list[Line], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """All values of a program, its inputs first; later values are what later lines prefer."""
    values = list(inputs)
    for line in program:
        one, other = values[-1 - line.one % len(values)], values[-1 - line.other % len(values)]
        values.append(OPERATORS[line.operator](one, other, line.number))
    return values


def to_bytes(values: list[torch.Tensor]) -> list[bytes]:
    """The values' bytes, NaN included."""
    return [value.contiguous().numpy().tobytes() for value in values]


@given(program=st.lists(lines, min_size=1, max_size=12), seed=st.integers(0, 2**31))
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_random_program_gives_eager_bytes(program: list[Line], seed: int) -> None:
    """Capture on some data, replay twice on other data: every value and every input is as eager leaves it."""
    torch.manual_seed(seed)
    inputs, fresh = ([torch.randn(ROWS, COLUMNS) for _ in range(3)] for _ in range(2))
    before = to_bytes(inputs)
    with torch.no_grad():
        try:
            run(program, [value.clone() for value in inputs])
        except RuntimeError:  # a write into memory that the same line reads
            assume(False)  # noqa: FBT003
    state = torch.get_rng_state()
    graph = Adapter().capture(lambda: run(program, inputs))
    assert to_bytes(inputs) == before
    assert torch.equal(torch.get_rng_state(), state)
    theirs = [value.clone() for value in fresh]
    for value, new in zip(inputs, fresh, strict=True):
        value.copy_(new)
    for turn in range(2):
        torch.manual_seed(seed + turn)
        graph.replay()
        torch.manual_seed(seed + turn)
        with torch.no_grad():
            expected = run(program, theirs)
        assert to_bytes(graph.outputs) == to_bytes(expected)
        assert to_bytes(inputs) == to_bytes(theirs)
