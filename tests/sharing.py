"""What tests of shared memory share: random schedules and members, and a loop that runs them over a map of bytes."""

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs
from slotgraph.dataflow.axes import WIDTH
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.sharing import Layout, Member, Schedule, lay_out
from slotgraph.dataflow.slots import Constant
from slotgraph.dataflow.tails import Keep, Once
from tests.strategies import HIDDEN, PAGES, declaration_of, declarations

PHASES = ("prefill", "draft", "verify", "extend", "prepare")


def member_of(name: str, phase: str, fields: Mapping[str, Any], **changed: Any) -> Member:
    """A member of a declaration made from fields, of 4 requests and 8 tokens."""
    capacity = {BATCH: 4, TOKENS: 8, PAGES: 5, HIDDEN: 3, WIDTH: 2}
    declaration = declaration_of(fields).slotgraph
    given = {"name": name, "phase": phase, "declaration": declaration, "capacity": capacity}
    return Member(**{**given, "capabilities": Capabilities(), **changed})


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Phases in a random order, pairs that overlap, some at any time."""
    names = draw(st.permutations(PHASES))
    ordered = draw(st.sampled_from([1, 3, 3, 4, 5]))
    free = draw(st.sampled_from([0, 0, 0, 1]))
    pairs = list(itertools.combinations(names[:ordered], 2))
    overlaps = draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []
    return Schedule(names[:ordered], overlaps, names[ordered : ordered + free])


@attrs.frozen
class Shared:
    """Members, and how they relate."""

    schedule: Schedule
    members: list[Member]

    @property
    def layout(self) -> Layout:
        """How they are laid out."""
        return lay_out(self.members, self.schedule)


@st.composite
def shared(draw: st.DrawFn, kinds: st.SearchStrategy[type[Inputs]] | None = None) -> Shared:
    """Random members of a few declarations, several in one phase now and then."""
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
        members.append(member)
    return Shared(schedule, members)


Name = tuple[str, str]


class Loop:
    """A loop that runs members in their phases over a map of bytes, and sees what each finds there.

    Written plainly, to hold layouts against: each write to a slot leaves a new mark in all bytes of it, and looks for
    that mark wherever it must still be. `wrong` says what was lost.
    """

    def __init__(self, shared: Shared, layout: Layout, seed: int) -> None:
        self.schedule = shared.schedule
        self.members = {member.name: member for member in shared.members}
        self.places = {(place.member, place.slot): place for place in layout.places}
        self.map = [np.zeros(block.nbytes, dtype=np.uint8) for block in layout.blocks]
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.wrong: list[str] = []
        self.active: list[str] = []
        self.marks: dict[Name, np.ndarray] = {}
        for name in self.places:
            self._write(name)

    def run(self, events: int) -> None:
        """Begin and end phases at random, as their schedule allows."""
        for _ in range(events):
            able = [one for one in self.schedule.phases if all(one != a and self._meet(one, a) for a in self.active)]
            if able and (not self.active or self.random.random() < 0.5):
                self._begin(self.random.choice(able))
            elif self.active:
                self._end(self.random.choice(self.active))
            self._look_around()

    def _begin(self, phase: str) -> None:
        self.active.append(phase)
        mine = [name for name in self.places if self._phase(name) == phase]
        for name in self.random.sample(mine, len(mine)):
            self._write(name)

    def _end(self, phase: str) -> None:
        self._look_around()
        self.active.remove(phase)

    def _meet(self, one: str, other: str) -> bool:
        """Whether a phase may begin while another is in use."""
        pairs = [*self.schedule.overlaps, *[(b, a) for a, b in self.schedule.overlaps]]
        return one in self.schedule.anytime or other in self.schedule.anytime or (one, other) in pairs

    def _look_around(self) -> None:
        """Every slot that is in use holds what was written; a slot that lives always holds it, too."""
        for name in self.places:
            needed = self._phase(name) in self.active or self._lives_always(name)
            if needed and not np.array_equal(self._bytes(name), self.marks[name]):
                self.wrong.append(f"{'.'.join(name)} lost its value while {self.active} were in use")

    def _write(self, name: Name) -> None:
        used = self._used(name)
        self.marks[name] = np.frombuffer((self.random.randbytes(8) * (used // 8 + 1))[:used], dtype=np.uint8)
        self._bytes(name)[:] = self.marks[name]

    def _lives_always(self, name: Name) -> bool:
        """Whether no other slot may ever write a byte of it."""
        member = self.members[name[0]]
        slot = member.declaration.slots[name[1]]
        asked = name[1] in member.kept or slot.placement == "host" or isinstance(slot.rule(), Once | Keep)
        return not member.pooled or isinstance(slot, Constant) or asked

    def _phase(self, name: Name) -> str:
        return self.members[name[0]].phase

    def _used(self, name: Name) -> int:
        return math.prod(self.places[name].shape) * self.places[name].dtype.itemsize

    def _bytes(self, name: Name) -> np.ndarray:
        place = self.places[name]
        return self.map[place.block][place.offset : place.offset + self._used(name)]
