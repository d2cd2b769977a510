"""Slots: the inputs of a captured step, and the specifiers that declare them: `copied`, `computed` and the others."""

import functools
import keyword
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Literal, final

import attrs
import torch
from attrs.converters import optional as or_none

from .axes import Axis, Dim, Shape, Step, shape_of
from .capabilities import DEVICE, HOST, Capabilities, FillRole, Placement, Role, dtype_text, resolve_dtype
from .sources import SETTINGS, Compute, Path, Source, again_of, compute_of, one_argument, one_value, optional_source
from .tails import STALE, Number, Once, Pad, PadValue, Poison, Tail, pad_value, tail_of, value_faults

When = str | Callable[[Any], bool]
_DTYPES: Final = re.compile(r"bool|u?int(8|16|32|64)|b?float16|float(32|64)|complex(64|128)|float8_\w+")
"""Dtypes whose tensors torch fills and copies. Quantised dtypes, bits and numbers smaller than a byte are excluded."""


def _need(holds: bool, message: str) -> None:  # noqa: FBT001 - a condition
    """Raise TypeError if a parameter is invalid."""
    if not holds:
        raise TypeError(message)


def flag(value: bool) -> bool:  # noqa: FBT001 - the parameter's value itself
    """Return a bool, or raise TypeError for anything that is merely truthy or falsy."""
    _need(isinstance(value, bool), "say True or False")
    return value


def ragged_of(value: Any) -> bool | Compute:
    """Check that a value is True, False, or a function of what determines the length of rows."""
    if isinstance(value, Compute):
        return value
    return one_value(value) if callable(value) else flag(value)


def dtype_of(value: torch.dtype | Role) -> torch.dtype | Role:
    """Check that a value is a torch dtype that slots can have, or a role whose dtypes all are."""
    if isinstance(value, Role):
        _need(isinstance(value.name, str), f"the name of a role is a text, got {value.name!r}")
        dtypes_of((value.default,))
        dtypes_of(value.accepts)
        return value
    return dtypes_of((value,))[0]


def dtypes_of(value: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...]:
    """Check a tuple of dtypes that torch can fill and copy."""
    _need(isinstance(value, tuple), "expected a tuple of torch dtypes, such as (torch.int32,)")
    for dtype in value:
        _need(isinstance(dtype, torch.dtype), f"expected a torch dtype, such as torch.int64, or a role, got {dtype!r}")
        text = dtype_text(dtype)
        refusal = f"torch does not fill and copy tensors of {text}: take torch.uint8 for bytes of your own"
        _need(_DTYPES.fullmatch(text) is not None, refusal)
    return value


def placement_of(value: Placement) -> Placement:
    """Check that a value is "device" or "host"."""
    _need(isinstance(value, str) and value in (DEVICE, HOST), f"say {DEVICE!r} or {HOST!r}")
    return value


def when_of(value: When) -> When:
    """Check that a value is a dotted name in the settings, or a function of them."""
    if not isinstance(value, str):
        return one_argument(value, "a name in the settings, or a function of them")
    _need(all(value.split(".")), "a name in the settings is not empty; dots lead into what it names")
    return value


def argument_of(value: str) -> str:
    """Check that a value can name an operator's argument."""
    is_name = isinstance(value, str) and value.isidentifier() and not keyword.iskeyword(value)
    _need(is_name, "no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'")
    return value


def limit_of(value: object) -> Dim:
    """Convert an integer, an axis or an expression to a limit."""
    return Dim.of(value)


def poison_of(value: Poison) -> Poison:
    """Check that a value is a tuple of pad values, or "stale"."""
    if isinstance(value, str) and value == STALE:
        return value
    _need(isinstance(value, tuple), f"say a tuple of the values that its tail may hold, or {STALE!r}")
    return tuple([pad_value(one) for one in value])


def constant_of(value: Any) -> Any:
    """Check that a value is a pad value, or a function of the step at full capacity."""
    return one_argument(value, "a function of the step") if callable(value) else pad_value(value)


Value = Number | FillRole | Axis | Dim | Callable[[Step], Any]
ByName = Mapping[str, Any]
"""A value for each name of a group."""


@final
class Group:
    """Names of slots that are declared as one, `group=Group("full", "sliding")`: cache groups, or kinds of layers.

    Args:
        names: Identifiers, all different.

    Raises:
        ValueError: They are not, or there are none.
    """

    __slots__ = ("names",)

    def __init__(self, *names: str) -> None:
        if not names or len({*names}) < len(names) or not all(map(str.isidentifier, map(str, names))):
            raise ValueError(f"a group has names of slots, different identifiers such as 'full', got {names!r}")
        self.names = names

    def member(self, name: str, value: Any) -> Any:
        """Return a parameter's value for one slot: of a mapping that has the group's names, the value of that name."""
        if isinstance(value, Mapping) and value.keys() == {*self.names}:
            return value[name]
        return tuple([self.member(name, one) for one in value]) if isinstance(value, tuple) else value


Writer = Literal["batch", "function", "producer", "step"]
"""Who writes a slot: a fill that copies from the batch, the slot's function, a producer, or the step."""
BY_STEP: Final[frozenset[Writer]] = frozenset({"step"})
"""The writers of a slot that receives a result of the step."""
BY_PRODUCER: Final[frozenset[Writer]] = frozenset({"producer"})
"""The writers of a slot that a fill leaves to a producer."""


@attrs.frozen(kw_only=True)
class Slot:
    """One input of a captured step. Subclass it for a new kind, and override the methods that differ.

    Attributes:
        shape: Sizes over axes.
        dtype: A torch dtype, or a role that the backend resolves.
        placement: "device" or "host".
        when: A name in the runner's settings, or a function of them, that must be true for the slot to exist.
        optional: Whether a batch may omit it.
        rewritten: Whether the step or a producer also writes it, so that its tail is never known to be clean.
        restored: Whether the step also writes it, and the runner restores it at the end of the step.
        argument: The operator argument that takes the slot's value at each replay, if the device has host parameters.
            None if the slot is not a host parameter.
        pad: The tail rule: a value, `keep("why")` or `once(value)`.
        starts: What the buffer holds at first, if not the tail's value.
        poison: What checks may put into the tail, values or "stale", if its rule does not determine that.
        strided: Whether a source may be non-contiguous.
        converts: Source dtypes that the copy converts.
        limit: The largest value that host data may hold.
        ragged: Whether a source may have rows of different lengths, whose rest holds the pad value; or a function of a
            slot that gives the length that rows must have.
    """

    needs_rule: ClassVar[bool] = False
    """Whether padded rows hold old data unless something resets them, so that the declaration must give a tail rule."""
    shape: Shape = attrs.field(converter=shape_of)
    dtype: torch.dtype | Role = attrs.field(converter=dtype_of)
    placement: Placement = attrs.field(default=DEVICE, converter=placement_of)
    when: When | None = attrs.field(default=None, converter=or_none(when_of))
    optional: bool = attrs.field(default=False, converter=flag)
    rewritten: bool = attrs.field(default=False, converter=flag)
    restored: bool = attrs.field(default=False, converter=flag)
    argument: str | None = attrs.field(default=None, converter=or_none(argument_of))
    pad: Tail | None = attrs.field(default=None, converter=tail_of)
    starts: PadValue | None = attrs.field(default=None, converter=or_none(pad_value))
    poison: Poison | None = attrs.field(default=None, converter=or_none(poison_of))
    strided: bool = attrs.field(default=False, converter=flag)
    converts: tuple[torch.dtype, ...] = attrs.field(default=(), converter=dtypes_of)
    limit: Dim | None = attrs.field(default=None, converter=or_none(limit_of))
    ragged: bool | Compute = attrs.field(default=False, converter=ragged_of)

    def initial(self) -> Value:
        """Return the value that the buffer is initialized with: the declared one, else the tail's, else zero."""
        if self.starts is not None:
            return self.starts
        return self.pad.value if isinstance(self.pad, Pad | Once) else 0

    def reads(self, name: str) -> Source | None:
        """Return the source that a fill copies to the slot of this name, or None if nothing is copied."""
        del name
        return None

    def computes(self) -> Compute | None:
        """Return the function that a fill calls, or None if nothing is computed."""
        return None

    def advances(self) -> Compute | None:
        """Return the function that gives the slot's value in the next step, or None if the slot stays as it is."""
        return None

    def rule(self) -> Tail | None:
        """Return the tail rule, or None if every padded row is written in each step, or none ever is."""
        return self.pad

    @property
    def writers(self) -> frozenset[Writer]:
        """The writers of the slot, apart from those that `rewritten` and `restored` add. Empty for a constant.

        A kind that neither copies nor computes overrides this; by default any producer or step may write it.
        """
        found = set[Writer]()
        if self.reads("") is not None:
            found.add("batch")
        if self.computes() is not None:
            found.add("function")
        return frozenset(found) or BY_PRODUCER | BY_STEP

    @property
    def needs(self) -> tuple[str, ...]:
        """Names that its function needs, possibly `step`, `settings` and `ranks`. Empty if nothing is computed."""
        compute = self.computes()
        return compute.reads if compute else ()

    def converts_from(self) -> tuple[torch.dtype, ...]:
        """Return the source dtypes that a copy converts to the slot's own: the role's and the declared ones."""
        return (*(self.dtype.accepts if isinstance(self.dtype, Role) else ()), *self.converts)

    def faults(self) -> Iterator[str]:
        """Yield each fault of the slot by itself, with a way to fix it."""
        dtype = resolve_dtype(self.dtype, Capabilities())
        limit = self.limit
        for value in self.declared_values():
            yield from value_faults(value, dtype)
        if self.rewritten and self.restored:
            yield "it is both rewritten and restored, and a restored slot is as the fill left it; use one of them"
        if isinstance(self.pad, Once) and self.starts is not None:
            yield f"starts={self.starts!r} and pad=once(...) both say what it holds at first: say one of them"
        if self.needs_rule and self.varying and self.pad is None:
            yield "no tail rule: say pad=value, pad=keep('why no one reads the tail') or pad=once(value)"
        if self.restored and isinstance(self.pad, Once):
            yield "it is restored, and its tail is set once: a step that raises would leave it spoilt; say pad=value"
        if not dtype.is_complex and any(source.is_complex for source in self.converts_from()):
            yield f"it converts complex numbers, whose imaginary part {dtype_text(dtype)} drops: copy the part you mean"
        if limit is not None and limit.varies:
            yield f"its limit {limit!r} varies by step: give a number or a fixed axis"
        if limit is not None and (dtype == torch.bool or dtype.is_floating_point or dtype.is_complex):
            yield f"it has a limit, but {dtype_text(dtype)} is not a whole number: leave it out"
        yield from _ragged_faults(self) if self.ragged else ()
        if self.argument is not None:
            yield from _parameter_faults(self, dtype)

    @property
    def is_state(self) -> bool:
        """Whether steps keep its contents: a producer writes it, and no dim varies, so that no fill writes it."""
        return "producer" in self.writers and not self.varying

    @functools.cached_property
    def axes(self) -> frozenset[Axis]:
        """Every axis in the shape, the initial and pad values, and the limit."""
        sizes = [Dim.of(value) for value in (*self.declared_values(), self.limit) if isinstance(value, Axis | Dim)]
        return frozenset(axis for size in (*self.shape, *sizes) for axis in size.axes)

    def declared_values(self) -> Iterator[Value]:
        """Yield the initial value, and then the values that the tail may hold."""
        initial = self.initial()
        rule = self.rule()
        yield initial
        yield from self.poison if isinstance(self.poison, tuple) else ()
        if isinstance(rule, Pad | Once) and rule.value is not initial:
            yield rule.value

    @property
    def kind(self) -> str:
        """The kind's name in plans and tables."""
        return type(self).__name__.lower()

    @functools.cached_property
    def varying(self) -> tuple[int, ...]:
        """The dims whose size varies by step."""
        return tuple(i for i, dim in enumerate(self.shape) if dim.varies)


@attrs.frozen(kw_only=True)
class Copied(Slot):
    """A slot that is copied from the batch in each step.

    Attributes:
        source: A dotted path, `side(...)` or a function of the batch. None reads the slot's own name.
        then: A function of slots that gives the value in the next step of `steps()`. None leaves the slot as it is.
    """

    needs_rule = True
    source: Source | None = attrs.field(default=None, converter=optional_source)
    then: Compute | None = attrs.field(default=None, converter=or_none(one_value))

    def reads(self, name: str) -> Source | None:
        """Return the declared source, or the slot's own name. A slot of a group has its name below such a path."""
        name, _, member = name.partition(".")
        source = self.source or Path((name,))
        return Path((*source.parts, member), source.from_side) if member and isinstance(source, Path) else source

    def advances(self) -> Compute | None:
        """Return the declared rule."""
        return self.then


@attrs.frozen(kw_only=True)
class Computed(Slot):
    """A slot whose function derives every padded row from the slots and sizes that it names.

    A tail rule sets the padded rows after the function has run.

    Attributes:
        function: The function.
        again: What says whether the function must run again. None if it runs in each step.
    """

    function: Compute = attrs.field(converter=compute_of)
    again: Compute | None = attrs.field(default=None, converter=or_none(again_of))

    def computes(self) -> Compute | None:
        """Return the declared function."""
        return attrs.evolve(self.function, again=self.again)

    def faults(self) -> Iterator[str]:
        """Yield each fault of the slot by itself."""
        yield from super().faults()
        if self.pad is not None and not (self.varying and isinstance(self.pad, Pad)):
            yield f"its function gives every row, and {self.pad} changes none: say pad=value of a dim that varies"


@attrs.frozen(kw_only=True)
class Constant(Slot):
    """A slot whose whole capacity is set when the buffer is allocated, and never written again.

    Attributes:
        value: A number, a fixed axis, a backend's fill role, or a function of the step at full capacity that returns a
            tensor or nested lists. Row i of any bucket is row i of the whole.
    """

    value: Value = attrs.field(converter=constant_of)

    @property
    def writers(self) -> frozenset[Writer]:
        """No writer."""
        return frozenset()

    def initial(self) -> Value:
        """Return the declared value."""
        return self.value


@attrs.frozen(kw_only=True)
class Staged(Slot):
    """A slot that a producer writes inside or outside the step. A fill only resets its tail.

    Over fixed sizes it is state: a table that no fill writes, and that steps keep.
    """

    needs_rule = True
    rewritten: bool = attrs.field(default=True, converter=flag)

    @property
    def writers(self) -> frozenset[Writer]:
        """The writer: a producer."""
        return BY_PRODUCER


@attrs.frozen(kw_only=True)
class Output(Slot):
    """A buffer at a fixed address that the step writes its result to; a fill leaves it alone."""

    @property
    def writers(self) -> frozenset[Writer]:
        """The writer: the step."""
        return BY_STEP


def _ragged_faults(slot: Slot) -> Iterator[str]:
    """Yield why the slot cannot have rows of different lengths."""
    if len(slot.shape) != 2 or slot.varying != (0,):  # noqa: PLR2004 - rows and columns
        yield "it is ragged, so it has two dims: rows that vary, and a fixed number of columns, such as BATCH, PAGES"
    if not (isinstance(slot.pad, Pad) and isinstance(slot.pad.value, int | float)):
        yield f"it is ragged, and the rest of each row holds its pad value: say pad=number, not {slot.pad!r}"
    if slot.limit is not None:
        yield "it is ragged, and limits are for rows of one length: leave limit= out"
    if isinstance(slot.ragged, Compute) and len({*slot.ragged.needs} - {SETTINGS}) != 1:
        yield "ragged= is a function, so it takes one slot that gives the length of rows, and settings if it needs them"


def _parameter_faults(slot: Slot, dtype: torch.dtype) -> Iterator[str]:
    """Yield why the slot cannot be a host parameter."""
    if slot.placement != HOST:
        yield "it is a host parameter but placed on the device: say placement='host', or leave argument= out"
    if dtype not in (torch.int32, torch.int64):
        yield f"it is a host parameter of {dtype_text(dtype)}: operators take whole numbers, torch.int32 or torch.int64"
    if len(slot.shape) > 1:
        yield f"it is a host parameter of {len(slot.shape)} dims: an operator takes one number, or one row of them"
    if slot.rewritten or slot.restored or isinstance(slot, Output):
        yield "it is a host parameter, read before the step, but the step writes it: copy it, or compute it"


SlotOrGroup = Slot | Mapping[str, Slot]
"""What a field declares: a slot, or the slots of a group by their names in it."""
SLOT: Final = "slotgraph.slot"
FAULTS: Final = "slotgraph.faults"
Size = int | Axis | Dim
ShapeArgument = Size | tuple[Size, ...]
Dtype = torch.dtype | Role


def slot(kind: Slot, *, init: bool = True, default: Any = attrs.NOTHING) -> Any:
    """Make a field for any slot object, including one of your own kind.

    Args:
        kind: The slot.
        init: Whether the declaration's constructor takes this slot's value.
        default: None makes the slot optional.
    """
    _need(isinstance(kind, Slot), f"slot({_brief(kind)}): expected an object of a class that derives from Slot")
    return _field(kind, [], init=init, default=default)


def _field(kind: SlotOrGroup, faults: list[str], *, init: bool, default: Any) -> Any:
    """Make an attrs field that carries slots, and the faults that the declaration must report about parameters."""
    if not isinstance(init, bool):
        faults.append(f"init={_brief(init)}: say True or False")
    if default is not None and default is not attrs.NOTHING:
        faults.append(f"default={_brief(default)}: say default=None, which makes the slot optional, or leave it out")
    metadata = {SLOT: kind, FAULTS: tuple(dict.fromkeys(faults))}
    return attrs.field(
        default=default, init=init is not False, metadata=metadata, repr=lambda value: _brief(value, repr)
    )


def _declared(kind: type[Slot], given: Mapping[str, Any]) -> Any:
    """Make the field of a slot, or of a group. If a parameter is invalid, a stand-in slot reports the faults."""
    suited = dict[str, Any]()
    faults = list[str]()
    default = given.get("default", attrs.NOTHING)
    group = given.get("group")
    if isinstance(group, Group):
        slots = dict[str, Slot]()
        for name in group.names:
            field = _declared(kind, {**{key: group.member(name, one) for key, one in given.items()}, "group": None})
            slots[name] = field.metadata[SLOT]
            faults += field.metadata[FAULTS]
        return _field(slots, faults, init="init" not in given, default=default)
    for parameter in attrs.fields(kind):
        name = parameter.name
        convert = parameter.converter
        if name in given and callable(convert):
            try:
                suited[name] = convert(given[name])
            except (TypeError, ValueError) as error:
                faults.append(f"{name}={_brief(given[name])}: {error}")
    if group is not None:
        faults.append(f"group={_brief(group)}: expected a Group, such as Group('full', 'sliding')")
    if faults:
        made: Slot = Staged(shape=(), dtype=torch.int64, placement=suited.get("placement", DEVICE))
    else:
        made = kind(**suited, optional=default is None)
    if given.get("init", False) is not False:
        faults.append(f"init={_brief(given['init'])}: no batch has this slot, so leave init= out")
    return _field(made, faults, init="init" not in given, default=default)


def named_slots(declared: Mapping[str, SlotOrGroup]) -> dict[str, Slot]:
    """Return all slots by name, those of groups as in `tables.full`.

    If a function of a group's slot has a parameter that names a group, it takes that group's slot of the same name.
    """
    found = dict[str, Slot]()
    groups = [name for name, kind in declared.items() if isinstance(kind, Mapping)]
    for name, kind in declared.items():
        if isinstance(kind, Slot):
            found[name] = kind
            continue
        for member, slot in kind.items():
            functions = {"function": slot.computes(), "again": getattr(slot, "again", None), "then": slot.advances()}
            named: dict[str, Any] = {key: one.within(groups, member) for key, one in functions.items() if one}
            found[f"{name}.{member}"] = attrs.evolve(slot, **named)
    return found


def copied(  # noqa: PLR0913 - one for each property of a slot
    *shape: Size | ByName,
    dtype: Dtype,
    pad: PadValue | Tail | ByName | None = None,
    source: str | Source | Callable[[Any], Any] | ByName | None = None,
    then: Callable[..., Any] | None = None,
    placement: Placement = DEVICE,
    strided: bool = False,
    converts: tuple[torch.dtype, ...] = (),
    rewritten: bool = False,
    restored: bool = False,
    argument: str | None = None,
    starts: PadValue | None = None,
    limit: Size | None = None,
    ragged: bool | Callable[..., Any] = False,
    poison: Poison | None = None,
    when: When | None = None,
    group: Group | None = None,
    default: Any = attrs.NOTHING,
) -> Any:
    """Declare a slot that is copied from the batch in each step; `default=None` makes it optional.

    Faults of the arguments are reported when the class is defined, all at once, as `DeclarationErrors`.

    Args:
        shape: A size for each dim: a number, an axis, or a sum or product of them.
        dtype: A torch dtype, or a role.
        pad: What the tail holds: a value, a fixed axis, a fill role, or a tail rule.
        source: A path, `side("path")` or a function of the batch. By default the slot's own name.
        then: A function that gives the slot's value in the next step of `steps()`, unless the host supplies one. Its
            parameters name slots. The slot's own name gives the last step's value, another slot that advances its new
            value, and an output the value that the last step wrote. By default the slot stays as it is.
        placement: The memory of the buffer, "device" or "host".
        strided: Whether a source may be non-contiguous.
        converts: Source dtypes that the copy converts.
        rewritten: Whether the step also writes this slot.
        restored: Whether the step writes this slot, and the runner restores it at the end of the step.
        argument: The operators' argument, such as "actual_seq_lengths_kv", that takes this slot in host memory.
        starts: What the buffer holds at first, if not the tail's value.
        limit: The largest value that host data may hold.
        ragged: Whether rows may have different lengths: a list of lists, or `Ragged`. The rest of each row holds the
            pad value. A function of one slot, and of `settings` if it needs them, says how long rows must be, such as
            `lambda seq_lens: -(-seq_lens // 16)`. `step.needs` calls it on an array with a number for each request.
        poison: What checks may put into the tail.
        when: The name of the setting that enables the slot, or a function of the settings.
        group: Declares a slot for each of its names. Other arguments may be mappings by these names.
        default: None makes the slot optional.
    """
    return _declared(Copied, locals())


def computed(
    function: Callable[..., Any] | ByName,
    *,
    shape: ShapeArgument = (),
    dtype: Dtype,
    pad: PadValue | Tail | None = None,
    again: tuple[str, ...] | Callable[..., bool] | None = None,
    placement: Placement = DEVICE,
    argument: str | None = None,
    poison: Poison | None = None,
    when: When | None = None,
    group: Group | None = None,
    init: Literal[False] = False,
) -> Any:
    """Declare a slot that is derived in each step. The function's parameters name what it needs.

    A slot's name gives its padded tensor, `step` the step's sizes, `settings` the runner's settings, another field its
    value, and `out` the slot's own buffer to fill. A function that needs only host values runs on the host before the
    step. One that needs slots on the device runs there, inside the graph. Both must give every padded row.

    Args:
        function: Returns the value, in the slot's dtype and padded shape, or fills `out`. One function can fill several
            slots: see `slotgraph.extend.fills`.
        shape: One size for each dim.
        dtype: A torch dtype, or a role.
        pad: What the tail holds after the function: a value, a fixed axis, or a fill role. By default the function's
            own rows.
        again: For a function on the host that need not run in each step: the slots in host memory and the fields that
            its value depends on, or a function of such that returns whether it must run. It also runs for other sizes
            than the last, and otherwise the slot keeps its value. By default it runs in each step.
        placement: The memory of the buffer, "device" or "host".
        argument: The operators' argument that takes this slot in host memory.
        poison: What checks may put into the tail.
        when: The name of the setting that enables the slot, or a function of the settings.
        group: Declares a slot for each of its names. Other arguments may be mappings by these names.
        init: Leave it out. It makes type checkers reject this slot in the constructor.
    """
    return _declared(Computed, locals())


def constant(
    value: Value | ByName,
    *,
    shape: ShapeArgument = (),
    dtype: Dtype,
    placement: Placement = DEVICE,
    when: When | None = None,
    group: Group | None = None,
    init: Literal[False] = False,
) -> Any:
    """Declare a slot that is set once: to a number, a fixed axis or an expression, a fill role, or a function's result.

    Args:
        value: What every element holds. A function takes the step at full capacity.
        shape: One size for each dim.
        dtype: A torch dtype, or a role.
        placement: The memory of the buffer, "device" or "host".
        when: The name of the setting that enables the slot, or a function of the settings.
        group: Declares a slot for each of its names. Other arguments may be mappings by these names.
        init: Leave it out. It makes type checkers reject this slot in the constructor.
    """
    return _declared(Constant, locals())


def staged(
    *shape: Size,
    dtype: Dtype,
    pad: PadValue | Tail | None = None,
    starts: PadValue | None = None,
    placement: Placement = DEVICE,
    poison: Poison | None = None,
    when: When | None = None,
    group: Group | None = None,
    init: Literal[False] = False,
) -> Any:
    """Declare a slot that a producer writes inside or outside the step. A fill resets its tail in each step.

    Over fixed sizes it is state: a table that steps keep, such as the lengths of a pool of requests. The step may write
    it, and functions may need it. Warm-ups and checks restore it, and no other runner shares its memory.

    Args:
        shape: A size for each dim: a number, an axis, or a sum or product of them.
        dtype: A torch dtype, or a role.
        pad: What the tail holds: a value, a fixed axis, a fill role, or a tail rule.
        starts: What the buffer holds at first, if not the tail's value. State in a tensor of `bind=` keeps what it has.
        placement: The memory of the buffer, "device" or "host".
        poison: What checks may put into the tail.
        when: The name of the setting that enables the slot, or a function of the settings.
        group: Declares a slot for each of its names. Other arguments may be mappings by these names.
        init: Leave it out. It makes type checkers reject this slot in the constructor.
    """
    return _declared(Staged, locals())


def output(
    *shape: Size, dtype: Dtype, placement: Placement = DEVICE, when: When | None = None, init: Literal[False] = False
) -> Any:
    """Declare a buffer at a fixed address that the step writes its result to.

    Args:
        shape: A size for each dim: a number, an axis, or a sum or product of them.
        dtype: A torch dtype, or a role.
        placement: The memory of the buffer, "device" or "host".
        when: The name of the setting that enables the slot, or a function of the settings.
        init: Leave it out. It makes type checkers reject this slot in the constructor.
    """
    return _declared(Output, locals())


def _brief(value: Any, text: Callable[[Any], str] = reprlib.repr) -> str:
    """Show a value briefly. Show only dtype and shape of a tensor, since its values may be on the device."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_brief(one, text)}" for name, one in value.items()) + "}"
    return f"{dtype_text(value.dtype)}{list(value.shape)}" if isinstance(value, torch.Tensor) else text(value)
