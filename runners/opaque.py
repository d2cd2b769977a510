"""Methods that torch.compile runs as they are: it can trace neither locks nor graphs, nor what is below torch."""

import inspect
from typing import Any, Final, TypeVar

import torch

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
