"""A declaration as data: its slots, its other fields, and a check that reports all its faults at once."""

import functools
import graphlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
import torch

from .axes import Axis, Dim, Sizes, Step
from .capabilities import DEVICE, HOST, Capabilities, Placement, dtype_text, resolve_dtype
from .errors import BatchError, ConfigError, CycleError, DeclarationError, DeclarationErrors, did_you_mean, hint
from .slots import BY_STEP, Computed, Slot
from .sources import OUT, RANKS, SETTINGS, STEP, Call, Compute, Field, Path, Source, keys_of, linear, look_up
from .tails import Pad, holds

Faults = Iterator[tuple[str, str]]  # pairs of a slot's or field's name and its fault
SlotNames = Literal["", "optional", "copied"]
_GIVEN: Final = (STEP, SETTINGS, RANKS)
LIVE_ROWS: Final = "_live_"
"""The names of slots that hold an axis' live rows begin with this. Functions on the device pad their results by them.
"""


@attrs.frozen(eq=False)
class Declaration:
    """The checked slots of one declaration class.

    Attributes:
        name: The class's name.
        slots: The enabled slots, by name.
        fields: The fields that are not slots. The view gets their values from the batch.
        disabled: Slots that the settings switch off.
        settings: The runner's settings, which functions may request.
        ranks: The runner's ranks, which functions may request.
        arguments: The side arguments that slots read, disabled slots included. None if a custom source may read any.
        following: Axes that no slot has, and whose sizes follow from the runner's relations; see `related`.
        done: The slot that says which requests are done, or "" if none does; see `.done`.
    """

    name: str
    slots: Mapping[str, Slot]
    fields: Mapping[str, Field]
    disabled: tuple[str, ...] = ()
    settings: object = None
    ranks: Any = None
    arguments: frozenset[str] | None = None
    following: tuple[Axis, ...] = ()
    done: str = ""

    @functools.cached_property
    def groups(self) -> Mapping[str, Mapping[str, str]]:
        """The slots of each group, enabled or not, by their names in it."""
        found = dict[str, dict[str, str]]()
        for slot in (*self.slots, *self.disabled):
            group, _, name = slot.partition(".")
            if name:
                found.setdefault(group, {})[name] = slot
        return found

    def grouped(self, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the values of each group by the names in it, if all its slots have one."""
        return {
            name: {member: values[slot] for member, slot in slots.items()}
            for name, slots in self.groups.items()
            if values.keys() >= {*slots.values()}
        }

    def by_slot(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Replace each value that a mapping gives a group by those of its slots."""
        found = dict(values)
        for name in self.groups.keys() & values:
            if isinstance(values[name], Mapping):
                found |= {f"{name}.{member}": one for member, one in found.pop(name).items()}
        return found

    @functools.cached_property
    def functions(self) -> Mapping[str, Compute]:
        """The function of each computed slot, in dependency order.

        Raises graphlib.CycleError with the path of a cycle.
        """
        return self._ordered({name: one for name, slot in self.slots.items() if (one := slot.computes())})

    @functools.cached_property
    def rules(self) -> Mapping[str, Compute]:
        """The rule of each slot that has one. A rule comes after those whose new values it reads.

        Raises graphlib.CycleError with the path of a cycle.
        """
        return self._ordered({name: one for name, slot in self.slots.items() if (one := slot.advances())}, own=False)

    def _ordered(self, found: Mapping[str, Compute], *, own: bool = True) -> Mapping[str, Compute]:
        """Sort functions of slots so that each follows all that it needs. `own` makes one that needs itself a cycle."""
        edges = {
            n: sorted({*one.reads}.intersection(self.slots).difference(() if own else (n,)))
            for n, one in sorted(found.items())
        }
        return {name: found[name] for name in graphlib.TopologicalSorter(edges).static_order() if name in found}

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis in a shape or a pad value, sorted by name."""
        return tuple(sorted({axis for slot in self.slots.values() for axis in slot.axes}))

    @functools.cached_property
    def varying(self) -> tuple[Axis, ...]:
        """Axes whose size varies by step: those of slots, and those that follow from them."""
        return tuple(sorted({*(axis for axis in self.axes if not axis.fixed), *self.following}))

    @functools.cached_property
    def counted(self) -> tuple[Dim, ...]:
        """The sizes whose live values each packet contains: 1, every varying axis, and the expressions over these."""
        sizes = [slot.shape[dim] for slot in self.slots.values() for dim in slot.varying]
        return tuple(dict.fromkeys([Dim.of(1), *map(Dim.of, self.varying), *sizes]))

    def counts(self, sizes: Sizes) -> list[int]:
        """Evaluate the sizes in `counted` at the given sizes of axes."""
        return [size.at(sizes) for size in self.counted]

    @functools.cached_property
    def optional(self) -> tuple[tuple[str, Source], ...]:
        """Slots that a batch may omit, each with its source."""
        return tuple((name, source) for name, source in self.sources.items() if self.slots[name].optional)

    @functools.cached_property
    def sources(self) -> Mapping[str, Source]:
        """The source in a batch of each slot that a fill copies."""
        slots = self.slots.items()
        return MappingProxyType({name: read for name, slot in slots if (read := slot.reads(name)) is not None})

    @functools.cached_property
    def checked_fields(self) -> tuple[Field, ...]:
        """Fields whose values attrs converts or validates."""
        return tuple(one for one in self.fields.values() if one.convert or one.attribute.validator)

    @functools.cached_property
    def parameters(self) -> Mapping[str, str]:
        """Host parameters: the slot's name, by the operator's argument that takes it."""
        slots = self.slots.items()
        return MappingProxyType({slot.argument: name for name, slot in slots if slot.argument is not None})

    def side(self, name: str) -> Placement:
        """Return where a computed slot's function runs: on the device if it needs a slot on it, else on the host."""
        slots = self.slots
        return DEVICE if any(n in slots and slots[n].placement == DEVICE for n in slots[name].needs) else HOST

    @functools.cached_property
    def read_on_host(self) -> frozenset[str]:
        """What functions on the host need."""
        functions = self.functions.items()
        return frozenset(need for name, one in functions if self.side(name) == HOST for need in one.reads)

    def with_live_rows(self) -> "Declaration":
        """Return the declaration with a slot for each axis whose live rows pad the result of a function on the device.

        The host computes these slots, so that each way to fill a bucket, and each edit, writes them.
        """
        found = dict(self.slots)
        for name, slot in self.slots.items():
            if isinstance(slot.rule(), Pad) and self.side(name) == DEVICE:
                found.update({LIVE_ROWS + axis.name: _live_rows(axis) for axis in slot.axes if not axis.fixed})
        return attrs.evolve(self, slots=MappingProxyType(found))

    def check_side(self, side: Mapping[str, Any]) -> None:
        """Raise BatchError for a side argument that no slot of the class reads, enabled or not."""
        if not side or self.arguments is None or self.arguments.issuperset(side):
            return
        unknown = min(set(side) - self.arguments)
        known = ", ".join(map(repr, sorted(self.arguments))) or "none"
        instead = hint(unknown, self.arguments, f"the side arguments that its slots read are: {known}")
        raise BatchError(f"{self.name}: no slot reads the side argument {unknown!r}: {instead}")

    def check_fields(self, batch: Any) -> None:
        """Raise BatchError with everything that converters and validators refuse in a batch.

        The constructor has already checked objects of the class. For any other batch, validators receive an object of
        the class whose attributes are the batch's values for copied slots and for fields.
        """
        checked = self.checked_fields
        if not checked or isinstance(batch, checked[0].owner):
            return
        names = dict.fromkeys(name.partition(".")[0] for name in self.sources)  # a group's value is one attribute
        faults = list[str]()
        seen = {name: look_up(batch, name) for name in names}
        for name, field in self.fields.items():
            try:
                seen[name] = field.read(batch)
            except BatchError as error:
                faults.append(str(error))
        made: Any = object.__new__(checked[0].owner)
        vars(made).update(seen)
        for field in () if faults or attrs.validators.get_disabled() else checked:
            value = seen.get(field.name)
            validate = field.attribute.validator
            if validate is None or (value is None and field.default is attrs.NOTHING):
                continue
            try:
                validate(made, field.attribute, value)
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                faults.append(field.refusal(error))
        if faults:
            raise BatchError("; ".join(faults))

    def check_names(self, argument: str, names: Iterable[str], kind: SlotNames = "") -> None:
        """Raise ConfigError if an argument names something that is not a slot of the class, or not one of this kind."""
        kinds = {
            "": [*self.slots, *self.disabled],
            "optional": [*dict(self.optional)],
            "copied": [*self.sources],
        }
        for name in names:
            if name not in kinds[kind]:
                instead = hint(name, kinds[kind], f"{kind or 'known'} are {', '.join(kinds[kind]) or 'none'}")
                what = f"{'an' if kind == 'optional' else 'a'} {kind} slot".replace("  ", " ")
                raise ConfigError(f"{argument} names {name!r}, which is not {what} of {self.name}: {instead}")

    def given(self, step: Step) -> dict[str, Any]:
        """Return, by name, what functions of computed slots can take besides slots and fields."""
        return {STEP: step, SETTINGS: self.settings, RANKS: self.ranks}

    def step(self, live: Sequence[int], padded: Sizes, *, exact: bool = False) -> Step:
        """Make the sizes of a step from its live rows on each varying axis and the bucket's padded sizes.

        If `exact`, the padded sizes are the live ones.
        """
        known = {axis: size for axis, size in padded.items() if axis.fixed} | dict(
            zip(self.varying, live, strict=False)
        )
        return Step(known, known if exact else {axis: padded[axis] for axis in known})

    def related(self, relations: Mapping[Axis, Dim]) -> "Declaration":
        """Add axes that follow by relations such as `{TOKENS: BATCH * 4}`. A slot over either axis determines both."""
        leads = {axis: size.reveals() for axis, size in relations.items() if not axis.fixed}
        determined = {leads.get(axis, axis) for axis in self.varying} - {None}
        known = {axis for axis in {*leads, *determined} if axis is not None and leads.get(axis, axis) in determined}
        return attrs.evolve(self, following=tuple(sorted(known.difference(self.axes))))

    def under(self, settings: object, ranks: Any = None) -> "Declaration":
        """Keep only the slots that the settings enable.

        Raise DeclarationError if one needs settings or ranks not given.
        """
        on = {name: slot for name, slot in self.slots.items() if _enabled(name, slot, settings)}
        off = tuple(name for name in self.slots if name not in on)
        made = attrs.evolve(self, slots=on, disabled=off, settings=settings, ranks=ranks).with_live_rows()
        given = {SETTINGS: settings, RANKS: ranks}
        for name, slot in made.slots.items():
            for need in slot.needs:
                if need not in made.slots and given.get(need, need) is None:
                    raise DeclarationError(f"slot {name!r}: its function asks for `{need}`: give the runner {need}=")
        return made


def declare(
    name: str,
    slots: Mapping[str, Slot],
    fields: Mapping[str, Field],
    found: Sequence[DeclarationError] = (),
    dropped: Collection[str] = (),
) -> Declaration:
    """Check slots and make a declaration. Raise DeclarationErrors with the faults in `found` and all others.

    dropped: Slots of bases that it leaves out.
    """
    made = Declaration(name, MappingProxyType(dict(slots)), MappingProxyType(dict(fields)))
    faults = [*found]
    seen = dict[str, Axis]()
    faults += [DeclarationError(f"{name}.{slot}: slot {slot!r}: {fault}") for slot, fault in _faults(made, dropped)]
    for axis in made.axes:
        if seen.setdefault(axis.name, axis) != axis:
            faults.append(DeclarationError(f"{name}: axis {axis.name!r} is both fixed and varying: rename one of them"))
    try:
        _ = made.functions, made.rules
    except graphlib.CycleError as cycle:
        path = " -> ".join(reversed(cycle.args[1]))
        faults.append(CycleError(f"{name}: slots need each other in a circle: {path}; break it at one of them"))
    if faults:
        raise refused(name, faults)
    read = made.sources.values()
    side = frozenset(source.parts[0] for source in read if isinstance(source, Path) and source.from_side)
    return attrs.evolve(made, arguments=side if all(isinstance(one, Path | Call) for one in read) else None)


@functools.cache
def _live_rows(axis: Axis) -> Slot:
    """Make the slot that holds the live rows of an axis: the same in all runners, so that declarations compare."""

    def live_rows(step: Step) -> int:
        return step.live(axis)

    live_rows.__qualname__ = live_rows.__name__  # as plans show it
    return Computed(function=live_rows, shape=(), dtype=torch.int64)


def refused(name: str, faults: Sequence[DeclarationError]) -> DeclarationErrors:
    """Group all faults of the declaration of this name."""
    return DeclarationErrors(f"{name} breaks {len(faults)} rule{'s' * (len(faults) > 1)}", faults)


def _faults(made: Declaration, dropped: Collection[str]) -> Faults:
    """Yield the faults of each slot: its own, those of what it needs, and those of its operator argument."""
    first: dict[str, str] = {}
    for name, slot in made.slots.items():
        compute = slot.computes()
        if compute and compute.again and (made.side(name) == DEVICE or RANKS in slot.needs):
            yield name, "again= is for functions on the host: it and the function need slots in host memory, and fields"
            continue
        yield from ((name, fault) for fault in slot.faults())
        yield from ((name, fault) for need in slot.needs for fault in _need_faults(need, name, made))
        yield from ((name, fault) for fault in _rule_faults(name, slot, made))
        if compute is not None:
            yield from ((name, fault) for fault in _function_faults(name, slot, compute, made, dropped))
        for need in slot.ragged.needs if isinstance(slot.ragged, Compute) else ():
            if need != SETTINGS and need not in made.slots:
                yield name, f"its ragged= needs {need!r}: name a slot, or `settings`{did_you_mean(need, made.slots)}"
        if name in (STEP, SETTINGS, OUT):
            yield name, "the name has a meaning of its own in slotgraph: choose another"
        if slot.placement == HOST and made.side(name) == DEVICE:
            yield name, "it needs slots on the device but is placed on the host: that would wait for the device"
        argument = slot.argument
        if argument is not None and first.setdefault(argument, name) != name:
            yield name, f"argument {argument!r} takes the value of slot {first[argument]!r}: name another, or drop one"


def _function_faults(
    name: str, slot: Slot, compute: Compute, made: Declaration, dropped: Collection[str]
) -> Iterator[str]:
    """Yield why a function cannot fill a slot."""
    if slot.reads(name) is not None:
        yield "it is copied from the batch and computed, and would hold one or the other: make it two slots"
    if compute.fills:
        alike = {other for other, its in made.slots.items() if its.computes() == compute}
        if wrong := alike.symmetric_difference(compute.fills).difference(dropped):
            others = [made.slots[other].computes() for other in wrong if other in made.slots]
            each = f"compute each of them by it, and no other slot, see {', '.join(sorted(wrong))}"
            if any(its and its != compute and attrs.evolve(its, again=compute.again) == compute for its in others):
                each = f"give them one again=, see {', '.join(sorted(wrong))}"
            yield f"one call of {compute.name} fills {', '.join(compute.fills)}: {each}"


def _need_faults(need: str, name: str, made: Declaration) -> Iterator[str]:
    """Yield why a computed slot cannot have something that its function needs."""
    slots = made.slots
    fields = made.fields
    known = [*slots, *fields, *_GIVEN]
    if need in slots and slots[need].writers == BY_STEP:
        yield f"it needs {need!r}, an output, which the step has not written yet when inputs are computed"
    elif need in _GIVEN and need in fields and need not in slots:
        yield f"it needs {need!r}, which has a meaning of its own in slotgraph, but is a field, too: rename that"
    elif need in made.groups:
        yield f"it needs {need!r}, a group of slots: declare it with group=, of the same names, to get one of them each"
    elif need not in known:
        what = "neither slot nor field of the declaration, nor `step`, `settings` or `ranks`"
        yield f"it needs {need!r}, which is {what}{did_you_mean(need, known)}"
    on_host = need not in slots or slots[need].placement == HOST
    if on_host and need != SETTINGS and made.side(name) == DEVICE:  # settings never change
        yield (
            f"its function runs on the device, inside the graph, where the host value {need!r} would be frozen at "
            f"capture: put what it takes from {need!r} into a slot that is computed on the host, and need that"
        )


def _rule_faults(name: str, slot: Slot, made: Declaration) -> Iterator[str]:
    """Yield why a slot cannot advance by its rule."""
    rule = slot.advances()
    for need in () if rule is None else (*rule.needs, *[OUT] * rule.writes_out):
        other = made.slots.get(need)
        if need == SETTINGS:
            continue
        if other is None:
            near = did_you_mean(need, made.slots)
            yield f"its then= needs {need!r}: name slots of the declaration, or `settings`{near}"
        elif other.computes():
            yield f"its then= needs {need!r}, which is computed from the new values: name what it is computed from"
        elif other.placement != slot.placement:
            yield f"its then= needs {need!r}, which is on the {other.placement}: a rule reads slots on its own side"
        elif other.optional and need != name:
            yield f"its then= needs {need!r}, which may be absent: name slots that each batch has"
    found = None if rule is None else linear(rule)
    add = 0 if found is None else found[1]
    dtype = resolve_dtype(slot.dtype, Capabilities())
    dtype = torch.int64 if dtype == torch.uint64 else dtype  # the kernel adds int64 numbers
    if add and not (holds(dtype, add) or (add < 0 and holds(dtype, -add))):
        yield f"its then= adds {add}, which {dtype_text(dtype)} cannot hold: use a wider dtype"


def _enabled(name: str, slot: Slot, settings: object) -> bool:
    """Return whether the settings enable a slot."""
    if slot.when is None:
        return True
    if callable(slot.when):
        try:
            return bool(slot.when(settings))
        except Exception as error:
            raise DeclarationError(f"slot {name!r}: when= raised {type(error).__name__}: {error}") from error
    value = functools.reduce(look_up, slot.when.split("."), settings)
    if value is None or isinstance(value, str | torch.Tensor):  # 'false' would be truthy
        near = "" if settings is None else did_you_mean(slot.when.split(".")[0], keys_of(settings))
        way_out = f"give settings with that name, true or false{near}"
        expected = way_out if value is None else f"expected true or false, got {value!r:.80}"
        raise DeclarationError(f"slot {name!r} exists when {slot.when!r} is set: {expected}")
    return bool(value)
