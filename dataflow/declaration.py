"""A declaration as data: its slots, its other fields, and everything that is wrong with it at once."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError as GraphCycle
from types import MappingProxyType
from typing import Any

import attrs

from . import graph
from .axes import Axis
from .capabilities import Placement
from .compute import RANKS, SETTINGS, STEP
from .errors import CycleError, DeclarationError, DeclarationErrors
from .slots import Slot
from .sources import Source, look_up
from .step import Step


@attrs.frozen(eq=False)
class Declaration:
    """The slots of one declaration class, checked.

    fields: names that are no slots, carried from the batch into the view, with their defaults (attrs.NOTHING where
    there is none). disabled: slots that the runner's settings switched off. settings: those settings, which functions
    of computed slots may ask for; None before there is a runner. ranks: those of the runner, likewise.
    """

    name: str
    slots: Mapping[str, Slot]
    fields: Mapping[str, Any]
    disabled: tuple[str, ...] = ()
    settings: object = None
    ranks: Any = None

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """Computed slots, each after all that it needs."""
        return graph.order(self.slots)

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Every axis in a shape or a pad value, sorted by name."""
        return _axes(self.slots)

    @functools.cached_property
    def varying(self) -> tuple[Axis, ...]:
        """Axes whose size varies by step."""
        return tuple(axis for axis in self.axes if not axis.fixed)

    @functools.cached_property
    def optional(self) -> tuple[tuple[str, Source], ...]:
        """Slots that a batch may come without, each with where it would be found."""
        sources = ((name, slot.reads(name)) for name, slot in self.slots.items() if slot.optional)
        return tuple((name, source) for name, source in sources if source is not None)

    @functools.cached_property
    def parameters(self) -> Mapping[str, str]:
        """Host parameters: by the operator's argument that takes it, the slot's name."""
        named = ((slot.parameter(name), name) for name, slot in self.slots.items())
        return MappingProxyType({argument: name for argument, name in named if argument is not None})

    def side(self, name: str) -> Placement:
        """Where a computed slot's function runs."""
        return graph.side_of(self.slots[name], self.slots)

    def given(self, step: Step) -> dict[str, Any]:
        """What functions of computed slots are given by name, beside slots and fields."""
        return {STEP: step, SETTINGS: self.settings, RANKS: self.ranks}

    def under(self, settings: object, carry: Sequence[str] = (), ranks: Any = None) -> "Declaration":
        """The declaration with only those slots that the settings enable, and some carried: see `carrying`.

        Raises DeclarationError where a slot asks for a setting, for settings at all, or for ranks, that are not there.
        """
        on = {name: slot for name, slot in self.slots.items() if _enabled(name, slot, settings)}
        off = tuple(name for name in self.slots if name not in on)
        made = attrs.evolve(self, slots=MappingProxyType(on), disabled=off, settings=settings, ranks=ranks).carrying(
            carry
        )
        for name, value in ((SETTINGS, settings), (RANKS, ranks)):
            if value is None:
                _need_none(made, name)
        return made

    def carrying(self, names: Sequence[str]) -> "Declaration":
        """The declaration with some slots turned into fields, which the batch brings and no fill touches.

        Raises DeclarationError where a name is no slot, or where the step writes what the batch would bring.
        """
        for name in names:
            fault = self._carry_fault(name)
            if fault is not None:
                message = f"carry names {name!r}, which {fault}"
                raise DeclarationError(message)
        slots = {name: slot for name, slot in self.slots.items() if name not in names}
        fields = {**self.fields, **dict.fromkeys(names, attrs.NOTHING)}
        return attrs.evolve(self, slots=MappingProxyType(slots), fields=fields) if names else self

    def _carry_fault(self, name: str) -> str | None:
        """Why the slot of this name cannot be carried, or None."""
        if name in self.disabled:
            return f"the settings switch off in {self.name}: carry it only where they do not"
        slot = self.slots.get(name)
        if slot is None:
            return f"is no slot of {self.name}"
        if slot.reads(name) is not None and (slot.restored or slot.rewritten):
            return "the step writes: the batch is the caller's, so let the slot be copied from it"
        return None


def declare(
    name: str, slots: Mapping[str, Slot], fields: Mapping[str, Any], found: Sequence[DeclarationError] = ()
) -> Declaration:
    """Check slots and make them a declaration.

    Raises DeclarationErrors with every fault at once, those `found` by the caller first.
    """
    faults = [*found, *_faults(name, slots, fields), *_cycles(name, slots)]
    if faults:
        message = f"{name} breaks {len(faults)} rule{'s' * (len(faults) > 1)}"
        raise DeclarationErrors(message, faults)
    return Declaration(name, MappingProxyType(dict(slots)), MappingProxyType(dict(fields)))


def _cycles(name: str, slots: Mapping[str, Slot]) -> Iterator[CycleError]:
    try:
        graph.order(slots)
    except GraphCycle as cycle:
        path = " -> ".join(reversed(cycle.args[1]))
        yield CycleError(f"{name}: slots need each other in a circle: {path}; break it at one of them")


def _faults(name: str, slots: Mapping[str, Slot], fields: Mapping[str, Any]) -> Iterator[DeclarationError]:
    for slot_name, slot in slots.items():
        for fault in slot.faults():
            yield DeclarationError(f"{name}.{slot_name}: slot {slot_name!r}: {fault}")
    for slot_name, fault in graph.faults(slots, fields):
        yield DeclarationError(f"{name}.{slot_name}: slot {slot_name!r}: {fault}")
    for slot_name, fault in _shared_arguments(slots):
        yield DeclarationError(f"{name}.{slot_name}: slot {slot_name!r}: {fault}")
    seen: dict[str, Axis] = {}
    for axis in _axes(slots):
        if seen.setdefault(axis.name, axis) != axis:
            yield DeclarationError(f"{name}: axis {axis.name!r} is both fixed and varying: rename one of them")


def _shared_arguments(slots: Mapping[str, Slot]) -> Iterator[tuple[str, str]]:
    """Slots that would give an operator's argument a second value: pairs of a slot's name and the fault."""
    first: dict[str, str] = {}
    for name, slot in slots.items():
        argument = slot.parameter(name)
        if argument is not None and first.setdefault(argument, name) != name:
            yield name, f"argument {argument!r} takes the value of slot {first[argument]!r}: name another, or drop one"


def _axes(slots: Mapping[str, Slot]) -> tuple[Axis, ...]:
    return tuple(sorted({axis for slot in slots.values() for axis in slot.axes}))


def _need_none(declaration: Declaration, given: str) -> None:
    """DeclarationError where a function asks for what the runner was not given, and what is no slot."""
    if given in declaration.slots:
        return
    for name, slot in declaration.slots.items():
        compute = slot.computes()
        if compute is not None and given in compute.needs:
            message = f"slot {name!r}: its function {compute.name} asks for `{given}`: give the runner {given}="
            raise DeclarationError(message)


def _enabled(name: str, slot: Slot, settings: object) -> bool:
    if slot.when is None:
        return True
    if callable(slot.when):
        return bool(slot.when(settings))
    value: Any = settings
    for part in slot.when.split("."):
        value = look_up(value, part)
    if value is None:
        message = f"slot {name!r} exists when {slot.when!r} is set: give settings with that name, true or false"
        raise DeclarationError(message)
    return bool(value)
