"""What tests of shared memory share: random schedules and members, and a loop that runs them over a map of bytes."""

import hashlib
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, copied
from slotgraph.dataflow.axes import WIDTH
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.sharing.layout import Layout
from slotgraph.dataflow.sharing.lifetimes import Carry, Member, is_constant
from slotgraph.dataflow.sharing.phases import Schedule
from slotgraph.dataflow.sharing.planner import lay_out
from slotgraph.dataflow.slots import Slot
from slotgraph.dataflow.tails import Keep, Once
from slotgraph.dataflow.values import initial_value
from tests.strategies import DTYPES, HIDDEN, PAGES, declaration_of, declarations

PHASES = ("prefill", "draft", "verify", "extend", "prepare")


def member_of(name: str, phase: str, fields: Mapping[str, Any], **changed: Any) -> Member:
    """A member of a declaration made from fields, of 4 requests and 8 tokens."""
    capacity = {BATCH: 4, TOKENS: 8, PAGES: 5, HIDDEN: 3, WIDTH: 2}
    declaration = declaration_of(fields).slotgraph
    return Member(
        **{
            "name": name,
            "phase": phase,
            "declaration": declaration,
            "capacity": capacity,
            "capabilities": Capabilities(),
            **changed,
        }
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Phases in a random order, pairs that overlap, some at any time."""
    names = draw(st.permutations(PHASES))
    ordered = draw(st.sampled_from([1, 3, 3, 4, 5]))
    free = draw(st.sampled_from([0, 0, 0, 1]))
    pairs = list(itertools.combinations(names[:ordered], 2))
    overlaps = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    return Schedule(names[:ordered], overlaps, names[ordered : ordered + free])


@st.composite
def plain_declarations(draw: st.DrawFn) -> type[Inputs]:
    """Slots on the device that each step writes, of a few names that members have in common."""
    names = draw(st.sets(st.sampled_from("abcdef"), min_size=1))
    return declaration_of({name: draw(plain_slots()) for name in sorted(names)})


def plain_slots() -> st.SearchStrategy[Any]:
    """Copied slots with a tail that is reset."""
    sizes = st.sampled_from([(TOKENS,), (BATCH,), (TOKENS, HIDDEN), (BATCH, PAGES * 40), (TOKENS * 90,), (3, TOKENS)])
    dtypes = st.sampled_from([dtype for dtype in DTYPES if dtype != torch.bool])
    return st.builds(lambda shape, dtype: copied(*shape, dtype=dtype, pad=1), sizes, dtypes)


@attrs.frozen
class Shared:
    """Members, how they relate, and what carries over."""

    schedule: Schedule
    members: list[Member]
    carries: list[Carry]

    @property
    def layout(self) -> Layout:
        """How they are laid out."""
        return lay_out(self.members, self.schedule, self.carries)


@st.composite
def shared(draw: st.DrawFn, kinds: st.SearchStrategy[type[Inputs]] | None = None) -> Shared:
    """Random members of a few declarations, several in one phase now and then, and values that carry over."""
    schedule = draw(schedules())
    declared = draw(st.lists(declarations() if kinds is None else kinds, min_size=1, max_size=2))
    capabilities = draw(st.sampled_from([Capabilities(), Capabilities(arenas=False), Capabilities(pools_inputs=False)]))
    wide = {HIDDEN: draw(st.integers(1, 3)), PAGES: draw(st.integers(1, 9))}
    members = []
    for number in range(draw(st.sampled_from([1, 2, 3, 4, 4, 5]))):
        declaration = draw(st.sampled_from(declared)).slotgraph
        slots = sorted(declaration.slots)
        member = Member(
            name=f"member {number}",
            phase=draw(st.sampled_from([*schedule.phases, *[schedule.phases[number % len(schedule.phases)]] * 4])),
            declaration=declaration,
            capacity={BATCH: draw(st.integers(0, 9)), TOKENS: draw(st.integers(0, 99)), **wide},
            capabilities=capabilities,
            device=draw(st.sampled_from(["one", "one", "one", "other"])),
            bound=draw(st.sets(st.sampled_from(slots), max_size=1)),
            kept=draw(st.sets(st.sampled_from(slots), max_size=1)),
            shares=draw(st.sampled_from([None, None, None, True, False])),
        )
        free = sorted({*slots} - member.bound)
        chained = draw(st.dictionaries(st.sampled_from(free), st.integers(1, 3), max_size=1)) if free else {}
        members.append(attrs.evolve(member, chained=chained))
    return Shared(schedule, members, draw(_carries(schedule, members)))


@st.composite
def _carries(draw: st.DrawFn, schedule: Schedule, members: list[Member]) -> list[Carry]:
    """Some of those values that can carry over."""
    pairs = [(a, b) for a in members for b in members if a.phase != b.phase and {a.phase, b.phase} <= {*schedule.order}]
    every = [
        Carry(slot, a.name, b.name) for a, b in pairs for slot in a.declaration.slots if slot in b.declaration.slots
    ]
    carries: list[Carry] = []
    for one in draw(st.lists(st.sampled_from(every), max_size=4, unique=True)) if every else []:
        try:
            lay_out(members, schedule, [*carries, one])
        except ConfigError:
            continue
        carries.append(one)
    return carries


Name = tuple[str, str]
_WORD = 8
"""Bytes of a mark: four that tell the kind of value, four that tell which one."""


class Loop:
    """A loop that runs members in their phases over a map of bytes, and sees what each finds there.

    Written plainly, to hold layouts against: whoever writes a slot leaves its mark in all bytes of it, and looks for it
    where it must still be. `wrong` says what was lost, `looked` how often something was looked for.
    """

    def __init__(self, shared: Shared, layout: Layout, seed: int) -> None:
        self.shared = shared
        self.members = {member.name: member for member in shared.members}
        self.places = {(place.member, place.slot): place for place in layout.places}
        self.map = [np.zeros(block.nbytes, dtype=np.uint8) for block in layout.blocks]
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.wrong: list[str] = []
        self.looked = self.writes = 0
        self.active: list[str] = []
        self.marks: dict[Name, np.ndarray] = {}
        self.waiting: dict[Carry, np.ndarray] = {}
        self.joined = [carry for carry in shared.carries if all(self.members[end[0]].pooled for end in carry.ends)]
        for name in self.places:
            self._write(name)

    def run(self, events: int) -> None:
        """Begin and end phases at random, as their schedule allows."""
        schedule = self.shared.schedule
        for _ in range(events):
            able = [one for one in schedule.phases if all(one != a and self._meet(one, a) for a in self.active)]
            if able and (not self.active or self.random.random() < 0.5):
                self._begin(self.random.choice(able))
            elif self.active:
                self._end(self.random.choice(self.active))
            self._look_around()

    def _begin(self, phase: str) -> None:
        for carry in [one for one in self.waiting if self._spoils(phase, one)]:
            del self.waiting[carry]
        for carry in [one for one in self.waiting if self._phase(one.ends[1]) == phase]:
            self._look(carry.ends[1], self.waiting.pop(carry), f"what carries over from {carry}")
        self.active.append(phase)
        for name in self._of(phase):
            self._write(name)

    def _end(self, phase: str) -> None:
        self._look_around()
        self.active.remove(phase)
        for carry in self.joined:
            if self._phase(carry.ends[0]) == phase:
                self.waiting[carry] = self.marks[carry.ends[0]]

    def _spoils(self, phase: str, carry: Carry) -> bool:
        """Whether a phase may overwrite a value on its way: the writer's own, or one that never overlaps the way."""
        schedule, (first, last) = self.shared.schedule, map(self._phase, carry.ends)
        order = schedule.order[schedule.order.index(first) :] + schedule.order
        way = [first, *order[1 : order.index(last, 1) + 1]]
        return phase == first or (phase not in way and not any(self._meet(phase, one) for one in way))

    def _meet(self, one: str, other: str) -> bool:
        """Whether a phase may begin while another is in use."""
        schedule = self.shared.schedule
        pairs = [*schedule.overlaps, *[(b, a) for a, b in schedule.overlaps]]
        return one in schedule.anytime or other in schedule.anytime or (one, other) in pairs

    def _look_around(self) -> None:
        """Every slot that is in use holds what was written; those that live always hold it, too."""
        for name in self.places:
            kept = isinstance(self._slot(name).rule(), Keep) and not self._is_carried(name)
            if self._phase(name) in self.active or self._lives_always(name):
                self._look(name, self.marks[name], "its own value")
            elif kept:
                self._look(name, self.marks[name], "the kind of value that it kept", kind=True)

    def _look(self, name: Name, value: np.ndarray, what: str, *, kind: bool = False) -> None:
        place = self.places[name]
        size = min(len(value), self._used(name))
        found, want = self.map[place.block][place.offset : place.offset + size], value[:size]
        if kind:
            kinds = np.arange(size) % _WORD < _WORD // 2
            found, want = found[kinds], want[kinds]
        self.looked += 1
        if not np.array_equal(found, want):
            self.wrong.append(f"{'.'.join(name)} lost {what} while {self.active} were in use")

    def _write(self, name: Name) -> None:
        place, used = self.places[name], self._used(name)
        slot, member = self._slot(name), self.members[name[0]]
        self.writes += 1
        if is_constant(slot, name[1]):
            words = _bytes_of(member, name[1])
        else:
            word = hashlib.sha256(repr(self._kind(name)).encode()).digest()[: _WORD // 2] + self.writes.to_bytes(4)
            words = np.frombuffer(word * (used // _WORD + 1), dtype=np.uint8)[:used]
        self.marks[name] = words
        self.map[place.block][place.offset : place.offset + used] = words

    def _kind(self, name: Name) -> object:
        """What tells whether another's value may stand in a kept tail: of every other slot, its own name."""
        slot, member = self._slot(name), self.members[name[0]]
        if not isinstance(slot.rule(), Keep) or self._lives_always(name) or self._is_carried(name):
            return name
        sizes = {axis: size for axis, size in member.capacity.items() if axis.fixed}
        return (
            name[1],
            slot.rule(),
            member.dtype(name[1]),
            member.shape(name[1])[1:],
            slot.initial(),
            sorted(sizes.items()),
        )

    def _lives_always(self, name: Name) -> bool:
        """Whether nobody else may ever write a byte of it."""
        slot, member = self._slot(name), self.members[name[0]]
        if is_constant(slot, name[1]) or not member.pooled:
            return True
        asked = name[1] in member.kept or slot.placement == "host" or isinstance(slot.rule(), Once)
        return asked and not self._is_carried(name)  # which another member writes, too

    def _is_carried(self, name: Name) -> bool:
        return any(name in carry.ends for carry in self.joined)

    def _of(self, phase: str) -> list[Name]:
        names = [name for name in self.places if self._phase(name) == phase]
        self.random.shuffle(names)
        return names

    def _phase(self, name: Name) -> str:
        return self.members[name[0]].phase

    def _slot(self, name: Name) -> Slot:
        return self.members[name[0]].declaration.slots[name[1]]

    def _used(self, name: Name) -> int:
        place = self.places[name]
        return math.prod(place.shape) * place.dtype.itemsize


def _bytes_of(member: Member, name: str) -> np.ndarray:
    """A constant's values, as bytes."""
    slot, shape = member.declaration.slots[name], member.room(name).shape
    value = initial_value(name, slot, member.capacity, member.capabilities)
    whole = torch.empty(shape, dtype=member.dtype(name))
    whole.copy_(value) if isinstance(value, torch.Tensor) else whole.fill_(value)
    return whole.reshape(-1).view(torch.uint8).numpy().copy()
