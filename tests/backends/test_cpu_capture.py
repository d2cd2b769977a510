"""The cpu-capture backend: no trace of a capture, what is baked, modes, and what it refuses.

Refused is what CUDA refuses (torch 2.11, H200), unless a line says otherwise.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from slotgraph.backends.cpu_capture import CapturedGraph, CpuCaptureBackend
from slotgraph.dataflow.errors import CaptureError, ReplayError
from tests.strategies import same_bytes

HIDDEN: Any = torch  # the foreach functions are not exported
Modes = Callable[[], AbstractContextManager[object]]


def capture(step: Callable[[], Any]) -> CapturedGraph:
    """Capture a step and say that the graph is this backend's."""
    return cast("CapturedGraph", CpuCaptureBackend().capture(step))


def test_a_capture_leaves_state_and_random_numbers_alone() -> None:
    """What the step writes in place has the old bytes after the capture, and so has the generator."""
    cache, counter, flags = torch.randn(16, 4), torch.randint(0, 9, (5,)), torch.rand(7) > 0.5
    before = [cache.clone(), counter.clone(), flags.clone(), torch.get_rng_state()]

    def step() -> torch.Tensor:
        counter.add_(1)
        flags[2:5].logical_not_()
        HIDDEN._foreach_mul_([counter[1:], counter[:2]], 3)
        cache.index_copy_(0, torch.tensor(3).expand(1), torch.rand(1, 4))
        return cache.sum() + torch.rand(4)

    capture(step)
    after = [cache, counter, flags, torch.get_rng_state()]
    assert all(same_bytes(*pair) for pair in zip(before, after, strict=True))


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    """After an error in the step the modes are gone, the state is restored, and the error is the cause of ours."""
    state = torch.randn(6)
    before = state.clone()

    def step() -> None:
        state.mul_(2)
        raise KeyError("in the middle")

    with pytest.raises(CaptureError, match="in the middle") as caught:
        capture(step)
    assert isinstance(caught.value.__cause__, KeyError)
    assert same_bytes(state, before)
    assert state.sum().item() == before.sum().item()  # would be refused under the modes
    assert isinstance(capture(state.exp), CapturedGraph)


def test_a_refusal_that_the_step_swallows_still_fails_the_capture() -> None:
    """A step cannot go on with a made-up value, whichever of the two modes refused."""

    def swallow(read: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            try:
                read(value)
            except RuntimeError:
                return value + 0
            return value + 1

        return step

    value = torch.randn(3)
    for read in (torch.Tensor.tolist, torch.nonzero):
        with pytest.raises(CaptureError, match="went on after a refusal"):
            capture(swallow(cast("Any", read)))


def test_what_a_capture_allocates_is_poisoned_until_the_first_replay() -> None:
    """Floats are NaN, integers -1, bools true, and complex numbers NaN before anything was replayed."""
    value = torch.randn(8)
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.bool, torch.complex64)
    graph = capture(lambda: [value.abs().to(dtype) for dtype in dtypes])
    double, brain, eighth, integer, byte, flag, number = graph.outputs
    for floats in (double, brain, eighth.float(), number):
        assert bool(floats.isnan().all())
    assert set(integer.tolist()) == {-1}
    assert (set(byte.tolist()), set(flag.tolist())) == ({255}, {True})
    graph.replay()
    assert same_bytes(double, value.abs().double())


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("around_replay", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inference_mode_mixes(inside: Modes, outer: Modes, around_replay: Modes) -> None:
    """Capture, step and replay each in any mode: the same bytes, no inference tensors, no gradients."""
    with torch.inference_mode():
        weight, cache = torch.randn(5, 5), torch.randn(6, 5)
    parameter, state, value = torch.nn.Parameter(torch.randn(5)), torch.randn(5), torch.randn(3, 5)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with inside():
            cache[1:4].add_(value)
            state.add_(value.sum(0))
            return functional.linear(cache[:3] * parameter + state, weight), cache[2:5].cumsum(0)

    with outer():
        graph = capture(step)
        before = cache.clone()
        fresh = torch.randn(3, 5)
    with torch.inference_mode():
        value.copy_(fresh)
        eager_state, eager_cache = state + fresh.sum(0), before.clone()
        eager_cache[1:4] += fresh
        expected = functional.linear(eager_cache[:3] * parameter + eager_state, weight)
    with around_replay():
        graph.replay()
    assert same_bytes(graph.outputs[0], expected)
    assert same_bytes(graph.outputs[1], eager_cache[2:5].cumsum(0))
    assert same_bytes(cache, eager_cache)
    assert not any(output.is_inference() or output.requires_grad for output in graph.outputs)


def test_replay_ignores_a_surrounding_autocast() -> None:
    """Autocast is recorded as the casts that it made, and does nothing to a replay."""
    one, other = torch.randn(4, 4), torch.randn(4, 4)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = one @ other
        return low, functional.conv1d(one[None], other[:, :, None])

    graph = capture(step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert same_bytes(graph.outputs[0], one.bfloat16() @ other.bfloat16())
    assert same_bytes(graph.outputs[1], functional.conv1d(one[None], other[:, :, None]))


def test_nbytes_counts_what_the_graph_holds_beside_its_outputs() -> None:
    """Intermediates count, inputs and outputs do not."""
    value = torch.randn(16)
    graph = capture(lambda: (value * 2).exp().reshape(4, 4))
    assert graph.nbytes == 16 * 4


def test_captures_and_replays_do_not_nest() -> None:
    """Neither a capture nor a replay can happen inside a capture, as on a device."""
    value = torch.randn(3)
    graph = capture(lambda: value + 1)
    with pytest.raises(CaptureError, match="cannot contain another"):
        capture(lambda: capture(lambda: value + 1))
    with pytest.raises(CaptureError, match="while this thread is capturing") as caught:
        capture(graph.replay)
    assert isinstance(caught.value.__cause__, ReplayError)


def test_an_operator_that_fails_at_replay_is_a_replay_error() -> None:
    """What a device would assert, such as an index out of range, is raised with its cause."""
    table, index = torch.randn(5, 2), torch.tensor([1, 2])
    graph = capture(lambda: functional.embedding(index, table))
    index.fill_(99)
    with pytest.raises(ReplayError, match="index out of range") as caught:
        graph.replay()
    assert isinstance(caught.value.__cause__, IndexError)


class Tensors:
    """What the cases work on; all of it random, some of it with structure."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.x, self.y, self.p = torch.randn(4, 4), torch.randn(4, 4), torch.rand(4, 4) * 0.8 + 0.1
        self.row, self.scalar = torch.randn(4), torch.rand(())
        self.mask = torch.rand(4, 4) > 0.5
        self.mask[0, 0], self.mask[0, 1] = True, False
        self.index, self.count, self.one = torch.randperm(4), torch.full((4,), 2), torch.tensor(1)
        self.square = torch.randn(4, 4) + 6 * torch.eye(4)
        self.heads = torch.randn(2, 2, 4, 4)


REFUSED = """
x[0, 0].item(); x.tolist(); x.numpy(); np.asarray(x); x.cpu(); x.to("cpu"); x.to(device="cpu", dtype=torch.float64)
1 if scalar else 2; int(one); float(scalar); complex(scalar); range(one); f"{x}"; repr(x); 3 in x; torch.zeros(one)
x[:one]; x[one]; torch.full((3,), scalar); torch.is_nonzero(scalar); torch.allclose(x, y); torch.equal(x, x)
mask.nonzero(); torch.argwhere(mask); torch.where(mask); x.masked_select(mask); x[mask]; x[mask[0]]
torch.unique(index); torch.unique_consecutive(index); torch.bincount(index, minlength=6); torch.histc(x, 4)
torch.repeat_interleave(x, count, dim=0); functional.one_hot(index); torch.tensor(2.0, device=x.device)
torch.tensor([1.0, 2.0]); torch.as_tensor(2.0, device=x.device); x.new_tensor([1.0]); torch.from_numpy(np.ones(3)) + 1
x[[0, 2]]; x.__setitem__((0, 0), 1.0); x.__setitem__(index, 1.0); x.__setitem__(mask, scalar)
x.__setitem__(mask[0], row); x.masked_fill_(mask, scalar); x.index_fill_(0, index, scalar)
torch.linalg.cholesky(square @ square.T); torch.linalg.inv(square)
torch.linalg.solve(square, x); torch.linalg.svd(square); torch.linalg.eigh(square); torch.linalg.eig(square)
torch.linalg.lstsq(square, x); torch.linalg.pinv(square); torch.linalg.matrix_exp(square)
torch.rand(3, generator=torch.Generator()); x.to_sparse()
"""
MOVED = """
x.clone().resize_(2); x.set_(y); setattr(x, "data", y); (x + 1, x.untyped_storage().resize_(4096))
copy.deepcopy(x); x.sum().backward(); torch.autograd.grad(x.sum(), x)
torch.tensor(1.0).add_(scalar); torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
"""
"""What CUDA captures and this backend refuses, because it moves addresses, or is not recorded here."""


def cases(table: str) -> list[str]:
    """The expressions of a table."""
    return table.strip().replace("\n", "; ").split("; ")


def value_of(expression: str, tensors: Tensors, **names: Any) -> Any:
    """What an expression gives, of tensors by their names."""
    return eval(expression, {"torch": torch, "functional": functional, **names, **vars(tensors)})  # noqa: S307 - ours


@pytest.mark.parametrize("expression", cases(REFUSED) + cases(MOVED))
def test_refused(expression: str) -> None:
    """The capture fails with the operation and what to do instead, and the step's tensors keep their bytes."""
    tensors = Tensors()
    before = {key: value.clone() for key, value in vars(tensors).items()}
    with pytest.raises(CaptureError, match=r"a captured step cannot use .+: \w+"):
        CpuCaptureBackend().capture(lambda: value_of(expression, tensors, np=np, copy=copy))
    for key, value in before.items():
        assert torch.equal(getattr(tensors, key), value)


def test_a_refusal_names_the_operation_and_the_way_out() -> None:
    """The message is one that a reader can act on."""
    value = torch.randn(4)
    with pytest.raises(CaptureError, match=r"cannot use Tensor\.item: keep the value on the device \(torch\.where"):
        CpuCaptureBackend().capture(value[0].item)
    with pytest.raises(CaptureError, match=r"cannot use aten\.index\.Tensor: its shape depends on values"):
        CpuCaptureBackend().capture(lambda: value[value > 0])
