"""A declaration as data: its slots, its other fields, and everything that is wrong with it at once."""

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError as GraphCycle
from types import MappingProxyType
from typing import Any

import attrs
import torch

from . import graph
from .axes import Axis, Dim, Sizes, Step
from .capabilities import Placement
from .compute import RANKS, SETTINGS, STEP
from .errors import BatchError, CycleError, DeclarationError, DeclarationErrors
from .slots import Slot
from .sources import Source, look_up


@attrs.frozen(eq=False)
class Declaration:
    """The slots of one declaration class, checked.

    fields: names that are no slots, carried from the batch into the view, with their defaults (attrs.NOTHING where
    there is none). disabled: slots that the runner's settings switched off. settings: those settings, which functions
    of computed slots may ask for; None before there is a runner. ranks: those of the runner, likewise. arguments: the
    side arguments that slots of the class read, those of disabled slots included; None where a source of the caller's
    own may read any. following: axes that no slot has, but whose sizes follow from those of the slots' axes by the
    runner's relations: see `related`.
    """

    name: str
    slots: Mapping[str, Slot]
    fields: Mapping[str, Any]
    disabled: tuple[str, ...] = ()
    settings: object = None
    ranks: Any = None
    arguments: frozenset[str] | None = None
    following: tuple[Axis, ...] = ()

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
        """Axes whose size varies by step: those of slots, and those that follow from them."""
        return tuple(sorted({*(axis for axis in self.axes if not axis.fixed), *self.following}))

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

    def check_side(self, side: Mapping[str, Any]) -> None:
        """BatchError where a side argument is given that no slot of the class reads, enabled or not."""
        if not side or self.arguments is None or self.arguments.issuperset(side):
            return
        unknown = sorted(set(side) - self.arguments)
        near = difflib.get_close_matches(unknown[0], self.arguments, n=1)
        known = ", ".join(map(repr, sorted(self.arguments))) or "none"
        hint = f"did you mean {near[0]!r}?" if near else f"the side arguments that its slots read are: {known}"
        message = f"{self.name}: no slot reads the side argument {unknown[0]!r}: {hint}"
        raise BatchError(message)

    def given(self, step: Step) -> dict[str, Any]:
        """What functions of computed slots are given by name, beside slots and fields."""
        return {STEP: step, SETTINGS: self.settings, RANKS: self.ranks}

    def step(self, live: Sequence[int], padded: Sizes, *, exact: bool = False) -> Step:
        """The sizes of a step.

        live: rows on each varying axis. padded: rows of the bucket, and the sizes of fixed axes. exact: whether nothing
        is padded, so that the padded sizes are the live ones. Any other axis in `padded` is left out.
        """
        known = {axis: size for axis, size in padded.items() if axis.fixed} | dict(zip(self.varying, live, strict=True))
        return Step(known, known if exact else {axis: padded[axis] for axis in known})

    def related(self, relations: Mapping[Axis, Dim]) -> "Declaration":
        """The declaration with the axes that follow from those of slots, or from which these follow.

        relations: axes that follow from others, such as `{TOKENS: BATCH * 4}`: slots over either tell both.
        """
        leads = {axis: size.reveals() for axis, size in relations.items() if not axis.fixed}
        told = {leads.get(axis, axis) for axis in self.varying} - {None}
        known = {axis for axis in {*leads, *told} if axis is not None and leads.get(axis, axis) in told}
        return attrs.evolve(self, following=tuple(sorted(known.difference(self.axes))))

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
        raise refused(name, faults)
    arguments = _arguments(slots)
    return Declaration(name, MappingProxyType(dict(slots)), MappingProxyType(dict(fields)), arguments=arguments)


def _arguments(slots: Mapping[str, Slot]) -> frozenset[str] | None:
    """The side arguments that slots read; None where one may read any."""
    sources = [source for name, slot in slots.items() if (source := slot.reads(name)) is not None]
    read = [source.arguments for source in sources]
    return None if None in read else frozenset[str]().union(*filter(None, read))


def refused(name: str, faults: Sequence[DeclarationError]) -> DeclarationErrors:
    """All faults of the declaration of this name together."""
    return DeclarationErrors(f"{name} breaks {len(faults)} rule{'s' * (len(faults) > 1)}", faults)


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
        try:
            return bool(slot.when(settings))
        except Exception as error:
            message = f"slot {name!r}: its function when= raised {type(error).__name__}: {error}"
            raise DeclarationError(message) from error
    value: Any = settings
    for part in slot.when.split("."):
        value = look_up(value, part)
    if value is None:
        message = f"slot {name!r} exists when {slot.when!r} is set: give settings with that name, true or false"
        raise DeclarationError(message)
    if isinstance(value, str | torch.Tensor):  # the text 'false' would be true, and many numbers are neither
        message = f"slot {name!r} exists when {slot.when!r} is set: expected true or false, got {value!r:.80}"
        raise DeclarationError(message)
    return bool(value)
