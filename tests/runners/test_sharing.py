"""Sharing: how long each slot's bytes must hold, and that no two slots that may be needed at once share a byte."""

import itertools
import json
import math
import random
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, CACHE_LOC, TOKENS, Inputs, computed, constant, copied, keep, output, staged
from slotgraph.dataflow.axes import WIDTH
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError, LayoutError
from slotgraph.dataflow.slots import Constant, Copied, Slot, slot
from slotgraph.dataflow.tails import Keep, Once
from slotgraph.extend import once
from slotgraph.runners.serial import to_data
from slotgraph.runners.sharing import Layout, Member, Schedule, check_layout, lay_out
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
                self.active.remove(self.random.choice(self.active))
            self._look_around()

    def _begin(self, phase: str) -> None:
        self.active.append(phase)
        mine = [name for name in self.places if self._phase(name) == phase]
        for name in self.random.sample(mine, len(mine)):
            self._write(name)

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
        used = self._bytes(name)
        used[:] = np.resize(np.frombuffer(self.random.randbytes(8), dtype=np.uint8), used.size)
        self.marks[name] = used.copy()

    def _lives_always(self, name: Name) -> bool:
        """Whether no other slot may ever write a byte of it."""
        member = self.members[name[0]]
        slot = member.declaration.slots[name[1]]
        asked = name[1] in member.kept or slot.placement == "host" or isinstance(slot.rule(), Once | Keep)
        return not member.pooled or isinstance(slot, Constant) or asked

    def _phase(self, name: Name) -> str:
        return self.members[name[0]].phase

    def _bytes(self, name: Name) -> np.ndarray:
        place = self.places[name]
        used = math.prod(place.shape) * place.dtype.itemsize
        return self.map[place.block][place.offset : place.offset + used]


CYCLE = Schedule(("draft", "verify", "extend"))


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"order": ("draft", "draft")}, "'draft' is named 2 times"),
        ({"order": ("draft",), "anytime": ("draft",)}, "'draft' is named 2 times"),
        ({"order": ("draft", " ")}, "expected names, got ' '"),
        (
            {"order": ("a", "b"), "overlaps": [("a", "c")]},
            r"pairs of two of its phases, which are 'a', 'b', got \('a', 'c'\)",
        ),
        ({"order": ("a", "b"), "overlaps": [("a", "a")]}, "expected pairs of two of its phases"),
        ({"order": ("a", "b"), "overlaps": [("a", "b", "a")]}, "expected pairs of two of its phases"),
        ({"order": ("a", "b"), "overlaps": ("ab",)}, "expected names in a list or tuple, got 'ab'"),
        ({"order": "draft"}, "expected names in a list or tuple, got 'draft'"),
    ],
)
def test_what_is_no_schedule_is_refused(given_: dict[str, Any], said: str) -> None:
    """A name that is unknown, empty or said twice would silently forbid or allow something else than was meant."""
    with pytest.raises(ConfigError, match=said):
        Schedule(**given_)


def test_phases_meet_as_declared() -> None:
    """A phase meets itself, what it is said to overlap, both ways, and what keeps to no order; nothing else."""
    schedule = Schedule(("a", "b", "c"), [("c", "a")], ("free",))
    met = {(x, y) for x, y in itertools.product(schedule.phases, repeat=2) if schedule.meet(x, y)}
    free = {(x, "free") for x in schedule.phases} | {("free", x) for x in schedule.phases}
    assert met == {("a", "a"), ("b", "b"), ("c", "c"), ("a", "c"), ("c", "a")} | free
    assert str(schedule) == "a -> b -> c; c and a may overlap; free at any time"


@attrs.frozen(kw_only=True)
class Unknown(Slot):
    """A kind of slot that no layout knows: nothing says who writes it."""

    def initial(self) -> int:
        return 1


@attrs.frozen(kw_only=True)
class Bare(Copied):
    """A copied slot that says nothing of its tail."""

    def rule(self) -> None:
        return None


DEFAULTS: dict[str, Any] = {"dtype": torch.int64}


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        (copied(TOKENS, pad=0, **DEFAULTS), None),
        (copied(TOKENS, dtype=CACHE_LOC, pad=0, starts=1), None),
        (copied(TOKENS, pad=0, rewritten=True, **DEFAULTS), None),
        (copied(TOKENS, pad=0, restored=True, **DEFAULTS), None),
        (copied(TOKENS, pad=0, default=None, **DEFAULTS), None),
        (copied(4, **DEFAULTS), None),
        (copied(TOKENS, pad=keep("why"), **DEFAULTS), "its tail is kept"),
        (copied(TOKENS, pad=once(0), **DEFAULTS), "set once"),
        (copied(TOKENS, pad=0, placement="host", **DEFAULTS), "in host memory"),
        (copied(BATCH, pad=0, **DEFAULTS, placement="host", argument="lens_0"), "in host memory"),
        (computed(lambda step: step.live(BATCH), **DEFAULTS), None),
        (computed(lambda step: step.live(BATCH), placement="host", **DEFAULTS), "in host memory"),
        (staged(TOKENS, pad=0, **DEFAULTS), None),
        (staged(TOKENS, pad=keep("why"), **DEFAULTS), "its tail is kept"),
        (output(TOKENS, **DEFAULTS), None),
        (constant(7, shape=BATCH, **DEFAULTS), "a constant"),
        (slot(Constant(value=7, shape=BATCH, rewritten=True, **DEFAULTS)), "no fill writes all of it"),
        (slot(Unknown(shape=BATCH, **DEFAULTS)), "no fill writes all of it"),
        (slot(Bare(shape=BATCH, pad=0, **DEFAULTS)), "no fill writes all of it"),
    ],
)
def test_lifetimes_follow_from_what_slots_say(field: Any, reason: str | None) -> None:
    """Bytes hold for the runner's phase where each step writes them, and always where anything else relies on them."""
    member = member_of("one", "verify", {"slot": field, "other": copied(TOKENS, pad=0, **DEFAULTS)}, kept={"other"})
    layout = lay_out([member], CYCLE)
    assert layout.place("one", "other").why == "it is kept, because that was asked for"
    found = layout.place("one", "slot")
    assert found.always == (reason is not None)
    assert (reason or "each step of verify") in found.why


@pytest.mark.parametrize(("pools", "told", "always"), [(False, None, True), (False, True, False), (True, False, True)])
def test_a_backend_that_pools_nothing_shares_when_told(pools: bool, told: bool | None, always: bool) -> None:  # noqa: FBT001
    """Without sharing, all bytes hold always; a member can be told otherwise, both ways."""
    made = member_of("one", "verify", {"slot": copied(TOKENS, pad=0, **DEFAULTS)})
    member = attrs.evolve(made, capabilities=Capabilities(pools_inputs=pools), shares=told)
    assert lay_out([member], CYCLE).place("one", "slot").always is always


def test_members_have_names_and_phases_of_the_schedule() -> None:
    """Two of one name could not be told apart, and a phase that is not there overlaps with nothing known."""
    member = member_of("one", "verify", {"slot": copied(TOKENS, pad=0, **DEFAULTS)})
    with pytest.raises(ConfigError, match="two members have one name, of one, one"):
        lay_out([member, member], CYCLE)
    with pytest.raises(ConfigError, match="phase 'prefill' is not in the schedule: phases are 'draft'"):
        lay_out([attrs.evolve(member, phase="prefill")], CYCLE)


PLAIN = copied(TOKENS, dtype=torch.int32, pad=0)


@given(shared(), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_no_slot_loses_what_it_must_hold(case: Shared, seed: int) -> None:
    """Whatever phases begin and end, each slot finds what it wrote for as long as its lifetime says."""
    loop = Loop(case, case.layout, seed)
    loop.run(25)
    assert loop.wrong == []


@given(shared())
@settings(max_examples=20)
def test_layouts_are_small_and_data(case: Shared) -> None:
    """At least what must hold at once, at most what slots take apart, and the same when made again."""
    layout = case.layout
    assert layout.peak <= layout.nbytes <= layout.apart == layout.saved + layout.nbytes
    assert json.dumps(to_data(layout)) == json.dumps(to_data(case.layout))


@given(shared())
@settings(max_examples=20)
def test_without_arenas_all_begin_where_their_allocation_does(case: Shared) -> None:
    """Peer communication may want a storage offset of 0."""
    members = [attrs.evolve(one, capabilities=attrs.evolve(one.capabilities, arenas=False)) for one in case.members]
    assert {place.offset for place in lay_out(members, case.schedule).places} <= {0}


@given(shared(), st.data())
@settings(max_examples=30)
def test_every_broken_promise_is_found(case: Shared, data: st.DataObject) -> None:
    """A layout with one slot moved passes the proof only where the loop finds nothing wrong with it either."""
    layout = case.layout
    index = data.draw(st.integers(0, len(layout.places) - 1))
    place = layout.places[index]
    other = data.draw(st.sampled_from([one for one in layout.places if one.block == place.block]))
    offset = max(other.offset + data.draw(st.sampled_from([-256, -128, 0, 0, 128, 256])), 0)
    moved = attrs.evolve(place, offset=offset)
    broken = attrs.evolve(layout, places=(*layout.places[:index], moved, *layout.places[index + 1 :]))
    try:
        check_layout(broken)
    except LayoutError:
        return
    loop = Loop(case, broken, data.draw(st.integers(0, 1 << 30)))
    loop.run(60)
    assert loop.wrong == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offset": 128}, "verify.slot must not begin at byte 128 of cpu's device memory"),
        ({"offset": 1 << 20}, "ends at byte"),
        ({"offset": -256}, "ends at byte 0 of a block"),
        ({"block": 1}, "verify.slot must not begin at byte 256 of cpu's host memory"),
        ({"offset": 0}, r"share memory, but draft\.slot is needed in draft, and verify\.slot in verify"),
    ],
)
def test_the_proof_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    """Whatever a layout breaks."""
    host = copied(TOKENS, dtype=torch.int32, pad=0, placement="host")
    members = [member_of(name, name, {"slot": PLAIN, "host": host}) for name in ("draft", "verify")]
    layout = lay_out(members, Schedule(("draft", "verify"), [("draft", "verify")]))
    place = layout.place("verify", "slot")
    assert (layout.place("draft", "slot").offset, place.offset) == (0, 256)
    broken = tuple(attrs.evolve(one, **changed) if one is place else one for one in layout.places)
    with pytest.raises(LayoutError, match=said):
        check_layout(attrs.evolve(layout, places=broken))


def test_the_layout_says_why() -> None:
    """How long a slot's bytes must hold, and who shares them."""
    fields = {"slot": PLAIN, "ones": constant(1, shape=BATCH, dtype=torch.int32)}
    members = [member_of(name, name, fields) for name in ("draft", "verify", "extend", "prepare")]
    layout = lay_out(members, Schedule(CYCLE.order, [("draft", "verify")], ("prepare",)))
    assert layout.why("draft", "slot") == "each step of draft writes it; shares with extend.slot"
    assert layout.why("verify", "ones") == "a constant, which no step writes; shares with none"
