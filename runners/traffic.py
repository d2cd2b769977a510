"""Traffic: which memory the operators of a run read and write."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..backends.recorder import decompose, is_composite, written
from ..backends.torch_modes import run_under

_PLAIN: Final[Any] = torch._C._disabled_torch_dispatch_impl  # noqa: SLF001 - of a tensor that no subclass takes apart
T = TypeVar("T")
Writes = Callable[[torch.Tensor, str, Sequence[Any]], None]
Done = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Tells of each operator that is run.

    A kernel that does not go through torch's dispatcher, such as a bare Triton kernel, is not seen.

    Args:
        writes: Called before an operator writes memory that was there before the run: the tensor, the operator's name,
            and its positional arguments.
        done: Called after an operator that is no mere view: its name, the tensors that it took, and those it returned.
    """

    supports_higher_order_operators = True

    def __init__(self, *, writes: Writes | None = None, done: Done | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        taken = list(_strided((args, named)))
        if not name.startswith("aten::lift"):  # which hands on what was made of host data a moment before
            self._found.update({_key(tensor) for tensor in taken} - self._made)
        if self._writes is not None:
            # of an operator that takes functions nobody knows what these write
            for tensor in _strided(list(written(func, args, named))) if is_plain else taken:
                if _key(tensor) not in self._made:
                    self._writes(tensor, name, args)
        result = func(*args, **named)
        results = list(_strided(result))
        self._made.update({_key(tensor) for tensor in results} - self._found)
        if self._done is not None and not (is_plain and func.is_view):
            self._done(name, taken, results)
        return result


def _strided(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory that has an address."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta):
            yield leaf


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it, too


def run_seen(traffic: Traffic, run: Callable[[], T]) -> T:
    """Run something while this thread's operators are looked at. Compiled functions run as they were written."""
    eagerly = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:  # it cannot trace what is looked at, and would remember that
        eagerly = torch.compiler.set_stance("force_eager")
    with eagerly:
        return run_under(traffic, run)
