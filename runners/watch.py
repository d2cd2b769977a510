"""The watch over a step that is to be captured in parts: what its graphs would read of what changes by step."""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..dataflow.binding import span
from ..dataflow.errors import CaptureError
from .running import running

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


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Looks at every operator outside of breaks.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    given: tensors that came with the arguments of the captured part, and their places.
    """

    def __init__(self, forbidden: Mapping[str, torch.Tensor], given: Iterable[tuple[int, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        for tensor in _tensors_in((args, named)):
            self._check(tensor, func)
            self._read.update(self._places(tensor))
        for tensor in _tensors_in(list(_written(func, args, named))):
            self._written.update(self._places(tensor))
        step.operator = str(func)
        try:
            return func(*args, **named)
        finally:
            step.operator = None

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        address = tensor.data_ptr()
        for low, high, name in self._forbidden:
            if low <= address < high:
                raise CaptureError(_reads(str(func), name))

    def _places(self, tensor: torch.Tensor) -> Iterator[int]:
        address = tensor.data_ptr()
        return (place for low, high, place in self._given if low <= address < high)


class Fenced(torch.Tensor):
    """A slot over requests while graphs are looked at: to be handed to breaks, and to nothing else."""

    _slot: str

    @classmethod
    def around(cls, tensor: torch.Tensor, slot: str) -> "Fenced":
        """The same memory behind a fence."""
        fenced = tensor.as_subclass(cls)
        fenced._slot = slot  # noqa: SLF001 - its own field
        return fenced

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """CaptureError, but for what is the same in each step."""
        del types
        name = _name_of(func)
        if name not in _FIXED:
            found = (one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, cls))
            raise CaptureError(_reads(name, next(one._slot for one in found)))  # noqa: SLF001 - as above
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            return func(*args, **(kwargs or {}))


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
            todo += [(inner, depth + 1) for inner in _parts_of(one)]


def _parts_of(holder: Any) -> Iterator[Any]:
    if isinstance(holder, Mapping):
        yield from holder.values()
    elif isinstance(holder, list | tuple | set):
        yield from holder
    else:
        yield from getattr(holder, "__dict__", {}).values()
        for kind in type(holder).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            yield from (getattr(holder, name, None) for name in ([slots] if isinstance(slots, str) else slots))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments that an operator writes, as its schema says."""
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.numel())


def _name_of(func: Callable[..., Any]) -> str:
    """A function's name; of the getter of an attribute that of the attribute."""
    owner = getattr(func, "__self__", None)
    return str(getattr(owner if func.__name__ == "__get__" else func, "__name__", func))


def _reads(what: str, slot: str) -> str:
    return (
        f"{what} reads slot {slot!r}, whose rows are requests, outside of a break: its graph would hold for one number "
        f"of requests. Read it in a break, which gets each step's own rows when it is handed view.{slot} or the view"
    )
