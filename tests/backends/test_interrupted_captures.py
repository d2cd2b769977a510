"""A capture on cpu-capture that a KeyboardInterrupt ends, at any line: nothing of it is left on this thread."""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import overrides
from torch.utils import _python_dispatch

from slotgraph.backends import cpu_capture, operators
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow import guard
from slotgraph.runners.engine import capture
from slotgraph.runners.engine.capture import capture_step
from tests.strategies import same_bytes

HIDDEN: Any = torch._C
WHERE: Final = {inspect.getfile(one) for one in (capture, cpu_capture, operators, guard, _python_dispatch, overrides)}
AUTOCAST: Final = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def interrupted(run: Callable[[], object], at: int, event: str) -> bool:
    """Run something, with an interrupt at one of the lines or instructions of a capture; return whether it came."""
    left = itertools.count(at, -1)

    def trace(frame: Any, kind: str, _: object) -> Any:
        if frame.f_code.co_filename not in WHERE:
            return None
        frame.f_trace_opcodes = event == "opcode"
        if kind == event and not next(left):
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def thread_state() -> list[Any]:
    """What torch and Python have on this thread, and in this process, that a capture changes while it runs."""
    compiler = sys.modules["torch._dynamo.eval_frame"]
    torch.autocast_increment_nesting()
    return [
        torch.autocast_decrement_nesting(),
        torch.is_autocast_cache_enabled(),
        HIDDEN._get_torch_function_state(),
        HIDDEN._len_torch_dispatch_stack(),
        HIDDEN._len_torch_function_stack(),
        str(HIDDEN._dispatch_tls_local_include_set()),
        str(HIDDEN._dispatch_tls_local_exclude_set()),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_rng_state().tolist(),
        [*sys.meta_path],
        vars(compiler)["_stance"],
        _python_dispatch.is_in_torch_dispatch_mode(),
        vars(_python_dispatch)["_is_in_any_mode_without_ignore_compile_internals"],
        cpu_capture.active_recorder(),
    ]


@pytest.mark.parametrize(
    ("event", "stride"),
    [("line", 3), pytest.param("opcode", 5, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.inference_mode, AUTOCAST])
def test_an_interrupt_at_any_line_leaves_nothing_behind(around: Any, event: str, stride: int) -> None:
    """Torch's modes, the random state, and what the step wrote are as before the capture."""
    backend, state, value = CpuCaptureBackend(), torch.randn(4, 4), torch.randn(4)
    before = state.clone()

    def step() -> torch.Tensor:
        state.mul_(torch.rand(4))
        between: torch.Tensor = backend.interrupt(lambda _: value.sum())
        return torch.matmul(state, value) + between  # which is taken apart

    torch.compiler.set_stance("default")  # the compiler is loaded, and a capture changes its stance
    with around():
        at, expected = 0, thread_state()
        while interrupted(lambda: capture_step(backend, step, pool=None), at, event):
            assert thread_state() == expected, at
            assert same_bytes(state, before), at
            at += stride
    assert at > 100 * stride, "it was interrupted many times"
