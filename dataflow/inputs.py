"""`Inputs`: the base of declarations, whose instances are the batch handed in and the view handed out."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

import attrs

from .axes import TOKENS, Axis
from .declaration import Declaration, declare
from .errors import DeclarationError
from .slots import Slot
from .specifiers import SLOT, computed, constant, copied, host_parameter, output, slot, staged
from .step import Step
from .views import ViewInfo, narrowed


class _Namespace(dict[str, Any]):
    """A class body that remembers which slot it was given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        if _slot_in(self.get(name)) is not None:
            self.twice.append(name)
        super().__setitem__(name, value)


def _slot_in(field: object) -> Slot | None:
    """The slot that a field carries, before or after attrs made an attribute of it."""
    found = (getattr(field, "metadata", None) or {}).get(SLOT)
    return found if isinstance(found, Slot) else None


class _Declaring(type):
    """Keeps a class body's duplicates for the check."""

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **keywords: Any) -> _Namespace:
        del name, bases, keywords
        return _Namespace()

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        twice = tuple(namespace.twice) if isinstance(namespace, _Namespace) else ()
        return super().__new__(cls, name, bases, {**namespace, "_slotgraph_twice": twice}, **keywords)


@dataclass_transform(
    kw_only_default=True,
    eq_default=False,
    field_specifiers=(copied, host_parameter, computed, constant, staged, output, slot),
)
class Inputs(metaclass=_Declaring):
    """Subclass it and declare slots; subclass that to add, override or `drop` some.

    A field that is no slot is carried from the batch into the view. One without a default is not to be seen while a
    graph is captured, since its value would be frozen there; one with a default is, and a batch whose value differs
    from the default does not go through the graph.
    """

    slotgraph: ClassVar[Declaration]
    _slotgraph_dropped: ClassVar[frozenset[str]] = frozenset()
    _slotgraph_twice: ClassVar[tuple[str, ...]] = ()
    _slotgraph_view: ViewInfo | None = None

    def __init_subclass__(cls, *, drop: Iterable[str] = (), **keywords: Any) -> None:
        """Make an attrs class of the declaration, in place, and check all of it.

        drop: slots and fields of a base that this declaration does without. Raises DeclarationErrors.
        """
        super().__init_subclass__(**keywords)
        own = set(inspect.get_annotations(cls))
        inherited = frozenset().union(*(getattr(base, "_slotgraph_dropped", ()) for base in cls.__bases__))
        dropped = tuple(drop)
        cls._slotgraph_dropped = (inherited - own) | frozenset(dropped)
        unknown = [name for name in dropped if name not in _inherited_names(cls)]
        _define(cls)
        found = [*_duplicates(cls), *_unknown_drops(cls, unknown)]
        slots = {a.name: kind for a in _attributes(cls) if (kind := _slot_in(a)) is not None}
        fields = {a.name: a.default for a in _attributes(cls) if a.name not in slots}
        cls.slotgraph = declare(cls.__name__, slots, fields, found)

    def narrow(self, axis: Axis, start: int, stop: int, *, tokens: tuple[int, int] | None = None) -> Self:
        """The micro-batch of rows `start` to `stop` on `axis`: the view that the sliced batch would have filled.

        Slots are views of this one's; computed slots are computed anew for the micro-batch. tokens: the range on
        TOKENS that belongs to a range on BATCH, needed where requests differ in length.
        """
        ranges = {axis: (start, stop)} | ({} if tokens is None else {TOKENS: tokens})
        return narrowed(self, self.slotgraph.slots, self._slotgraph_view, ranges)

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Values of a stand-in batch that breaks see while a bucket is captured, by slot or field; override it.

        step: its live sizes are those that the values must have: one request, which owns every token of the bucket.
        A copied slot that is not named holds its pad value.
        """
        del step
        return {}

    if not TYPE_CHECKING:  # checkers would take any name for a field

        def __getattr__(self, name: str) -> Any:
            """Say why a declared name has no value here."""
            if name in type(self).slotgraph.fields:
                message = (
                    f"{name!r} is carried from the batch and has no default, so no graph may depend on it: it is not "
                    "to be seen during capture. Make it a slot, or give it a default that holds for every graph"
                )
            elif self._slotgraph_view is not None and name in type(self).slotgraph.slots:
                message = (
                    f"slot {name!r} follows from what the host computes, and a captured step cannot have it anew for a "
                    "micro-batch: each replay would see the value of the capture. Read the whole view's, or compute it "
                    "of slots on the device"
                )
            elif name in type(self)._slotgraph_dropped:  # noqa: SLF001 - this class's own
                message = f"{type(self).__name__} drops {name!r}"
            else:
                message = f"{type(self).__name__!r} has no slot or field {name!r}"
            raise AttributeError(message)


def _define(cls: type[Inputs]) -> None:
    def without_dropped(_: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
        dropped = cls._slotgraph_dropped
        return [field for field in fields if not (_inherited(field) and field.name in dropped)]

    try:
        attrs.define(cls, slots=False, kw_only=True, eq=False, auto_attribs=True, field_transformer=without_dropped)
    except attrs.exceptions.UnannotatedAttributeError as error:
        message = f"{cls.__name__}: {error} Write `name: torch.Tensor = copied(...)`"
        raise DeclarationError(message) from error


def _attributes(cls: type) -> "tuple[attrs.Attribute[Any], ...]":
    found: tuple[attrs.Attribute[Any], ...] = cls.__dict__.get("__attrs_attrs__", ())
    return found


def _inherited(field: "attrs.Attribute[Any]") -> bool:
    found: Any = field  # attrs' stubs do not list it
    return bool(found.inherited)


def _inherited_names(cls: type) -> set[str]:
    return {a.name for base in cls.__mro__[1:] for a in _attributes(base)}


def _unknown_drops(cls: type[Inputs], unknown: Sequence[str]) -> list[DeclarationError]:
    return [DeclarationError(f"{cls.__name__} drops {name!r}, which no base declares") for name in unknown]


def _duplicates(cls: type[Inputs]) -> list[DeclarationError]:
    """Slots declared twice in one body, or by two bases of which neither overrides the other."""
    found = [f"{cls.__name__} declares the slot {name!r} twice: rename one" for name in cls._slotgraph_twice]
    for field in _attributes(cls):
        if not _inherited(field) or _slot_in(field) is None:
            continue
        owners = [base for base in cls.__mro__[1:] if field.name in inspect.get_annotations(base)]
        rivals = [o for o in owners[1:] if not issubclass(owners[0], o) and _own_slot(o, field.name) != _slot_in(field)]
        found += [
            f"{cls.__name__} inherits two slots named {field.name!r}, from {owners[0].__name__} and {rival.__name__}: "
            "declare it again to say which is meant, or drop it"
            for rival in rivals
        ]
    return [DeclarationError(message) for message in found]


def _own_slot(owner: type, name: str) -> Slot | None:
    return next((_slot_in(a) for a in _attributes(owner) if a.name == name), None)
