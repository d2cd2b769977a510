"""Classes of declarations: what may be wrong with their names, bodies and bases, beside each slot by itself."""

import inspect
import keyword
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs

from .slots import Slot
from .specifiers import FAULTS, SLOT, computed, constant, copied, host_parameter, output, slot, staged

Faults = Iterator[tuple[str, str]]
"""Pairs of a slot's or a field's name and what is wrong with it."""
_NEEDED: Final = frozenset({"slotgraph", "narrow", "placeholder", "self", "attr_dict", "NOTHING"})
"""Names that the class itself needs, the last three in the constructor that attrs writes."""
_WORDS: Final = (copied, host_parameter, computed, constant, staged, output, slot)
_UNMADE: Final = type(attrs.field())
"""What a field is until attrs makes an attribute of it."""
_CLASS_VARS: Final = ("typing.ClassVar", "ClassVar", "t.ClassVar", "typing_extensions.ClassVar")
"""Prefixes of annotations that attrs ignores."""


def slot_in(field: object) -> Slot | None:
    """The slot that a field carries, before or after attrs made an attribute of it."""
    found = _metadata(field).get(SLOT)
    return found if isinstance(found, Slot) else None


def attributes(cls: type) -> "tuple[attrs.Attribute[Any], ...]":
    """The attributes of a class that attrs made, inherited ones, too."""
    found: tuple[attrs.Attribute[Any], ...] = cls.__dict__.get("__attrs_attrs__", ())
    return found


def is_inherited(field: "attrs.Attribute[Any]") -> bool:
    """Whether an attribute is a base's."""
    found: Any = field  # attrs' stubs do not list it
    return bool(found.inherited)


def inherited(cls: type) -> dict[str, Slot | None]:
    """What the bases of a class declare, by name: a slot, or None for a field without a slot."""
    fields = [field for base in reversed(cls.__mro__[1:]) for field in attributes(base) if not is_inherited(field)]
    return {field.name: slot_in(field) for field in fields}


def name_fault(name: Any) -> str | None:
    """Why no slot and no field may have a name, or None."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return "the name is no identifier: choose another"
    if name.startswith("_"):
        return "the name begins with an underscore, but slots and fields are public: choose another"
    return "the name has a meaning of its own in slotgraph: choose another" if name in _NEEDED else None


def take_bare(cls: type) -> Faults:
    """Take out of a class what attrs would refuse, or not see: slots and fields that no annotation makes attributes."""
    annotations = inspect.get_annotations(cls)
    for name, value in list(vars(cls).items()):
        annotation = str(annotations.get(name, "ClassVar")).strip("'\"")
        if isinstance(value, Slot | _UNMADE) and annotation.startswith(_CLASS_VARS):
            yield name, f"it has no annotation as a tensor: write `{name}: torch.Tensor = copied(...)`"
            delattr(cls, name)


def parameter_faults(cls: type) -> Faults:
    """What is wrong with the parameters that slots were declared with."""
    for field in attributes(cls):
        for fault in _metadata(field).get(FAULTS, ()):
            yield field.name, fault
        default = field.default
        if isinstance(default, Slot | _UNMADE) or (inspect.isfunction(default) and default in _WORDS):
            yield field.name, f"its default is no field: write `{field.name}: torch.Tensor = copied(...)`, or slot(...)"


def lost_slots(cls: type) -> Faults:
    """Slots of bases that do not derive from Inputs. attrs does not read such bases."""
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if slot_in(value) is not None:
                yield name, f"{base.__name__}, which is no declaration, has it: derive {base.__name__} from Inputs"


def overrides(cls: type, dropped: frozenset[str]) -> Faults:
    """Slots and fields of bases in whose place the class has something else, or that a property hides.

    dropped: names that the class or its bases drop, which are free for anything.
    """
    own = {field.name: slot_in(field) for field in attributes(cls) if not is_inherited(field)}
    taken = {*vars(cls), *inspect.get_annotations(cls)}
    for name, declared in inherited(cls).items():
        if name in dropped:
            continue
        if declared is not None and name in own and own[name] is None:
            yield (
                name,
                f"a base declares this slot, and {cls.__name__} makes a field of it: write copied(...), or drop it",
            )
        elif name not in own and name in taken:
            yield name, f"a base declares it, and {cls.__name__} sets it without an annotation: declare it, or drop it"
    for field in attributes(cls):
        if hasattr(type(inspect.getattr_static(cls, field.name, None)), "__set__"):
            yield field.name, "a base has a property of that name, which would hide it: rename one of them"


def dropped_by_bases(cls: type) -> frozenset[str]:
    """Names that bases drop, and no base before them, in the order in which Python asks them, declares again."""
    drops: dict[str, bool] = {}
    for base in cls.__mro__[1:]:
        declared = dict.fromkeys((a.name for a in attributes(base) if not is_inherited(a)), False)
        drops = dict.fromkeys(vars(base).get("_slotgraph_drops", ()), True) | declared | drops
    return frozenset(name for name, dropped in drops.items() if dropped)


def rivals(cls: type, unsettled: frozenset[str]) -> Faults:
    """Slots that two bases declare, of which neither overrides the other, or that one declares and another drops.

    unsettled: names that bases drop, and the class itself neither drops nor declares.
    """
    said = "declare it again to say which is meant, or drop it"
    for field in filter(is_inherited, attributes(cls)):
        owners = _owners(cls, field.name)
        for owner, other in owners[1:]:
            if not issubclass(owners[0][0], owner) and other != slot_in(field):
                yield field.name, f"{owners[0][0].__name__} and {owner.__name__} both declare it: {said}"
    for name in sorted(unsettled):
        droppers = [base for base in cls.__mro__[1:] if name in vars(base).get("_slotgraph_drops", ())]
        having = [owner for owner, own in _owners(cls, name) if own is not None]
        for owner in (one for one in having if not any(issubclass(one, other) for other in having if other is not one)):
            stranger = next((one for one in droppers if not issubclass(one, owner)), None)
            if stranger is not None and not issubclass(owner, stranger):
                yield name, f"{owner.__name__} declares it, and {stranger.__name__} drops another one: {said}"


def _owners(cls: type, name: str) -> list[tuple[type, Slot | None]]:
    """The bases whose bodies declare a name, the nearest first, each with its slot, or None where it is a field."""
    return [
        (base, slot_in(a))
        for base in cls.__mro__[1:]
        for a in attributes(base)
        if a.name == name and not is_inherited(a)
    ]


def _metadata(field: object) -> Mapping[Any, Any]:
    found = getattr(field, "metadata", None)
    return found if isinstance(found, Mapping) else {}
