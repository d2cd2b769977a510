"""`Inputs`: the base of declarations, whose instances are the batch handed in and the view handed out."""

import inspect
import keyword
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, dataclass_transform

import attrs

from .axes import TOKENS, Axis, Step
from .declaration import Declaration, Faults, declare, refused
from .errors import DeclarationError, DeclarationErrors
from .slots import FAULTS, SLOT, Slot, computed, constant, copied, host_parameter, output, slot, staged
from .views import ViewInfo, narrowed

_NEEDED: Final = frozenset({"slotgraph", "narrow", "placeholder", "self", "attr_dict", "NOTHING"})
"""Names that the class itself needs, the last three in the constructor that attrs writes."""
_UNMADE: Final = type(attrs.field())
"""What a field is until attrs makes an attribute of it."""
_CLASS_VARS: Final = ("typing.ClassVar", "ClassVar", "t.ClassVar", "typing_extensions.ClassVar")
"""Prefixes of annotations that attrs ignores."""


def slot_in(field: object) -> Slot | None:
    """The slot that a field carries, before or after attrs made an attribute of it."""
    metadata = getattr(field, "metadata", None)
    found = metadata.get(SLOT) if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Slot) else None


class _Declaring(type):
    """Refuses to lose slots once a class is declared."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **keywords: Any) -> Any:
        if isinstance(namespace.get("slotgraph"), Declaration):
            raise _made_already(name)
        return super().__new__(cls, name, bases, namespace, **keywords)

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
    _slotgraph_view: ViewInfo | None = None

    def __init_subclass__(cls, *, drop: Iterable[str] = (), **keywords: Any) -> None:
        """Make an attrs class of the declaration, in place, and check all of it.

        drop: slots and fields of a base that this declaration does without. Raises DeclarationErrors.
        """
        super().__init_subclass__(**keywords)
        of_bases, own, found = _dropped_by_bases(cls), set(inspect.get_annotations(cls)), list[DeclarationError]()
        dropped = _dropped(cls, drop, found)
        cls._slotgraph_drops, cls._slotgraph_dropped = dropped, (of_bases - own) | dropped
        faults = [
            *_define(cls),
            *_parameter_faults(cls),
            *_lost_slots(cls),
            *_overrides(cls, of_bases | dropped),
            *_rivals(cls),
        ]
        slots = {a.name: kind for a in _attributes(cls) if (kind := slot_in(a)) is not None}
        fields = {a.name: a.default for a in _attributes(cls) if a.name not in slots}
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


def _attributes(cls: type) -> tuple[Any, ...]:
    """The attributes of a class that attrs made, inherited ones, too."""
    found: tuple[Any, ...] = vars(cls).get("__attrs_attrs__", ())
    return found


def _own(cls: type) -> dict[str, Slot | None]:
    """What the body of a class declares, by name: a slot, or None for a field without a slot."""
    return {field.name: slot_in(field) for field in _attributes(cls) if not field.inherited}


def _inherited(cls: type) -> dict[str, Slot | None]:
    """What the bases of a class declare, by name."""
    return {name: slot for base in reversed(cls.__mro__[1:]) for name, slot in _own(base).items()}


def _define(cls: type[Inputs]) -> Faults:
    """Make an attrs class of a declaration, without what it drops and what attrs would refuse or not see."""
    wrong: dict[str, str] = {}

    def without_dropped(_: type, fields: list[Any]) -> list[Any]:
        dropped = cls._slotgraph_dropped
        wrong.update({field.name: fault for field in fields if (fault := _name_fault(field.name)) is not None})
        return [one for one in fields if one.name not in wrong and not (one.inherited and one.name in dropped)]

    annotations = inspect.get_annotations(cls)
    for name, value in list(vars(cls).items()):
        annotation = str(annotations.get(name, "ClassVar")).strip("'\"")
        if isinstance(value, Slot | _UNMADE) and annotation.startswith(_CLASS_VARS):
            yield name, f"it has no annotation as a tensor: write `{name}: torch.Tensor = copied(...)`"
            delattr(cls, name)
    attrs.define(cls, slots=False, kw_only=True, eq=False, auto_attribs=True, field_transformer=without_dropped)
    if "slotgraph" in vars(cls):
        wrong["slotgraph"] = _name_fault("slotgraph") or ""
    yield from wrong.items()


def _name_fault(name: Any) -> str | None:
    """Why no slot and no field may have a name, or None."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return "the name is no identifier: choose another"
    if name.startswith("_"):
        return "the name begins with an underscore, but slots and fields are public: choose another"
    return "the name has a meaning of its own in slotgraph: choose another" if name in _NEEDED else None


def _dropped(cls: type, drop: Any, found: list[DeclarationError]) -> frozenset[str]:
    """The names that a class drops; what is wrong with them is added to what was found."""
    if isinstance(drop, str) or not isinstance(drop, Iterable):
        found.append(DeclarationError(f"{cls.__name__}: drop={drop!r}: give a list of names, such as ['ids']"))
        return frozenset()
    names, known = list(drop), [*_inherited(cls)]
    unknown = [name for name in names if name not in known]
    found += [DeclarationError(f"{cls.__name__} drops {name!r}, which no base declares") for name in unknown]
    return frozenset(name for name in names if isinstance(name, str))


def _dropped_by_bases(cls: type) -> frozenset[str]:
    """Names that bases drop, and no base before them, in the order in which Python asks them, declares again."""
    drops: dict[str, bool] = {}
    for base in cls.__mro__[1:]:
        drops = dict.fromkeys(vars(base).get("_slotgraph_drops", ()), True) | dict.fromkeys(_own(base), False) | drops
    return frozenset(name for name, dropped in drops.items() if dropped)


def _parameter_faults(cls: type) -> Faults:
    """What is wrong with the parameters that slots were declared with."""
    words: tuple[Any, ...] = (copied, host_parameter, computed, constant, staged, output, slot)
    for field in _attributes(cls):
        for fault in field.metadata.get(FAULTS, ()):
            yield field.name, fault
        default = field.default
        if isinstance(default, Slot | _UNMADE) or (inspect.isfunction(default) and default in words):
            yield field.name, f"its default is no field: write `{field.name}: torch.Tensor = copied(...)`, or slot(...)"


def _lost_slots(cls: type) -> Faults:
    """Slots of bases that do not derive from Inputs. attrs does not read such bases."""
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if slot_in(value) is not None:
                yield name, f"{base.__name__}, which is no declaration, has it: derive {base.__name__} from Inputs"


def _overrides(cls: type, dropped: frozenset[str]) -> Faults:
    """Slots and fields of bases in whose place the class has something else, or that a property hides.

    dropped: names that the class or its bases drop, which are free for anything.
    """
    own, taken = _own(cls), {*vars(cls), *inspect.get_annotations(cls)}
    for name, declared in _inherited(cls).items():
        if name in dropped:
            continue
        if declared is not None and own.get(name, declared) is None:
            way_out = f"{cls.__name__} makes a field of it: write copied(...), or drop it"
            yield name, f"a base declares this slot, and {way_out}"
        elif name not in own and name in taken:
            yield name, f"a base declares it, and {cls.__name__} sets it without an annotation: declare it, or drop it"
    for field in _attributes(cls):
        if hasattr(type(inspect.getattr_static(cls, field.name, None)), "__set__"):
            yield field.name, "a base has a property of that name, which would hide it: rename one of them"


def _rivals(cls: type) -> Faults:
    """Slots that two bases declare, of which neither overrides the other."""
    for name in (field.name for field in _attributes(cls) if field.inherited):
        (nearest, slot), *others = [(base, own[name]) for base in cls.__mro__[1:] if name in (own := _own(base))]
        for base, other in others:
            if not issubclass(nearest, base) and other != slot:
                both = f"{nearest.__name__} and {base.__name__} both declare it"
                yield name, f"{both}: declare it again to say which is meant, or drop it"
