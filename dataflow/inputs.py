"""`Inputs`: the base class of declarations. An instance is the batch that comes in or the view that goes out."""

import inspect
import keyword
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn, Self, SupportsIndex, TypeVar, dataclass_transform

import attrs
import torch

from .axes import TOKENS, Axis, Step
from .declaration import Declaration, Faults, declare, refused
from .errors import BatchError, DeclarationError, DeclarationErrors, did_you_mean
from .slots import FAULTS, SLOT, Slot, SlotOrGroup, computed, constant, copied, named_slots, output, slot, staged
from .sources import Field, is_factory
from .views import ViewInfo, live_values, narrowed

_NEEDED: Final = frozenset({"slotgraph", "narrow", "placeholder", "self", "attr_dict", "NOTHING"})
"""Names that the class itself uses; the last three are used by the constructor that attrs generates."""
_UNMADE: Final = type(attrs.field())  # the class of a field before attrs makes an attribute of it
_CLASS_VARS: Final = ("typing.ClassVar", "ClassVar", "t.ClassVar", "typing_extensions.ClassVar")  # attrs ignores these
_NONE: Final = re.compile(r"\b(?:None|Optional)\b")
_REQUIRED: Final = "say default=None or when= if it may be absent, else leave None out of the annotation"
_Bases = dict[str, list[tuple[type, SlotOrGroup | None]]]


V = TypeVar("V", bound="Inputs")


def slot_in(field: object) -> SlotOrGroup | None:
    """Return the slot or group that a field carries, before or after attrs makes an attribute of it, or None."""
    metadata = getattr(field, "metadata", None)
    return metadata.get(SLOT) if isinstance(metadata, Mapping) else None


def _holds_slots(value: object, depth: int = 4) -> bool:
    """Return whether a value is a slot, or a container of slots nested at most `depth` deep."""
    inner = [*value.values()] if isinstance(value, Mapping) else value
    if depth and isinstance(inner, list | tuple | set | frozenset):
        return any(_holds_slots(one, depth - 1) for one in inner)
    return isinstance(value, Slot) or slot_in(value) is not None


class _Declaring(type):
    """Rejects bases that Python cannot put in order, and changes of a declared class that would lose slots."""

    def __new__(cls, name: str, bases: tuple[type, ...], *rest: Any, **keywords: Any) -> Any:
        for number, base in enumerate(bases):
            for later in bases[number + 1 :]:
                if base in later.__mro__:
                    has_all = (
                        "is named twice" if later is base else f"is a base of {later.__name__}, which has all of it"
                    )
                    raise refused(
                        name,
                        [DeclarationError(f"{name}: its base {base.__name__} {has_all}: name {later.__name__} alone")],
                    )
        return super().__new__(cls, name, bases, *rest, **keywords)

    def __setattr__(cls, name: str, value: Any) -> None:
        makes_anew = name == "__attrs_attrs__" or name.startswith("__dataclass_")
        if isinstance(vars(cls).get("slotgraph"), Declaration) and (makes_anew or _holds_slots(value)):
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
    """Subclass it and declare slots. Subclass the result to add, override or `drop` some.

    A field that is not a slot is carried from the batch into the view. If it has no default, it is hidden while a graph
    is captured, since its value would be frozen there. If it has one, the capture sees the default, and a batch with
    another value does not go through the graph. A default must therefore be immutable: a default changed in place would
    still equal itself, and go through graphs that froze its old contents. Converters and validators apply to the values
    of any batch; an object of the class has had them applied in its constructor.
    """

    slotgraph: ClassVar[Declaration]
    _slotgraph_view: ViewInfo | None = None

    def __init_subclass__(cls, *, drop: Iterable[str] = (), **keywords: Any) -> None:
        """Make the declaration an attrs class in place, and check all of it.

        `drop` names slots and fields of a base that this declaration omits. Raises DeclarationErrors.
        """
        bases = _inherited(cls)
        found = list[DeclarationError]()
        try:
            super().__init_subclass__(**keywords)
        except TypeError as error:
            near = "".join(did_you_mean(name, ["drop"]) for name in keywords)
            found.append(
                DeclarationError(f"{cls.__name__}: {error}: a declaration takes no keyword other than drop={near}")
            )
        if isinstance(vars(cls).get("slotgraph"), Declaration):
            raise _made_already(cls.__name__)
        if isinstance(drop, str) or not isinstance(drop, Iterable):
            found.append(DeclarationError(f"{cls.__name__}: drop={drop!r}: give a list of names, such as ['ids']"))
            drop = ()
        for name in drop:
            if bases.pop(name if isinstance(name, str) else "", None) is None:
                near = did_you_mean(name, bases)
                found.append(DeclarationError(f"{cls.__name__} drops {name!r}, which no base declares{near}"))
        faults = [*_define(cls, bases), *_field_faults(cls), *_base_faults(cls, bases)]
        slots = {a.name: kind for a in _attributes(cls) if (kind := slot_in(a)) is not None}
        plain = {a.name: a for a in _attributes(cls) if a.name not in slots}
        fields = dict[str, Field]()
        for name, attribute in plain.items():
            fields[name] = Field.of(cls, attribute)
            try:
                _ = is_factory(attribute.default) or fields[name].read(None)
            except BatchError as error:
                faults.append((name, f"its converter does not take its default: {error}"))
        for name, fault in faults:
            what = "field" if name in plain else "slot"
            found.append(DeclarationError(f"{cls.__name__}.{name}: {what} {name!r}: {fault}"))
        kept = named_slots(slots)
        known = (getattr(base, "slotgraph", None) for base in cls.__mro__[1:])
        dropped = {name for base in known if base is not None for name in base.slots} - kept.keys()
        cls.slotgraph = declare(cls.__name__, kept, fields, found, dropped)

    def narrow(self, axis: Axis, start: int, stop: int, *, tokens: tuple[int, int] | None = None) -> Self:
        """Return the micro-batch of rows `start` to `stop` on `axis`, as if the sliced batch had filled a view.

        Its slots are views of this one's. Computed slots are computed again for the micro-batch.

        Args:
            axis: Usually BATCH.
            start: The first row.
            stop: One past the last row.
            tokens: The range on TOKENS that belongs to these rows, required if requests differ in length.
        """
        if axis == TOKENS and tokens is not None:
            raise BatchError("narrow(TOKENS, a, b) names the tokens already: leave tokens= out")
        ranges = {axis: (start, stop)} | ({} if tokens is None else {TOKENS: tokens})
        return narrowed(self, self.slotgraph.slots, self._slotgraph_view, ranges)

    @classmethod
    def placeholder(cls, step: Step) -> Mapping[str, Any]:
        """Return the values, by slot or field, that breaks see while a bucket is captured.

        Override it to provide values. A copied slot without a value holds its pad value.

        Args:
            step: Its live sizes are those that the values must have: one request, which owns every token of the bucket.
        """
        del step
        return {}

    if not TYPE_CHECKING:  # type checkers would accept any name as a field

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError that explains why a declared name has no value in this object."""
            declaration = type(self).slotgraph
            info = self._slotgraph_view
            is_slot = name in declaration.slots or name in declaration.groups
            if name in declaration.fields and info is not None and not (info.captured or info.placeholder):
                message = f"the batch has no {name!r}, a field without a default: give it one, or declare a default"
            elif name in declaration.fields:
                message = (
                    f"{name!r} is carried from the batch and has no default, so no graph may depend on it: it is not "
                    "to be seen during capture. Make it a slot, or give it a default that holds for every graph"
                )
                if info is not None and info.placeholder:
                    message += "; if breaks alone read it, give it a value in placeholder()"
            elif is_slot and info is None:
                message = (
                    f"slot {name!r} is not in a batch, and this object is a batch (attrs.evolve makes one of a "
                    "view): read the slot in the view that a fill hands out"
                )
            elif is_slot:
                message = (
                    f"slot {name!r} follows from what the host computes, and a captured step cannot have it anew for a "
                    "micro-batch: each replay would see the value of the capture. Read the whole view's, or compute it "
                    "of slots on the device"
                )
            else:
                known = (*declaration.slots, *declaration.fields)
                message = f"{type(self).__name__!r} has no slot or field {name!r}{did_you_mean(name, known)}"
                if hasattr(torch.Tensor, name):
                    message += f", but tensors have: {self._as_tensor()}"
            raise AttributeError(message)

        def __getitem__(self, name: object) -> NoReturn:
            """Raise TypeError that says how slots are read. Python calls this to iterate over an object, too."""
            own = next(iter(self.slotgraph.slots), "name")
            raise TypeError(f"{type(self).__name__!r} has attributes, not items: read view.{own}, got [{name!r}]")

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> NoReturn:
        """Raise TypeError when a torch function gets a view as an argument. Torch calls this for each such function."""
        called = getattr(function, "__name__", function)
        raise TypeError(f"{called} takes tensors, got {cls.__name__}: {cls._as_tensor()}")

    @classmethod
    def _as_tensor(cls) -> str:
        """Explain how to call a layer on a slot."""
        name = next(iter(cls.slotgraph.slots), "name")
        return f"the view went into a layer as if it were a tensor: wrap it, `lambda view: module(view.{name})`"

    def __copy__(self) -> Self:
        """Copy a batch or a view with the same tensors. The copy of a view is also a view."""
        return _made_of(self._declared(), vars(self))

    @classmethod
    def _declared(cls) -> type[Self]:
        """Return the declaration class of this object. A runner's views are of a subclass."""
        return cls

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy or pickle a view as a batch with its own memory: live rows and fields, without computed slots."""
        if self._slotgraph_view is None:
            return super().__reduce_ex__(protocol)
        return _made_of, (self._declared(), live_values(vars(self), self.slotgraph, self._slotgraph_view))


def _made_of(cls: type[V], values: Mapping[str, Any]) -> V:
    """Make an instance of a declaration without calling its constructor, for `copy` and `pickle`."""
    made = cls.__new__(cls)
    vars(made).update(values)
    return made


def _attributes(cls: type) -> Any:
    """Return the attributes of a class that attrs made, inherited ones included."""
    return vars(cls).get("__attrs_attrs__", ())


def _own(cls: type) -> dict[str, SlotOrGroup | None]:
    """Return the names in the body of a class, each with its slot, or None for a field without a slot."""
    return {field.name: slot_in(field) for field in _attributes(cls) if not field.inherited}


def _inherited(cls: type) -> _Bases:
    """Return each inherited name with the classes that declare it, the nearest first."""
    known = {field.name for base in cls.__bases__ for field in getattr(base, "__attrs_attrs__", ())}
    pairs = [(base, _own(base)) for base in cls.__mro__[1:]]
    return {name: [(base, own[name]) for base, own in pairs if name in own] for name in known}


def _define(cls: type[Inputs], bases: _Bases) -> Faults:
    """Make a declaration an attrs class. Leave out dropped names, and names that attrs would reject or miss."""
    wrong: dict[str, str] = {}

    def without_dropped(_: type, fields: list[Any]) -> list[Any]:
        wrong.update({field.name: fault for field in fields if (fault := _name_fault(field.name)) is not None})
        return [one for one in fields if one.name not in wrong and not (one.inherited and one.name not in bases)]

    annotations = inspect.get_annotations(cls)
    for name, value in list(vars(cls).items()):
        annotation = str(annotations.get(name, "ClassVar")).strip("'\"")
        if annotation.startswith(_CLASS_VARS) and (isinstance(value, _UNMADE) or _holds_slots(value)):
            yield name, _undeclared(name, value, "it has no annotation as a tensor")
            delattr(cls, name)
    try:
        attrs.define(cls, slots=False, kw_only=True, eq=False, auto_attribs=True, field_transformer=without_dropped)
    except Exception as error:
        message = f"{cls.__name__}: attrs cannot make a class of it: {type(error).__name__}: {error}"
        raise refused(cls.__name__, [DeclarationError(message)]) from error
    yield from wrong.items()


def _undeclared(name: str, value: object, otherwise: str) -> str:
    """Describe a slot that attrs would not see, alone or in a container, and how to declare it."""
    if not isinstance(value, Slot | _UNMADE):
        comma = " (is there a comma behind it?)" if isinstance(value, tuple) else ""
        otherwise = f"a {type(value).__name__} of slots{comma} declares none of them: give each a name of its own"
    return f"{otherwise}: write `{name}: torch.Tensor = copied(...)`, or slot(...)"


def _default_fault(attribute: Any) -> str | None:
    """Return why a field's default cannot be used for batches or compared with their values, or None.

    All batches share one default object, and graphs are captured with its contents. If it is changed in place, it is
    still equal to itself, so no batch would look different.
    """
    default: Any = attribute.default
    if is_factory(default) and default.takes_self:
        return "its default takes the object, and a mapping as a batch is none: leave takes_self out"
    if getattr(attribute.converter, "takes_self", False):
        return "its converter takes the object, and a mapping as a batch is none: leave takes_self out"
    if default is attrs.NOTHING or is_factory(default):
        return None
    kind: Any = type(default)
    changes = isinstance(default, torch.Tensor)  # although it has a hash
    try:
        hash(default)
    except TypeError:
        changes = True
    if changes:
        return (
            f"its default, of type {kind.__name__}, can be changed in place, which graphs would not see: make a "
            "tensor a slot, with copied(...) or constant(...); make others for each batch, "
            "attrs.field(factory=...), or give a value that cannot change, such as a tuple"
        )
    by_identity = kind.__hash__ is object.__hash__ and not (callable(default) or inspect.ismodule(default))
    if by_identity and (getattr(default, "__dict__", None) or getattr(kind, "__slots__", None)):
        return (
            f"its default, of type {kind.__name__}, has attributes, but is equal to itself whatever they are: give the "
            "class an __eq__ and a __hash__, as attrs.frozen does, or leave the default out"
        )
    return None


def _name_fault(name: Any) -> str | None:
    """Return why no slot and no field may have a name, or None."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        return "the name is not an identifier: choose another"
    if name.startswith("_"):
        return "the name begins with an underscore, but slots and fields are public: choose another"
    return "the name has a meaning of its own in slotgraph: choose another" if name in _NEEDED else None


def _field_faults(cls: type) -> Faults:
    """Yield what is wrong with slot parameters, with other fields, and with properties of the same name."""
    for field in _attributes(cls):
        yield from ((field.name, fault) for fault in field.metadata.get(FAULTS, ()))
        default = field.default
        is_word = inspect.isfunction(default) and default.__globals__ is slot.__globals__
        if is_word or isinstance(default, _UNMADE) or _holds_slots(default):
            yield field.name, _undeclared(field.name, field if is_word else default, "its default is not a field")
        elif slot_in(field) is None and (fault := _default_fault(field)):
            yield field.name, fault
        kind = slot_in(field)
        is_faulty = bool(field.metadata.get(FAULTS))
        kind = next(iter(kind.values())) if isinstance(kind, Mapping) else kind  # those of a group are alike in this
        required = kind is not None and not (kind.optional or kind.when or is_faulty)
        if required and _NONE.search(str(field.type)):
            yield field.name, f"{field.type} says that it may be None, but it is always there: {_REQUIRED}"
        if hasattr(type(inspect.getattr_static(cls, field.name, None)), "__set__"):
            yield field.name, "a base has a property of that name, which would hide it: rename one of them"


def _base_faults(cls: type, bases: _Bases) -> Faults:
    """Yield slots that a class would lose: declared outside Inputs, overridden by a non-slot, or in conflict."""
    for base in cls.__mro__[1:]:
        for name, value in vars(base).items():
            if not name.startswith("__") and _holds_slots(value):
                yield name, f"{base.__name__}, which is not a declaration, has it: derive {base.__name__} from Inputs"
    own = _own(cls)
    taken = {*vars(cls), *inspect.get_annotations(cls)}
    for name, ((nearest, declared), *others) in bases.items():
        if name in own:
            if declared is not None and own[name] is None:
                way_out = f"{cls.__name__} makes a field of it: write copied(...), or drop it"
                yield name, f"a base declares this slot, and {way_out}"
        elif name in taken:
            yield name, f"a base declares it, and {cls.__name__} sets it without an annotation: declare it, or drop it"
        else:
            for number, (base, other) in enumerate(others):
                is_overridden = issubclass(nearest, base) or any(issubclass(one, base) for one, _ in others[:number])
                if not is_overridden and other != declared:
                    both = f"{nearest.__name__} and {base.__name__} both declare it"
                    yield name, f"{both}: declare it again to say which is meant, or drop it"
