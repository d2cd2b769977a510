"""The watch over a step that is to be captured in parts: what its graphs would read of what changes by step."""

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...backends.operators import written
from ...dataflow.binding import span
from ...dataflow.errors import CaptureError, SlotGraphError
from ..running import Running, running

_DEPTH: Final = 5
"""How far into an object tensors are looked for."""
_CLOSED: Final = (nn.Module, type, types.ModuleType, types.FunctionType)
"""What is not looked into: it has the same tensors in each step."""
_FIXED: Final = frozenset({"device", "dtype", "layout", "ndim", "dim", "is_cuda", "is_cpu", "requires_grad"})
"""What may be asked of a slot over requests in a graph: it is the same in each step."""


@attrs.frozen
class Use:
    """What graphs do with the arguments of the captured part: places of those that they read, and write."""

    read: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


class ReadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Looks at every operator outside of breaks.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    given: tensors that came with the arguments of the captured part, and their places. breaks: names of operators that
    will be breaks, and are none yet.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        forbidden: Mapping[str, torch.Tensor],
        given: Iterable[tuple[int, torch.Tensor]],
        breaks: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._breaks = breaks
        self._forbidden = [(*span(tensor), name) for name, tensor in forbidden.items() if tensor.numel()]
        self._given = [(*span(tensor), place) for place, tensor in given if tensor.numel()]
        self._read: set[int] = set()
        self._written: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    @property
    def use(self) -> Use:
        """What was seen of the arguments."""
        return Use(frozenset(self._read), frozenset(self._written))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note what an operator reads and writes, and run it. CaptureError where no graph may read that."""
        del types
        step, named = running(), dict(kwargs or {})
        if step is None or step.inside is not None:
            return func(*args, **named)
        name = operator_name(func)
        if name in self._breaks:
            with _inside(step, name):
                return func(*args, **named)
        for tensor in _tensors_in((args, named)):
            self._check(tensor, name)
            self._read.update(self._places(tensor))
        for tensor in written(func, args, named) if isinstance(func, torch._ops.OpOverload) else ():  # noqa: SLF001 - it has no public name
            self._written.update(self._places(tensor))
        step.operator = name
        try:
            return func(*args, **named)
        finally:
            step.operator = None

    def _check(self, tensor: torch.Tensor, operator: str) -> None:
        address = tensor.data_ptr()
        for low, high, name in self._forbidden:
            if low <= address < high:
                raise CaptureError(_reads(operator, name))

    def _places(self, tensor: torch.Tensor) -> Iterator[int]:
        address = tensor.data_ptr()
        return (place for low, high, place in self._given if low <= address < high)


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
        message = f"break {name!r} raised {type(error).__name__}: {error}"
        raise CaptureError(message) from error
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


def parts_of(holder: Any) -> Iterator[Any]:
    """What an object holds, one level down."""
    if isinstance(holder, Mapping):
        yield from holder.values()
    elif isinstance(holder, list | tuple | set):
        yield from holder
    else:
        yield from getattr(holder, "__dict__", {}).values()
        for kind in type(holder).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            yield from (getattr(holder, name, None) for name in ([slots] if isinstance(slots, str) else slots))


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.numel())


def _name_of(func: Callable[..., Any]) -> str:
    """A function's name; of the getter of an attribute that of the attribute."""
    return operator_name(getattr(func, "__self__", func) if func.__name__ == "__get__" else func)


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )
