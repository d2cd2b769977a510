"""Exclusive use: a runner is not copied, runs one step at a time, and is not traced by torch.compile."""

import inspect
import threading
from typing import Any, Final, NoReturn, SupportsIndex, TypeVar

import torch

from ..dataflow.errors import ReplayError

_C: Final[Any] = torch._C  # noqa: SLF001 - torch.compiler.disable would import the compiler
_FRAMES: Final[Any] = _C._dynamo.eval_frame  # noqa: SLF001 - as above
Kind = TypeVar("Kind", bound=type)


def opaque(kind: Kind) -> Kind:
    """Have a compiled function call the public methods of a class as `torch.compiler.disable` would.

    The compiled function is split there. This marks the methods' code, and so a call costs what it did.
    """
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
            method._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - as torch marks such
            _skip(method.__code__)
    return kind


def _skip(code: Any) -> None:
    if hasattr(_FRAMES, "set_code_exec_strategy"):
        skip = _FRAMES._FrameAction.SKIP  # noqa: SLF001 - no public name
        _FRAMES.set_code_exec_strategy(code, _FRAMES._FrameExecStrategy(skip, skip))  # noqa: SLF001 - likewise
    else:  # torch 2.6, which goes on to look at what the method calls
        _FRAMES.skip_code(code)


class Unique:
    """Refuses `copy.copy`, `copy.deepcopy` and pickle: a copy would use the same buffers, graphs and counters."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise ReplayError."""
        del protocol
        name = type(self).__name__
        raise ReplayError(
            f"a {name} cannot be copied or pickled: the copy would share its memory, and each would overwrite what the "
            f"other has filled; make another {name}"
        )


class Gate:
    """Lets one step or capture in, and refuses every call meanwhile: another thread's, or one of the step itself.

    lock: to be held by the step, after a look whether someone holds it. Who looks at the same moment as another waits
    for that one's step instead, which is as safe. A lock of C, because a signal that comes between a function's return
    from taking something and the statement that sees to its return would leave it taken for good.
    """

    __slots__ = ("_runner", "lock")

    def __init__(self, runner: str) -> None:
        self._runner = runner
        self.lock = threading.Lock()

    def open(self) -> threading.Lock:
        """The lock, to go in by. ReplayError where somebody is in."""
        if self.lock.locked():
            raise self.refusal()
        return self.lock

    def refusal(self) -> ReplayError:
        """The error for a caller that finds the runner busy."""
        message = (
            f"this {self._runner} is in the middle of a step or a capture: another thread runs it, or its own step "
            "calls it; give each thread a runner of its own, or take turns by a lock of yours"
        )
        return ReplayError(message)
