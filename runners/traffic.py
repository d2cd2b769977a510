"""Traffic: which memory the operators of a run read and write, of that which was there before the run."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..backends.recorder import decompose, is_composite, written
from ..backends.torch_modes import run_under

_C: Final[Any] = torch._C  # noqa: SLF001 - what follows has no public name
_PLAIN: Final[Any] = _C._disabled_torch_dispatch_impl  # noqa: SLF001 - a tensor's that no subclass takes apart
_BORN: Final = frozenset({"aten::lift_fresh", "aten::lift", "aten::lift_fresh_copy"})
"""Operators that hand on what was made of host data a moment before."""
See = Callable[[torch.Tensor, str], None]
SeeWrite = Callable[[torch.Tensor, str, Sequence[Any]], None]
T = TypeVar("T")
Done = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def _unseen(tensor: torch.Tensor, operator: str) -> None:
    del tensor, operator


def _unwritten(tensor: torch.Tensor, operator: str, args: Sequence[Any]) -> None:
    del tensor, operator, args


def _undone(operator: str, taken: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    del operator, taken, results


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Tells of every tensor that an operator takes, and of every one that it writes, before it runs.

    reads: called with the tensor and the operator's name, for memory that was there before the run. writes: likewise,
    with the operator's positional arguments, too. done: called after an operator that is no mere view, with its name,
    and the tensors that it took and returned. What does not go through torch's dispatcher, such as a kernel of Triton's
    that is launched as it is, is not seen.
    """

    supports_higher_order_operators = True

    def __init__(self, reads: See = _unseen, writes: SeeWrite = _unwritten, done: Done = _undone) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads
        self._writes = writes
        self._done = done
        self._made: set[int] = set()
        self._found: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell of one operator, and run it."""
        if any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in types):
            return NotImplemented  # the subclass takes itself apart, and its parts come here
        named = dict(kwargs or {})
        is_plain = isinstance(func, torch._ops.OpOverload)  # noqa: SLF001 - no public name
        if is_plain and is_composite(func):  # which inference mode leaves whole: its parts tell what it reads
            return run_under(self, lambda: decompose(func, args, named))
        name = str(func._schema.name) if is_plain else str(func)  # noqa: SLF001 - likewise
        if name not in _BORN:
            self._tell(func, name, args, named)
        result = func(*args, **named)
        results = list(_strided(result))
        self._made.update({_key(tensor) for tensor in results} - self._found)
        if not (is_plain and func.is_view):
            self._done(name, list(_strided((args, named))), results)
        return result

    def _tell(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in self._old((args, kwargs)):
            self._found.add(_key(tensor))
            self._reads(tensor, name)
        is_plain = hasattr(func, "_schema")  # of one that takes functions nobody knows what these write
        for tensor in self._old(list(written(func, args, kwargs)) if is_plain else (args, kwargs)):
            self._writes(tensor, name, args)

    def _old(self, values: Any) -> Iterator[torch.Tensor]:
        return (tensor for tensor in _strided(values) if _key(tensor) not in self._made)


def _strided(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory that has an address."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta):
            yield leaf


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it, too


def run_seen(traffic: Traffic, run: Callable[[], T]) -> T:
    """Run something while this thread's operators are looked at; compiled functions run as they were written."""
    eagerly = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # it cannot trace what is looked at, and would remember that
        eagerly = torch.compiler.set_stance("force_eager")
    with eagerly:
        return run_under(traffic, run)
