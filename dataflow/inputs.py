"""`Inputs`: the base of declarations, whose instances are the batch handed in and the view handed out."""

import inspect
import keyword
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, dataclass_transform

import attrs

from .axes import TOKENS, Axis, Step
from .declaration import Declaration, Faults, declare, refused
from .errors import DeclarationError, DeclarationErrors, did_you_mean
from .slots import FAULTS, SLOT, Slot, computed, constant, copied, output, slot, staged
from .views import ViewInfo, narrowed

_NEEDED: Final = frozenset({"slotgraph", "narrow", "placeholder", "self", "attr_dict", "NOTHING"})
"""Names that the class itself needs, the last three in the constructor that attrs writes."""
_UNMADE: Final = type(attrs.field())  # what a field is until attrs makes an attribute of it
_CLASS_VARS: Final = ("typing.ClassVar", "ClassVar", "t.ClassVar", "typing_extensions.ClassVar")  # attrs ignores these
_Bases = dict[str, list[tuple[type, Slot | None]]]


def slot_in(field: object) -> Slot | None:
    """The slot that a field carries, before or after attrs made an attribute of it."""
    metadata = getattr(field, "metadata", None)
    return metadata.get(SLOT) if isinstance(metadata, Mapping) else None


class _Declaring(type):
    """Refuses what would lose slots of a declared class: to make it anew in place, and slots that come too late."""

    def __setattr__(cls, name: str, value: Any) -> None:
        makes_anew = name == "__attrs_attrs__" or name.startswith("__dataclass_")
        if isinstance(vars(cls).get("slotgraph"), Declaration) and (makes_anew or slot_in(value) is not None):
            raise _made_already(cls.__name__)
        super().__setattr__(name, value)


def _made_already(name: str) -> DeclarationErrors:
    message = (
        f"{name}: a subclass of Inputs is an attrs class already. A decorator that makes it anew (attrs.define, "
        "dataclass), attrs.make_class, or a slot that is set later, would lose slots: leave the decorator out, and "
        "write a class"
    )
    return refused(name, [DeclarationError(message)])


@dataclass_transform(
    kw_only_default=True, eq_default=False, field_specifiers=(copied, computed, constant, staged, output, slot)
)
class Inputs(metaclass=_Declaring):
    """Subclass it and declare slots; subclass that to add, override or `drop` some.

    A field that is no slot is carried from the batch into the view. One without a default is not to be seen while a
    graph is captured, since its value would be frozen there; one with a default is, and a batch whose value differs
    from the default does not go through the graph.
    """

    slotgraph: ClassVar[Declaration]
    _slotgraph_view: ViewInfo | None = None

    def __init_subclass__(cls, *, drop: Iterable[str] = (), **keywords: Any) -> None:
        """Make an attrs class of the declaration, in place, and check all of it.

        drop: slots and fields of a base that this declaration does without. Raises DeclarationErrors.
        """
        super().__init_subclass__(**keywords)
        if isinstance(vars(cls).get("slotgraph"), Declaration):
            raise _made_already(cls.__name__)
        bases, found = _inherited(cls), list[DeclarationError]()
        if isinstance(drop, str) or not isinstance(drop, Iterable):
            found.append(DeclarationError(f"{cls.__name__}: drop={drop!r}: give a list of names, such as ['ids']"))
            drop = ()
        for name in drop:
            if bases.pop(name if isinstance(name, str) else "", None) is None:
                near = did_you_mean(name, bases)
                found.append(DeclarationError(f"{cls.__name__} drops {name!r}, which no base declares{near}"))
        faults = [*_define(cls, bases), *_field_faults(cls), *_base_faults(cls, bases)]
        slots = {a.name: kind for a in _attributes(cls) if (kind := slot_in(a)) is not None}
        fields = {a.name: a.default for a in _attributes(cls) if a.name not in slots}
        for name, fault in faults:
            what = "field" if name in fields else "slot"
            found.append(DeclarationError(f"{cls.__name__}.{name}: {what} {name!r}: {fault}"))
        cls.slotgraph = declare(cls.__name__, slots, fields, found)

    def narrow(self, axis: Axis, start: int, stop: int, *, tokens: tuple[int, int] | None = None) -> Self:
        """The micro-batch of rows `start` to `stop` on `axis`: the view that the sliced batch would have filled.

        Slots are views of this one's; computed slots are computed anew for the micro-batch.

        Args:
            axis: Usually BATCH.
            start: The first row.
            stop: The row behind the last.
            tokens: The range on TOKENS that belongs to these rows, needed where requests differ in length.
        """
        ranges = {axis: (start, stop)} | ({} if tokens is None else {TOKENS: tokens})
        return narrowed(self, self.slotgraph.slots, self._slotgraph_view, ranges)

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Values of a stand-in batch that breaks see while a bucket is captured, by slot or field; override it.

        A copied slot that is not named holds its pad value.

        Args:
            step: Its live sizes are those that the values must have: one request, which owns every token of the bucket.
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
            else:
                known = (*type(self).slotgraph.slots, *type(self).slotgraph.fields)
                message = f"{type(self).__name__!r} has no slot or field {name!r}{did_you_mean(name, known)}"
            raise AttributeError(message)


def _attributes(cls: type) -> Any:
    """The attributes of a class that attrs made, inherited ones, too."""
    return vars(cls).get("__attrs_attrs__", ())


def _own(cls: type) -> dict[str, Slot | None]:
    """What the body of a class declares, by name: a slot, or None for a field without a slot."""
    return {field.name: slot_in(field) for field in _attributes(cls) if not field.inherited}


def _inherited(cls: type) -> _Bases:
    """What a class has of its bases: each name with the classes that declare it, the nearest first."""
    known = {field.name for base in cls.__bases__ for field in getattr(base, "__attrs_attrs__", ())}
    pairs = [(base, _own(base)) for base in cls.__mro__[1:]]
    return {name: [(base, own[name]) for base, own in pairs if name in own] for name in known}


def _define(cls: type[Inputs], bases: _Bases) -> Faults:
    """Make an attrs class of a declaration, without what it drops and what attrs would refuse or not see."""
    wrong: dict[str, str] = {}

    def without_dropped(_: type, fields: list[Any]) -> list[Any]:
        wrong.update({field.name: fault for field in fields if (fault := _name_fault(field.name)) is not None})
        return [one for one in fields if one.name not in wrong and not (one.inherited and one.name not in bases)]

    annotations = inspect.get_annotations(cls)
    for name, value in list(vars(cls).items()):
        annotation = str(annotations.get(name, "ClassVar")).strip("'\"")
        if isinstance(value, Slot | _UNMADE) and annotation.startswith(_CLASS_VARS):
            yield name, f"it has no annotation as a tensor: write `{name}: torch.Tensor = copied(...)`"
            delattr(cls, name)
    attrs.define(cls, slots=False, kw_only=True, eq=False, auto_attribs=True, field_transformer=without_dropped)
    yield from wrong.items()


def _name_fault(name: Any) -> str | None:
    """Why no slot and no field may have a name, or None."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return "the name is not an identifier: choose another"
    if name.startswith("_"):
        return "the name begins with an underscore, but slots and fields are public: choose another"
    return "the name has a meaning of its own in slotgraph: choose another" if name in _NEEDED else None


def _field_faults(cls: type) -> Faults:
    """What is wrong with the parameters of slots, with fields that are none, and with properties in their place."""
    for field in _attributes(cls):
        yield from ((field.name, fault) for fault in field.metadata.get(FAULTS, ()))
        default = field.default
        is_word = inspect.isfunction(default) and default.__module__ == slot.__module__
        if is_word or isinstance(default, Slot | _UNMADE):
            yield (
                field.name,
                f"its default is not a field: write `{field.name}: torch.Tensor = copied(...)`, or slot(...)",
            )
        if hasattr(type(inspect.getattr_static(cls, field.name, None)), "__set__"):
            yield field.name, "a base has a property of that name, which would hide it: rename one of them"


def _base_faults(cls: type, bases: _Bases) -> Faults:
    """Slots that a class would lose: of bases that attrs does not read, overridden by no slot, or one of two rivals."""
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if slot_in(value) is not None:
                yield name, f"{base.__name__}, which is not a declaration, has it: derive {base.__name__} from Inputs"
    own, taken = _own(cls), {*vars(cls), *inspect.get_annotations(cls)}
    for name, ((nearest, declared), *others) in bases.items():
        if name in own:
            if declared is not None and own[name] is None:
                way_out = f"{cls.__name__} makes a field of it: write copied(...), or drop it"
                yield name, f"a base declares this slot, and {way_out}"
        elif name in taken:
            yield name, f"a base declares it, and {cls.__name__} sets it without an annotation: declare it, or drop it"
        else:
            for base, other in others:
                if not issubclass(nearest, base) and other != declared:
                    both = f"{nearest.__name__} and {base.__name__} both declare it"
                    yield name, f"{both}: declare it again to say which is meant, or drop it"
