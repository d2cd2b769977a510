"""Holdings: the tensors that a step reaches without its view (closures, globals, attributes), and where they lay."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter, itemgetter
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
_LOST: Final = (AttributeError, LookupError, TypeError, ValueError)
"""What is raised where a way leads nowhere any more."""
_MODULE: Final = ("_parameters", "_buffers", "_modules")


@attrs.frozen(eq=False)
class Way:
    """How the step leads to an object: from what, and by which call. path: what a step's author calls it."""

    path: str = ""
    depth: int = 0
    before: "Way | None" = None
    lead: Callable[[Any], Any] = id

    def reach(self, known: dict["Way", Any]) -> Any:
        """What is there now; None where it leads nowhere any more. known: what was found at other ways so far."""
        if self not in known:
            try:
                known[self] = None if self.before is None else self.lead(self.before.reach(known))
            except _LOST:
                known[self] = None
        return known[self]


_START: Final = Way()


@attrs.frozen(eq=False)
class Holding:
    """One tensor as it was: how the step reaches it, and its storage, which is not kept alive.

    same: the tensor's identity and address, by which most are found unchanged at once. place: of its storage.
    """

    way: Way
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
        return self.way.path.removeprefix(".")


@attrs.frozen(eq=False)
class Change:
    """A tensor that is not where it was. now: the one that the step reaches in its place."""

    holding: Holding
    now: torch.Tensor

    @property
    def what(self) -> str:
        """What became of it."""
        return "the memory of the capture is freed" if self.holding.is_freed else "it is other memory than at capture"


@attrs.frozen(eq=False)
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
        known = {one.name for one in self.found}
        return attrs.evolve(self, found=(*self.found, *(one for one in later.found if one.name not in known)))

    def changed(self) -> list[Change]:
        """Tensors that are not where they were, of those that the step still reaches in the same way."""
        known: dict[Way, Any] = {_START: self.root}
        pairs = ((one, one.way.reach(known)) for one in self.found)
        return [
            Change(one, now)
            for one, now in pairs
            if isinstance(now, torch.Tensor) and not _same(one, now) and _has_address(now)
        ]


def _same(holding: Holding, now: torch.Tensor) -> bool:
    if (id(now), now.data_ptr() if now.layout is torch.strided and not now.is_meta else 0) == holding.same:
        return True
    if not _has_address(now):
        return False
    storage = now.untyped_storage()
    return storage._cdata == holding.storage.cdata and _place(storage) == holding.place  # noqa: SLF001 - as torch does


def _place(storage: torch.UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()


def _has_address(tensor: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    return plain and tensor.numel() > 0


def _holdings(root: Any) -> Iterator[Holding]:
    seen, todo = set[int](), [(root, _START)]
    while todo and len(seen) < MOST:
        one, way = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            if _has_address(one):
                storage = one.untyped_storage()
                text = f"{str(one.dtype).removeprefix('torch.')} of shape {list(one.shape)}"
                kept_by_others = StorageWeakRef(storage)  # type: ignore[no-untyped-call] # torch's own
                yield Holding(way, (id(one), one.data_ptr()), kept_by_others, _place(storage), text)
        elif way.depth < DEPTH:
            for said, lead in _leads(one):
                with contextlib.suppress(*_LOST):  # such as a closure's variable that is not bound yet
                    if not isinstance(inner := lead(one), _CLOSED):
                        todo.append((inner, Way(way.path + said, way.depth + 1, way, lead)))


def _leads(one: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What an object leads to: what its author calls that, and how it is reached."""
    if isinstance(one, types.FunctionType):
        code = one.__code__
        yield from ((f".{name}", functools.partial(_cell, place)) for place, name in enumerate(code.co_freevars))
        yield from ((f".{name}", functools.partial(_held, "__globals__", name)) for name in code.co_names)
        yield "", attrgetter("__wrapped__")
    elif isinstance(one, types.MethodType):
        yield from ((".self", attrgetter("__self__")), ("", attrgetter("__func__")))
    elif isinstance(one, functools.partial):
        yield from (("", attrgetter(name)) for name in ("func", "args", "keywords"))
    elif isinstance(one, Mapping | list | tuple):
        keys = list(one) if isinstance(one, Mapping) else range(len(one))
        yield from ((f"[{key!r}]", itemgetter(key)) for key in keys if isinstance(key, str | int))
    else:
        for kind in type(one).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            yield from ((f".{name}", attrgetter(name)) for name in ([slots] if isinstance(slots, str) else slots))
        held, is_module = getattr(one, "__dict__", {}), isinstance(one, nn.Module)
        for name in held:
            if is_module and name in _MODULE:
                yield from ((f".{key}", functools.partial(_held, name, key)) for key in held[name])
            elif not (is_module and name.startswith("_")):
                yield f".{name}", functools.partial(_held, "__dict__", name)


def _cell(place: int, function: types.FunctionType) -> Any:
    return (function.__closure__ or ())[place].cell_contents


def _held(where: str, name: str, one: Any) -> Any:
    return getattr(one, where)[name]
