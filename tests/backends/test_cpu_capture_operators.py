"""How cpu-capture replays each kind of operator, what it draws at random, and how it guards addresses."""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from torch.utils import _pytree as pytree

from slotgraph.backends.cpu_capture import Adapter, CapturedGraph
from slotgraph.dataflow.errors import CaptureError, ReplayError

HIDDEN: Any = torch  # what is not exported, or typed more narrowly than it is
Step = Callable[[torch.Tensor, torch.Tensor], Any]


def capture(step: Callable[[], Any]) -> CapturedGraph:
    """Capture a step and say that the graph is this backend's."""
    return cast("CapturedGraph", Adapter().capture(step))


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
    early = result * 2
    result.unsqueeze_(0).transpose_(1, 2)
    return early + (result * 3).squeeze_(0)


def through_data(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Writes through .data and detach(), which reach the same storage."""
    one.data.mul_(2)
    one.detach()[1] = other[2]
    return one.sum(0)


STEPS: dict[str, Step] = {
    "views": lambda a, b: (
        a.t()[1:3].reshape(-1),
        cast("Any", a).unflatten(1, (2, 2)).movedim(0, 2),
        b.as_strided((2, 2), (3, 1)),
    ),
    "views written": lambda a, b: (a.view(2, 8)[0].add_(b.flatten()[:8]), a.diagonal().fill_(2.5), a.sum()),
    "views by dtype": lambda a, b: (a.view(torch.int32) ^ b.view(torch.int32)).view(torch.float32),
    "in place": lambda a, b: a.mul_(b).add_(1.5).clamp_(-1, 1).sigmoid_(),
    "in place, overlapping reads": lambda a, _: a[1:].copy_(a[:-1].clone()),
    "shape in place": squeezed,
    "through .data": through_data,
    "out=": lambda a, b: torch.add(a, b, out=torch.empty(4, 4)) + torch.mm(a, b, out=b.new_empty(4, 4)),
    "out= of an input": lambda a, b: torch.mul(a, 3, out=b),
    "several results": lambda a, _: (a.topk(2), a.max(0), a.sort(1, descending=True), torch.linalg.slogdet(a)),
    "one of several results": lambda a, _: a.max(1).indices,
    "lists of views": lambda a, b: [part * 2 for part in (*torch.split(a, [1, 3]), *b.unbind(1), *a.chunk(2, 1))],
    "lists of results": lambda a, b: HIDDEN._foreach_add([a, b], [b, a], alpha=2),
    "lists in place": lambda a, b: (HIDDEN._foreach_mul_([a, b], 2.0), HIDDEN._foreach_copy_([a], [b]), a + b)[2],
    "unsafe splits": lambda a, _: [part.exp() for part in a.unsafe_chunk(2)],
    "factories": lambda a, _: (
        a.new_zeros(3),
        torch.ones_like(a),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        torch.arange(9),
    ),
    "numbers as factories": lambda a, _: (torch.full((2,), 3), a.new_full((2,), 0.1), torch.full_like(a, True)),  # noqa: FBT003
    "factories of other dtypes": lambda a, _: (
        torch.arange(0, 2, 0.25),
        torch.arange(3, dtype=torch.int16).to(a.dtype),
    ),
    "a factory that is written": lambda a, b: torch.zeros(4, 4).index_add_(0, torch.arange(4), a).addmm_(a, b),
    "copies": lambda a, b: (a.t().clone(), b.to(torch.float64), a.bool(), a.t().contiguous(), a.to(torch.bfloat16)),
    "holes": lambda a, b: padded(a) * b + padded(b).t(),
    "expanded": lambda a, b: (a[:1].expand(4, 4) + b, torch.empty_like(a[:, :1].expand(4, 4)).copy_(b)),
    "optional tensors": lambda a, b: (
        functional.layer_norm(a, (4,)),
        functional.layer_norm(a, (4,), b[0], b[1]),
        a.clamp(b),
    ),
    "optional indices": lambda a, _: a.reshape(2, 2, 4)[:, torch.arange(1, -1, -1), torch.arange(2)],
    "complex numbers": lambda a, b: (
        torch.complex(a, b).conj() @ torch.complex(b, a),
        torch.fft.fft(a),
        torch.view_as_real(torch.complex(a, b)),
    ),
    "normalisation": with_batch_norm,
    "attention": lambda a, b: functional.scaled_dot_product_attention(a[None, None], b[None, None], a[None, None]),
    "multi-head attention": multi_head,
    "convolution": lambda a, b: functional.conv2d(a[None, None], b[None, None, :2, :2], padding=1),
    "the input itself": lambda a, b: (a, b[1:], a.view(-1)),
    "nothing": lambda _a, _b: None,
    "structure": lambda a, b: {"x": [a + b, (a - b, None, 7)], "y": torch.return_types.max((a.sum(0), b.sum(0)))},
}


@pytest.mark.parametrize("name", STEPS)
def test_an_operator_replays_as_eager_runs_it(name: str) -> None:
    """Three replays on other data, each continuing from what the last wrote, match eager in result and in place."""
    mine = [torch.randn(4, 4), torch.randn(4, 4)]
    before = [value.clone() for value in mine]
    graph = capture(lambda: STEPS[name](*mine))
    assert all(torch.equal(*pair) for pair in zip(mine, before, strict=True))
    addresses = [leaf.data_ptr() for leaf in pytree.tree_leaves(graph.outputs) if isinstance(leaf, torch.Tensor)]
    theirs = [value.clone() for value in mine]
    for _ in range(3):
        for one, other in zip(mine, theirs, strict=True):
            other.copy_(one.copy_(one + torch.randn(4, 4)))
        graph.replay()
        with torch.inference_mode():
            expected = STEPS[name](*theirs)
        torch.testing.assert_close(graph.outputs, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    leaves = [leaf for leaf in pytree.tree_leaves(graph.outputs) if isinstance(leaf, torch.Tensor)]
    assert addresses == [leaf.data_ptr() for leaf in leaves]


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand": lambda _: torch.rand(50),
    "randn_like": torch.randn_like,
    "randint": lambda _: torch.randint(0, 1000, (50,)),
    "randperm": lambda _: torch.randperm(50),
    "dropout": lambda value: functional.dropout(value, 0.5, training=True),
    "bernoulli": lambda value: torch.bernoulli(value.sigmoid()),
    "in place": lambda value: torch.empty_like(value).exponential_(),
    "multinomial": lambda value: torch.multinomial(value.softmax(0), 20),
    "gumbel": lambda value: functional.gumbel_softmax(value, hard=True),
    "the default generator": lambda _: torch.rand(50, generator=torch.default_generator),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_draw_anew_and_follow_the_generator(name: str) -> None:
    """Each replay draws other numbers, and the same ones as eager from the same seed."""
    value = torch.randn(50)
    graph = capture(lambda: RANDOM[name](value))
    torch.manual_seed(5)
    draws = []
    for _ in range(3):
        graph.replay()
        draws.append(graph.outputs.clone())
    torch.manual_seed(5)
    assert all(torch.equal(draw, RANDOM[name](value)) for draw in draws)
    assert not torch.equal(draws[0], draws[1])


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


class Doubled(torch.Tensor):
    """A wrapper that takes itself apart into the operators of what it wraps."""

    wrapped: torch.Tensor

    @staticmethod
    def of(wrapped: torch.Tensor) -> "Doubled":
        """Wrap a tensor; the wrapper itself has no memory."""
        wrapper: Doubled = cast("Any", torch.Tensor)._make_wrapper_subclass(Doubled, wrapped.shape)
        wrapper.wrapped = wrapped
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is of a static method
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do with the wrapped tensors what is asked of the wrappers."""
        del types
        plain = pytree.tree_map_only(cls, lambda wrapper: wrapper.wrapped * 2, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_tensor_subclasses_are_recorded_by_their_parts() -> None:
    """What a subclass does in terms of plain tensors is recorded like any other operator."""
    inner = torch.randn(3)
    doubled = Doubled.of(inner)
    graph = capture(lambda: doubled + 1)
    inner.copy_(torch.randn(3))
    graph.replay()
    assert torch.equal(graph.outputs, inner * 2 + 1)


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
    seen = []

    def step() -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return torch.ones(2)

    with torch.inference_mode(mode):
        capture(step)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (not mode, mode)
    assert seen == [(False, False)]


MOVES: dict[str, Callable[[torch.Tensor], object]] = {
    "set_": lambda value: cast("Any", value).set_(torch.randn(8)),
    "data": lambda value: setattr(value, "data", torch.randn(8)),
    "resize_": lambda value: value.resize_(4096),
    "storage": lambda value: value.untyped_storage().resize_(0),
}


def reading(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step that reads a tensor by a view of its own."""
    return lambda: value[2:] + 1


@pytest.mark.parametrize("name", MOVES)
def test_moved_addresses_are_found(name: str) -> None:
    """The first replay finds a source that moved since the capture; check_addresses finds one later."""
    for replays in (0, 1):
        value = torch.randn(8)
        graph = capture(reading(value))
        graph.check_addresses()
        for _ in range(replays):
            graph.replay()
        MOVES[name](value)
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


def test_a_large_cache_is_cloned_only_if_it_is_written() -> None:
    """What the step only reads is not copied, and gradients of a surrounding program are untouched."""
    weight = torch.randn(4, 4, requires_grad=True)
    loss = (weight * 2).sum()
    graph = capture(lambda: weight @ weight)
    graph.replay()
    cast("Any", loss).backward()
    assert weight.grad is not None
    with pytest.raises(CaptureError, match="gradients"):
        capture(lambda: cast("Any", (weight * 2).sum()).backward())
