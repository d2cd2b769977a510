"""Modes of torch that watch a call: off again after it, whatever interrupts it.

Python code switches a mode of torch off, and a signal may interrupt it. A KeyboardInterrupt then leaves the mode on for
the rest of the thread. Calls that are watched by a mode are therefore run here.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_C: Final[Any] = torch._C  # noqa: SLF001 - torch's stacks of modes have no public name
T = TypeVar("T")


def run_under(mode: TorchDispatchMode | TorchFunctionMode, call: Callable[[], T]) -> T:
    """Call something under a mode. Afterwards torch's stack of modes is as it was, whatever interrupted the call.

    A signal may come while torch itself has taken the mode off for a moment, or has not taken it off yet.
    """
    takes_functions = isinstance(mode, TorchFunctionMode)
    length = _C._len_torch_function_stack if takes_functions else _C._len_torch_dispatch_stack  # noqa: SLF001
    pop = _C._pop_torch_function_stack if takes_functions else functools.partial(_C._pop_torch_dispatch_stack, None)  # noqa: SLF001
    depth = length()
    try:
        try:
            mode.__enter__()  # type: ignore[no-untyped-call]
            return call()
        finally:
            if length() == depth + 1:
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    finally:
        while length() > depth:
            pop()
