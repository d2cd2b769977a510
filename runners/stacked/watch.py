"""The watch over a step that is to be captured in parts: what its graphs would read of what changes by step."""

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...backends.operators import OperatorWatch, is_plain, tensors_in, written
from ...dataflow.buffers import span
from ...dataflow.errors import CaptureError, SlotGraphError
from ..running import Running, running

T = TypeVar("T")
_DEPTH: Final = 5
"""How far into an object tensors are looked for."""
_CLOSED: Final = (nn.Module, type, types.ModuleType, types.FunctionType)
"""What is not looked into: it has the same tensors in each step."""
_FIXED: Final = frozenset({"device", "dtype", "layout", "ndim", "dim", "is_cuda", "is_cpu", "requires_grad"})
"""What may be asked of a slot over requests in a graph: it is the same in each step."""


@attrs.frozen
class Use:
    """What graphs do with the arguments of the captured part: places of those that they read, and write."""

    read: set[int] = attrs.field(factory=set)
    written: set[int] = attrs.field(factory=set)


class ReadWatch(OperatorWatch):
    """Looks at every operator outside of breaks, and notes its use of what it was given.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    given: tensors that came with the arguments of the captured part, and their places. breaks: names of operators that
    will be breaks, and are none yet.
    """

    def __init__(
        self,
        forbidden: Mapping[str, torch.Tensor],
        given: Iterable[tuple[int, torch.Tensor]],
        breaks: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.use = Use()
        self._breaks = breaks
        self._forbidden = [(*span(tensor), name) for name, tensor in forbidden.items() if tensor.numel()]
        self._given = [(*span(tensor), place) for place, tensor in given if tensor.numel()]

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what an operator reads and writes, and run it. CaptureError where no graph may read that."""
        step, name = running(), operator_name(operator)
        if step is None or step.inside is not None:
            return operator(*args, **kwargs)
        if name in self._breaks:
            with _inside(step, name):
                return operator(*args, **kwargs)
        taken = tensors_in((args, kwargs))
        for slot in _at(taken, self._forbidden):
            raise CaptureError(_reads(name, slot))
        self.use.read.update(_at(taken, self._given))
        if is_plain(operator):
            self.use.written.update(_at(written(operator, args, kwargs), self._given))
        step.operator = name
        try:
            return operator(*args, **kwargs)
        finally:
            step.operator = None


def _at(tensors: Iterable[torch.Tensor], known: Sequence[tuple[int, int, T]]) -> Iterator[T]:
    """What lies where one of these tensors begins."""
    for address in [tensor.data_ptr() for tensor in tensors if tensor.numel()]:
        yield from (what for low, high, what in known if low <= address < high)


class Fenced(torch.Tensor):
    """A slot over requests while graphs are looked at: to be handed to breaks, and to nothing else."""

    _slot: str
    _breaks: frozenset[str]

    @classmethod
    def around(cls, tensor: torch.Tensor, slot: str, breaks: frozenset[str] = frozenset()) -> "Fenced":
        """The same memory behind a fence. breaks: names of functions that will be breaks, and may have it."""
        fenced = tensor.as_subclass(cls)
        fenced._slot, fenced._breaks = slot, breaks  # noqa: SLF001 - its own fields
        return fenced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """CaptureError, but for what is the same in each step, and for breaks."""
        del types
        first = next(one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls))
        name, operator, step = _name_of(func), operator_name(func), running()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            if name in _FIXED:
                return func(*args, **(kwargs or {}))
            if step is None or operator not in first._breaks:  # noqa: SLF001 - as above
                raise CaptureError(_reads(name, first._slot))  # noqa: SLF001 - as above
            plain, named = pytree.tree_map_only(cls, _unfenced, (args, kwargs or {}))
            with _inside(step, operator):
                return func(*plain, **named)


def _unfenced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


@contextlib.contextmanager
def _inside(step: Running, name: str) -> Iterator[None]:
    """While what will be a break runs. CaptureError with its name where it raises."""
    step.inside = name
    try:
        yield
    except SlotGraphError:
        raise
    except Exception as error:
        raise CaptureError(f"break {name!r} raised {type(error).__name__}: {error}") from error
    finally:
        step.inside = None


def operator_name(target: Any) -> str:
    """An operator's name, "namespace::operator"; of a function in Python its own."""
    if isinstance(target, torch._ops.OpOverload):  # noqa: SLF001 - no public name
        return str(target._schema.name).split(".")[0]  # noqa: SLF001 - likewise
    if isinstance(target, torch._ops.OpOverloadPacket):  # noqa: SLF001 - likewise
        return target._qualified_op_name  # noqa: SLF001 - likewise
    return str(getattr(target, "__name__", target))


def tensors_within(holder: Any) -> Iterator[torch.Tensor]:
    """The tensors that an object holds, a few levels down."""
    seen, todo = set[int](), [(holder, 0)]
    while todo:
        one, depth = todo.pop()
        if id(one) in seen or isinstance(one, _CLOSED):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif depth < _DEPTH:
            todo += [(inner, depth + 1) for inner in parts_of(one)]


def parts_of(holder: Any) -> list[Any]:
    """What an object holds, one level down."""
    if isinstance(holder, Mapping):
        return [*holder.values()]
    if isinstance(holder, list | tuple | set):
        return [*holder]
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(holder).__mro__]
    names = [name for some in slots for name in ([some] if isinstance(some, str) else some)]
    return [*getattr(holder, "__dict__", {}).values(), *(getattr(holder, name, None) for name in names)]


def _name_of(func: Callable[..., Any]) -> str:
    """A function's name; of the getter of an attribute that of the attribute."""
    return operator_name(getattr(func, "__self__", func) if func.__name__ == "__get__" else func)


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )
