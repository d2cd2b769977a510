"""How cpu-capture replays operators, alone and in random programs: as eager runs them, on data of another capture.

Beside that: what it draws at random, custom operators, subclasses, and how it guards addresses.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils import _pytree as pytree

from slotgraph.dataflow.errors import ReplayError
from tests.backends.test_cpu_capture import Tensors, capture, cases, value_of

ROWS, COLUMNS = 4, 6


def padded(value: torch.Tensor) -> torch.Tensor:
    """A result whose memory has holes."""
    return torch.empty_strided((4, 4), (7, 1)).copy_(value)


def with_batch_norm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An operator that writes running statistics without saying so in its schema."""
    return functional.batch_norm(one, other[0], other[1].abs_(), training=True, momentum=0.3)


def multi_head(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A module that torch takes apart into many operators, made inside the step from the step's own tensors."""
    heads = torch.nn.MultiheadAttention(4, 2, bias=False)
    with torch.no_grad():
        cast("torch.Tensor", heads.in_proj_weight).copy_(torch.cat((one, other, one)))
        heads.out_proj.weight.copy_(other)
    result: torch.Tensor = heads(one[:, None], other[:, None], other[:, None])[0]
    return result


def squeezed(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Shapes changed in place, before and after another operator used the tensor."""
    result = one + other
    early = result.cumsum(0)
    result.unsqueeze_(0).transpose_(1, 2)
    return early + (result * 3).squeeze_(0)


def through_data(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Writes through .data and detach(), which reach the same storage."""
    one.data.mul_(2)
    one.detach()[1] = other[2]
    return one.sum(0)


STEPS = """
(x.t()[1:3].reshape(-1), x.unflatten(1, (2, 2)).movedim(0, 2), y.as_strided((2, 2), (3, 1)))
(x.view(2, 8)[0].add_(y.flatten()[:8]), x.diagonal().fill_(2.5), x.sum()); squeezed(x, y); through_data(x, y)
torch.add(x, y, out=torch.empty(4, 4)) + torch.mm(x, y, out=y.new_empty(4, 4)); torch.mul(x, 3, out=y)
torch.add(x, y, out=torch.empty(0))
(x.topk(2), x.max(0), x.sort(1, descending=True), torch.linalg.slogdet(x)); x.max(1).indices
[p * 2 for p in (*torch.split(x, [1, 3]), *y.unbind(1), *x.chunk(2, 1))]
(torch._foreach_mul_([x, y], 2.0), torch._foreach_copy_([x], [y]), x + y)[2]
[part.exp() for part in x.unsafe_chunk(2)]
(x.new_zeros(3), torch.ones_like(x), torch.eye(3), torch.linspace(0, 1, 5), torch.arange(9))
(torch.full((2,), 3), x.new_full((2,), 0.1), torch.full_like(x, True))
(torch.arange(0, 2, 0.25), torch.arange(3, dtype=torch.int16).to(x.dtype), x + torch.scalar_tensor(2.0))
torch.zeros(4, 4).index_add_(0, torch.arange(4), x).addmm_(x, y)
(x.t().clone(), y.double(), x.bool(), x.t().contiguous(), x.to(torch.bfloat16)); padded(x) * y + padded(y).t()
(x[:1].expand(4, 4) + y, torch.empty_like(x[:, :1].expand(4, 4)).copy_(y))
(functional.layer_norm(x, (4,)), functional.layer_norm(x, (4,), y[0], y[1]), x.clamp(y))
x.reshape(2, 2, 4)[:, torch.arange(1, -1, -1), torch.arange(2)]
(torch.complex(x, y).conj() @ torch.complex(y, x), torch.fft.fft(x), torch.view_as_real(torch.complex(x, y)))
with_batch_norm(x, y); multi_head(x, y); functional.conv2d(x[None, None], y[None, None, :2, :2], padding=1)
(x, y[1:], x.view(-1)); None; {"x": [x + y, (x - y, None, 7)], "y": torch.return_types.max((x[0], y[0]))}
"""
CAPTURED = """
x.__setitem__(mask, 7.0); x.__setitem__(mask[0], 7.0); x.__setitem__(slice(0, 2), 7.0); x.__setitem__(index, y)
x.masked_fill_(mask, -1.0); x.masked_fill_(mask, torch.tensor(-1.0)); x.index_fill_(0, index[:2], 3.0)
x.fill_(scalar); x * torch.tensor(2.0); x.index_put_((index,), y, accumulate=True); functional.one_hot(index, 5)
torch.ops.aten.one_hot(index, 5); torch.nonzero_static(mask, size=5)
torch.repeat_interleave(x, count, dim=0, output_size=8); torch.repeat_interleave(x, 2, dim=0)
torch.histc(x, 4, -2.0, 2.0); functional.embedding(index, x, max_norm=1.0)
functional.embedding_bag(index[None], x); functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
functional.scaled_dot_product_attention(heads, heads, heads, mask); functional.cross_entropy(x, index)
torch.searchsorted(row.sort().values, x); x.masked_scatter_(mask, y); torch.linalg.inv_ex(square)
torch.linalg.cholesky_ex(square @ square.T); torch.linalg.qr(square); x.to(x.device) + 1
x.to("cpu", non_blocking=True); [row + 1 for row in x]; torch.nn.Linear(4, 2, device=x.device)(x)
torch._assert_async(p.min() > 0); torch.func.vmap(lambda one, other: (one * other).sum())(x, y)
"""
"""What CUDA captures as well (torch 2.11, H200), beside what it refuses."""
HELPERS = {one.__name__: one for one in (padded, with_batch_norm, multi_head, squeezed, through_data)}


@pytest.mark.parametrize("expression", cases(STEPS) + cases(CAPTURED))
def test_a_step_replays_as_eager_runs_it(expression: str) -> None:
    """Three replays on other data, each continuing from what the last wrote, match eager in result and in place."""
    captured, eager = Tensors(), Tensors()
    graph = capture(lambda: value_of(expression, captured, **HELPERS))
    addresses = [leaf.data_ptr() for leaf in pytree.tree_leaves(graph.outputs) if isinstance(leaf, torch.Tensor)]
    for seed in range(3):
        for tensors in (captured, eager):  # at first, both as they were
            torch.manual_seed(seed)
            tensors.x.add_(torch.randn(4, 4))
            tensors.y.add_(torch.randn(4, 4))
            tensors.mask[1:] = torch.rand(3, 4) > 0.5
            tensors.index.copy_(torch.randperm(4))
        torch.manual_seed(29)
        graph.replay()
        torch.manual_seed(29)
        with torch.inference_mode():
            expected = value_of(expression, eager, **HELPERS)
        torch.testing.assert_close(graph.outputs, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)
        for key, value in vars(eager).items():
            torch.testing.assert_close(getattr(captured, key), value, rtol=0, atol=0, equal_nan=True)
    leaves = [leaf for leaf in pytree.tree_leaves(graph.outputs) if isinstance(leaf, torch.Tensor)]
    assert addresses == [leaf.data_ptr() for leaf in leaves]


OPERATORS = """
torch.add(a, b, alpha=n); a * b; a / b; n - a; torch.maximum(a, b); torch.where(a > n, b, 0.5); a.exp(); a.cumsum(n % 2)
functional.silu(a); a.softmax(n % 2); functional.layer_norm(a, (6,), b[0]); a.sum(n % 2).sum() + b; a.roll(n, 1)
functional.linear(a, b) @ b; a.t().contiguous().t(); a.reshape(6, 4).reshape(4, 6); a.sort(n % 2).values
torch.cat((a, b))[n % 4 : n % 4 + 4]; a.topk(6).values; a.gather(1, b.argsort(1)); a[b[:, 0].argsort()]; a.copy_(b)
a.scatter_add_(1, b.argsort(1), b); a.index_put_((b[:, n % 6].argsort(),), b); (a.__setitem__(b > n, float(n)), a)[1]
a[n % 4].add_(b[0]).expand(4, 6) + 0; (a[:, n % 6].mul_(2), b.clone())[1]; torch.full_like(a, n); a + torch.rand_like(a)
a + torch.arange(n, n + 6); functional.dropout(a, 0.5, training=True); (a.to(torch.float64) * b).to(torch.float32)
(a.bfloat16() + b.bfloat16()).float(); (a.view(torch.int32) & b.view(torch.int32)).view(torch.float32)
(torch._foreach_add_([a, b], float(n)), torch._foreach_mul([a, b], [b, a]))[1][n % 2]; sum(a.unbind(0)[: n % 4], b)
a.view(-1).view(4, 6); (a * 2).unsqueeze_(0).squeeze_(0); torch.sub(a, b, out=torch.empty_like(a))
"""
"""What random programs are made of: of two earlier values `a` and `b`, and a baked number `n`."""
COMPILED = {one: compile(one, one, "eval") for one in cases(OPERATORS)}


class Line(NamedTuple):
    """One line of a program: an operator, two earlier values, and a number that is baked."""

    operator: str
    one: int
    other: int
    number: int


lines = st.builds(Line, st.sampled_from(list(COMPILED)), st.integers(0, 9), st.integers(0, 9), st.integers(-2, 3))


def run(program: list[Line], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """All values of a program, its inputs first; later values are what later lines prefer."""
    values = list(inputs)
    for line in program:
        one, other = values[-1 - line.one % len(values)], values[-1 - line.other % len(values)]
        names = {"torch": torch, "functional": functional, "a": one, "b": other, "n": line.number}
        values.append(eval(COMPILED[line.operator], names))  # noqa: S307 - ours
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
    graph = capture(lambda: run(program, inputs))
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


RANDOM = """
torch.rand(4); torch.randn_like(row); torch.randint(0, 1000, (4,)); torch.randperm(40); torch.bernoulli(x.sigmoid())
functional.dropout(x, 0.5); torch.empty_like(x).exponential_(); torch.multinomial(p[0], 3); functional.gumbel_softmax(x)
torch.rand(4, generator=torch.default_generator)
"""


def test_random_operators_draw_anew_and_follow_the_generator() -> None:
    """Each replay draws other numbers, and the same ones as eager from the same seed."""
    tensors = Tensors()

    def step() -> list[Any]:
        return [value_of(one, tensors) for one in cases(RANDOM)]

    graph = capture(step)
    torch.manual_seed(5)
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append([one.clone() for one in graph.outputs])
    torch.manual_seed(5)
    for draw in draws:
        assert all(map(torch.equal, draw, step()))
    assert not any(map(torch.equal, draws[0][2:4], draws[1][2:4]))


def test_custom_operators_are_replayed_whole() -> None:
    """An operator of torch.library is one operator, whether it returns, writes, or does nothing but have an effect."""
    seen: list[int] = []

    @torch.library.custom_op("slotgraph_tests::scale_into", mutates_args={"target"})
    def scale_into(value: torch.Tensor, factor: float, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(seen))
        target.copy_(torch.from_numpy(value.numpy() * factor))  # what it does inside is its own business
        return target * 2

    value, target = torch.randn(5), torch.randn(5)
    before = target.clone()
    graph = capture(lambda: scale_into(value, 0.5, target) + 1)
    assert torch.equal(target, before)
    value.copy_(torch.randn(5))
    graph.replay()
    assert seen == [0, 1]
    assert torch.equal(target, value * 0.5)
    assert torch.equal(graph.outputs, target * 2 + 1)


def test_compiled_and_scripted_functions_are_recorded_operator_by_operator() -> None:
    """torch.compile is left aside while capturing, and TorchScript's operators are seen."""
    value = torch.randn(4)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")
    graph = capture(lambda: compiled(value))
    value.copy_(torch.randn(4))
    graph.replay()
    assert torch.equal(graph.outputs, value.sin() * 2)


def test_sources_stay_alive_at_their_addresses() -> None:
    """A graph keeps what it reads, even when nothing else does, and lets go of it with itself."""
    source = torch.randn(1000)
    expected = source * 2
    gone = weakref.ref(source)
    graph = capture(partial(torch.mul, source, 2))
    del source
    gc.collect()
    graph.replay()
    assert torch.equal(graph.outputs, expected)
    del graph
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("mode", [True, False])
def test_gradients_are_off_while_it_records(*, mode: bool) -> None:
    """Whatever the caller has on, and afterwards the caller has that again; operators may choose kernels by it."""
    seen: list[Any] = []

    def step() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    with torch.inference_mode(mode):
        capture(step)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (not mode, mode)
    assert seen == [(False, False)]


MOVES: tuple[Callable[[Any], object], ...] = (
    lambda value: value.set_(torch.randn(8)),
    lambda value: setattr(value, "data", torch.randn(8)),
    lambda value: value.resize_(4096),
    lambda value: value.untyped_storage().resize_(0),
)


def reading(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step that reads a tensor by a view of its own."""
    return lambda: value[2:] + 1


def test_moved_addresses_are_found() -> None:
    """The first replay finds a source that moved since the capture; check_addresses finds one later."""
    for move, replays in itertools.product(MOVES, (0, 1)):
        value = torch.randn(8)
        graph = capture(reading(value))
        graph.check_addresses()
        for _ in range(replays):
            graph.replay()
        move(value)
        with pytest.raises(ReplayError, match="capture again"):
            (graph.check_addresses if replays else graph.replay)()


def test_memory_that_the_step_allocates_and_keeps_is_written_by_each_replay() -> None:
    """A buffer made lazily inside the step belongs to the graph, as it would on a device."""
    kept: list[torch.Tensor] = []
    value = torch.randn(4)

    def step() -> torch.Tensor:
        kept.append(value * 3)
        return kept[0] + 1

    graph = capture(step)
    assert bool(kept[0].isnan().all())
    value.copy_(torch.randn(4))
    graph.replay()
    assert torch.equal(kept[0], value * 3)
