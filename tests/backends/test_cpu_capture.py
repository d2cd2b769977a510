"""The cpu-capture backend: no trace of a capture, what is baked, modes, and what goes wrong."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

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
    """Floats are NaN, integers the extreme, bools true, and complex numbers NaN before anything was replayed."""
    value = torch.randn(8)
    dtypes = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.uint8, torch.bool, torch.complex64)
    graph = capture(lambda: [value.abs().to(dtype) for dtype in dtypes])
    double, brain, eighth, integer, byte, flag, number = graph.outputs
    for floats in (double, brain, eighth.float(), number):
        assert bool(floats.isnan().all())
    assert set(integer.tolist()) == {torch.iinfo(torch.int32).min}
    assert (set(byte.tolist()), set(flag.tolist())) == ({255}, {True})
    graph.replay()
    assert same_bytes(double, value.abs().double())


def test_host_scalars_and_control_flow_are_baked() -> None:
    """A python number, a branch and a loop count keep what they were at capture."""
    settings = {"scale": 2.0, "twice": True, "rounds": 2}
    value = torch.randn(4)

    def step() -> torch.Tensor:
        result = value * settings["scale"] if settings["twice"] else value
        for _ in range(int(settings["rounds"])):
            result = result + torch.full((4,), settings["scale"])
        return result

    graph = capture(step)
    settings.update(scale=-7.0, twice=False, rounds=5)
    graph.replay()
    assert same_bytes(graph.outputs, value * 2.0 + 2.0 + 2.0)


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
