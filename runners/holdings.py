"""Holdings: the tensors that a step reaches without its view (closures, globals, attributes), and where they lay."""

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..dataflow.inputs import Inputs

DEPTH: Final = 12
"""How far from the step tensors are looked for."""
MOST: Final = 200_000
"""Objects that are looked at."""
_CLOSED: Final = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    str,
    bytes,
    int,
    float,
    complex,
    torch.dtype,
    Inputs,
)
"""What is not looked into."""
Way = tuple[str, Any]
"""How one object leads to another: by a word for what it is, and a name."""


@attrs.frozen(eq=False)
class Holding:
    """One tensor as it was: how the step reaches it, and its storage, which is not kept alive.

    same: the tensor's identity and address, by which most are found unchanged at once. place: of its storage.
    """

    ways: tuple[Way, ...]
    same: tuple[int, int]
    storage: StorageWeakRef
    place: tuple[int, int]
    text: str

    @property
    def is_freed(self) -> bool:
        """Whether everyone has let go of its memory."""
        return bool(self.storage.expired())  # type: ignore[no-untyped-call] # torch's own

    @property
    def name(self) -> str:
        """What a step's author calls it."""
        return "".join(_said(kind, name) for kind, name in self.ways).removeprefix(".")


@attrs.frozen(eq=False)
class Change:
    """A tensor that is not where it was. now: the one that the step reaches in its place."""

    holding: Holding
    now: torch.Tensor

    @property
    def what(self) -> str:
        """What became of it."""
        gone = self.holding.is_freed
        return "the memory of the capture is freed" if gone else "it is other memory than at capture"


@attrs.frozen(eq=False, slots=False)
class Holdings:
    """All tensors that a step reached at one moment."""

    root: Callable[..., Any] | None
    found: tuple[Holding, ...] = ()

    @classmethod
    def of(cls, step: Callable[..., Any]) -> "Holdings":
        """What a step reaches now."""
        return cls(step, tuple(_holdings(step)))

    def joined(self, later: "Holdings") -> "Holdings":
        """These, and what came later in other ways."""
        known = {one.ways for one in self.found}
        return Holdings(self.root, (*self.found, *(one for one in later.found if one.ways not in known)))

    def changed(self) -> list[Change]:
        """Tensors that are not where they were, of those that the step still reaches in the same way."""
        reached: list[Any] = [self.root]
        for owner, lead, name in self._paths:
            try:
                reached.append(lead(reached[owner], name))
            except (
                AttributeError,
                LookupError,
                StopIteration,
                TypeError,
                ValueError,
            ):  # the way leads nowhere any more
                reached.append(None)
        pairs = ((one, reached[at]) for one, at in zip(self.found, self._ends, strict=True))
        return [
            Change(holding, now)
            for holding, now in pairs
            if isinstance(now, torch.Tensor) and not _same(holding, now) and _has_address(now)
        ]

    @functools.cached_property
    def _numbers(self) -> dict[tuple[Way, ...], int]:
        """Every part of every way, each after the one that leads to it."""
        numbers: dict[tuple[Way, ...], int] = {(): 0}
        for one in self.found:
            for length in range(1, len(one.ways) + 1):
                numbers.setdefault(one.ways[:length], len(numbers))
        return numbers

    @functools.cached_property
    def _paths(self) -> list[tuple[int, Callable[[Any, Any], Any], Any]]:
        """How each part is reached: the number of what leads to it, a call and a name."""
        parts = list(self._numbers)[1:]
        return [(self._numbers[ways[:-1]], _LEAD[ways[-1][0]], ways[-1][1]) for ways in parts]

    @functools.cached_property
    def _ends(self) -> list[int]:
        return [self._numbers[one.ways] for one in self.found]


def _same(holding: Holding, now: torch.Tensor) -> bool:
    if (id(now), _address_of(now)) == holding.same:
        return True
    if not _has_address(now):
        return False
    storage = now.untyped_storage()
    return storage._cdata == holding.storage.cdata and _place(storage) == holding.place  # noqa: SLF001 - as torch does


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _holdings(root: Any) -> Iterator[Holding]:
    seen, todo = set[int](), [(root, tuple[Way, ...]())]
    while todo and len(seen) < MOST:
        one, ways = todo.pop()
        if id(one) in seen or isinstance(one, _CLOSED):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if _has_address(one):
                storage = one.untyped_storage()
                text = f"{str(one.dtype).removeprefix('torch.')} of shape {list(one.shape)}"
                kept_by_others = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's own
                yield Holding(ways, (id(one), one.data_ptr()), kept_by_others, _place(storage), text)
        elif len(ways) < DEPTH:
            todo += [(inner, (*ways, way)) for way, inner in _inside(one)]


def _has_address(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return plain and tensor.numel() > 0


def _inside(one: Any) -> Iterator[tuple[Way, Any]]:
    """What an object leads to, and how."""
    if isinstance(one, types.FunctionType):
        yield from _named_by(one)
    elif isinstance(one, types.MethodType):
        yield ("self", "self"), one.__self__
        yield ("code", ""), one.__func__
    elif isinstance(one, functools.partial):
        yield from ((("call", name), getattr(one, name)) for name in ("func", "args", "keywords"))
    elif isinstance(one, Mapping):
        yield from ((("item", key), value) for key, value in list(one.items()) if isinstance(key, str | int))
    elif isinstance(one, list | tuple):
        yield from ((("item", at), value) for at, value in enumerate(one))
    else:
        yield from ((("attribute", name), value) for name, value in _attributes(one).items())


def _named_by(function: types.FunctionType) -> Iterator[tuple[Way, Any]]:
    """Variables of a function that it did not make itself."""
    code, known = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield ("variable", name), cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from ((("variable", name), known[name]) for name in code.co_names if name in known)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield ("wrapped", ""), wrapped


def _attributes(one: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            value = getattr(one, name, None)
            if value is not None:
                found[name] = value
    held: dict[str, Any] = getattr(one, "__dict__", {})
    if isinstance(one, nn.Module):
        own = {name: value for name, value in held.items() if not name.startswith("_")}
        return found | own | one._parameters | one._buffers | one._modules  # noqa: SLF001 - as named_parameters does
    return found | held


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_meta else 0


def _variable(function: types.FunctionType, name: str) -> Any:
    names = function.__code__.co_freevars
    if name in names and function.__closure__ is not None:
        return function.__closure__[names.index(name)].cell_contents
    return function.__globals__[name]


def _attribute(one: Any, name: str) -> Any:
    held = getattr(one, "__dict__", {})
    if name in held:
        return held[name]
    if isinstance(one, nn.Module):  # whose own way is slow
        return next(held[kind][name] for kind in ("_parameters", "_buffers", "_modules") if name in held[kind])
    return getattr(one, name)


_LEAD: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "variable": _variable,
    "self": lambda one, _: one.__self__,
    "code": lambda one, _: one.__func__,
    "wrapped": lambda one, _: one.__wrapped__,
    "call": getattr,
    "item": lambda one, name: one[name],
    "attribute": _attribute,
}


def _said(kind: str, name: Any) -> str:
    if kind in ("code", "wrapped", "call"):
        return ""
    return f"[{name!r}]" if kind == "item" else f".{name}"
