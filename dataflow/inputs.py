"""`Inputs`: the base of declarations, whose instances are the batch handed in and the view handed out."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform

import attrs

from . import classes
from .axes import TOKENS, Axis, Step
from .classes import attributes, is_inherited, slot_in
from .declaration import Declaration, declare, refused
from .errors import DeclarationError, DeclarationErrors
from .narrow import narrowed
from .specifiers import computed, constant, copied, host_parameter, output, slot, staged
from .views import ViewInfo


class _Namespace(dict[str, Any]):
    """A class body that remembers which slot it was given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice: list[str] = []

    def __setitem__(self, name: str, value: Any) -> None:
        if slot_in(self.get(name)) is not None:
            self.twice.append(name)
        super().__setitem__(name, value)


class _Declaring(type):
    """Keeps a class body's duplicates for the check, and refuses to lose slots once a class is declared."""

    @classmethod
    def __prepare__(cls, name: str, bases: tuple[type, ...], /, **keywords: Any) -> _Namespace:
        del name, bases, keywords
        return _Namespace()

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        if isinstance(namespace.get("slotgraph"), Declaration):
            raise _made_already(name)
        twice = tuple(namespace.twice) if isinstance(namespace, _Namespace) else ()
        return super().__new__(cls, name, bases, {**namespace, "_slotgraph_twice": twice}, **keywords)

    def __setattr__(cls, name: str, value: Any) -> None:
        if isinstance(vars(cls).get("slotgraph"), Declaration):
            if name == "__attrs_attrs__" or name.startswith("__dataclass_"):
                raise _made_already(cls.__name__)
            if slot_in(value) is not None:
                message = f"{cls.__name__}.{name}: slot {name!r}: slots are declared in a class body: write a subclass"
                raise refused(cls.__name__, [DeclarationError(message)])
        super().__setattr__(name, value)


def _made_already(name: str) -> DeclarationErrors:
    message = (
        f"{name}: a subclass of Inputs is an attrs class already. A decorator that makes it anew (attrs.define, "
        "dataclass), or attrs.make_class, would lose its slots: leave the decorator out, and write a class"
    )
    return refused(name, [DeclarationError(message)])


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
    _slotgraph_drops: ClassVar[frozenset[str]] = frozenset()
    _slotgraph_dropped: ClassVar[frozenset[str]] = frozenset()
    _slotgraph_twice: ClassVar[tuple[str, ...]] = ()
    _slotgraph_view: ViewInfo | None = None

    def __init_subclass__(cls, *, drop: Iterable[str] = (), **keywords: Any) -> None:
        """Make an attrs class of the declaration, in place, and check all of it.

        drop: slots and fields of a base that this declaration does without. Raises DeclarationErrors.
        """
        super().__init_subclass__(**keywords)
        own, (dropped, found) = set(inspect.get_annotations(cls)), _dropped(cls, drop)
        of_bases = classes.dropped_by_bases(cls)
        cls._slotgraph_drops, cls._slotgraph_dropped = dropped, (of_bases - own) | dropped
        faults = list(_define(cls))
        faults += classes.parameter_faults(cls)
        faults += classes.lost_slots(cls)
        faults += classes.overrides(cls, of_bases | dropped)
        faults += classes.rivals(cls, of_bases - own - dropped)
        slots = {a.name: kind for a in attributes(cls) if (kind := slot_in(a)) is not None}
        fields = {a.name: a.default for a in attributes(cls) if a.name not in slots}
        for name, fault in faults:
            what = "field" if name in fields else "slot"
            found.append(DeclarationError(f"{cls.__name__}.{name}: {what} {name!r}: {fault}"))
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


def _define(cls: type[Inputs]) -> Iterator[tuple[str, str]]:
    """Make an attrs class of a declaration, without what it drops; and tell the names that no attribute may have."""
    wrong: dict[str, str] = {}

    def without_dropped(_: type, fields: list["attrs.Attribute[Any]"]) -> list["attrs.Attribute[Any]"]:
        wrong.update({field.name: fault for field in fields if (fault := classes.name_fault(field.name)) is not None})
        dropped = cls._slotgraph_dropped
        kept = [field for field in fields if not (is_inherited(field) and field.name in dropped)]
        return [field for field in kept if field.name not in wrong]

    yield from classes.take_bare(cls)
    attrs.define(cls, slots=False, kw_only=True, eq=False, auto_attribs=True, field_transformer=without_dropped)
    if "slotgraph" in vars(cls):
        wrong["slotgraph"] = classes.name_fault("slotgraph") or ""
    yield from wrong.items()
    for name in cls._slotgraph_twice:
        yield name, "the class declares it twice: rename one"


def _dropped(cls: type[Inputs], drop: Any) -> tuple[frozenset[str], list[DeclarationError]]:
    """The names that a class drops, and what is wrong with them."""
    known = classes.inherited(cls)
    if isinstance(drop, str) or not isinstance(drop, Iterable):
        return frozenset(), [DeclarationError(f"{cls.__name__}: drop={drop!r}: give a list of names, such as ['ids']")]
    names = list(drop)
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    found = [DeclarationError(f"{cls.__name__} drops {name!r}, which no base declares") for name in unknown]
    return frozenset(name for name in names if isinstance(name, str)), found
