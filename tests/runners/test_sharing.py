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

from slotgraph import BATCH, CACHE_LOC, TOKENS, computed, constant, copied, keep, output, staged
from slotgraph.dataflow.axes import WIDTH
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError, LayoutError
from slotgraph.dataflow.slots import Constant, Copied, Slot, slot
from slotgraph.dataflow.tails import Keep, Once
from slotgraph.extend import once
from slotgraph.runners.serial import to_data
from slotgraph.runners.sharing import Layout, Member, Place, Schedule, check_layout, lay_out
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


@st.composite
def shared(draw: st.DrawFn) -> tuple[list[Member], Schedule]:
    """Random members of a few declarations, several in one phase now and then, as `lay_out` takes them."""
    schedule = draw(schedules())
    declared = draw(st.lists(declarations(), min_size=1, max_size=2))
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
    return members, schedule


class Loop:
    """Runs members in their phases over a map of bytes: each write leaves a new mark, which is looked for later."""

    def __init__(self, members: list[Member], layout: Layout, seed: int) -> None:
        self.schedule = layout.schedule
        self.members = {member.name: member for member in members}
        self.places = layout.places
        self.map = [np.zeros(block.nbytes, dtype=np.uint8) for block in layout.blocks]
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.wrong: list[str] = []
        self.active: list[str] = []
        self.marks: dict[Place, np.ndarray] = {}
        for place in self.places:
            self._write(place)

    def run(self, events: int) -> None:
        """Begin and end phases at random, as their schedule allows."""
        meet = self.schedule.meet
        for _ in range(events):
            able = [one for one in self.schedule.phases if all(one != a and meet(one, a) for a in self.active)]
            if able and (not self.active or self.random.random() < 0.5):
                self._begin(self.random.choice(able))
            elif self.active:
                self.active.remove(self.random.choice(self.active))
            self._look_around()

    def _begin(self, phase: str) -> None:
        self.active.append(phase)
        mine = [place for place in self.places if place.phase == phase]
        for place in self.random.sample(mine, len(mine)):
            self._write(place)

    def _look_around(self) -> None:
        """Every slot that is in use holds what was written; a slot that lives always holds it, too."""
        for place in self.places:
            needed = place.phase in self.active or self._lives_always(place)
            if needed and not np.array_equal(self._bytes(place), self.marks[place]):
                self.wrong.append(f"{place} lost its value while {self.active} were in use")

    def _write(self, place: Place) -> None:
        used = self._bytes(place)
        used[:] = np.resize(np.frombuffer(self.random.randbytes(8), dtype=np.uint8), used.size)
        self.marks[place] = used.copy()

    def _lives_always(self, place: Place) -> bool:
        """Whether no other slot may ever write a byte of it."""
        member = self.members[place.member]
        slot = member.declaration.slots[place.slot]
        asked = place.slot in member.kept or slot.placement == "host" or isinstance(slot.rule(), Once | Keep)
        return not member.pooled or isinstance(slot, Constant) or asked

    def _bytes(self, place: Place) -> np.ndarray:
        used = math.prod(place.shape) * place.dtype.itemsize
        return self.map[place.block][place.offset : place.offset + used]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((("draft", "draft"),), "'draft' is named 2 times"),
        ((("draft",), (), ("draft",)), "'draft' is named 2 times"),
        ((("draft", " "),), "expected names, got ' '"),
        ((("a", "b"), [("a", "c")]), r"pairs of two of its phases, which are 'a', 'b', got \('a', 'c'\)"),
        ((("a", "b"), [("a", "a")]), "expected pairs of two of its phases"),
        ((("a", "b"), [("a", "b", "a")]), "expected pairs of two of its phases"),
        ((("a", "b"), ("ab",)), "expected names in a list or tuple, got 'ab'"),
        (("draft",), "expected names in a list or tuple, got 'draft'"),
    ],
)
def test_what_is_no_schedule_is_refused(parts: tuple[Any, ...], said: str) -> None:
    """A name that is unknown, empty or said twice would silently forbid or allow something else than was meant."""
    with pytest.raises(ConfigError, match=said):
        Schedule(*parts)


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
        (copied(4, **DEFAULTS), None),
        (copied(TOKENS, pad=keep("why"), **DEFAULTS), "its tail is kept"),
        (copied(TOKENS, pad=once(0), **DEFAULTS), "set once"),
        (copied(TOKENS, pad=0, placement="host", **DEFAULTS), "in host memory"),
        (copied(BATCH, pad=0, **DEFAULTS, placement="host", argument="lens_0"), "in host memory"),
        (computed(lambda step: step.live(BATCH), **DEFAULTS), None),
        (staged(TOKENS, pad=0, **DEFAULTS), None),
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
    layout = lay_out([member], Schedule(("draft", "verify")))
    assert layout.place("one", "other").why == "it is kept, because that was asked for"
    found = layout.place("one", "slot")
    assert found.always == (reason is not None)
    assert (reason or "each step of verify") in found.why


PLAIN = copied(TOKENS, dtype=torch.int32, pad=0)


def test_members_have_names_and_phases_of_the_schedule() -> None:
    """Two of one name could not be told apart, and a phase that is not there overlaps with nothing known."""
    member = member_of("one", "verify", {"slot": PLAIN})
    with pytest.raises(ConfigError, match="two members have one name, of one, one"):
        lay_out([member, member], Schedule(["verify"]))
    with pytest.raises(ConfigError, match="phase 'prefill' is not in the schedule: phases are 'draft'"):
        lay_out([attrs.evolve(member, phase="prefill")], Schedule(["draft"]))


@given(shared(), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_no_slot_loses_what_it_must_hold(case: tuple[list[Member], Schedule], seed: int) -> None:
    """Each slot finds what it wrote for as long as its lifetime says, in a layout that is small and always the same.

    Without arenas all slots begin where their allocation does: peer communication may want a storage offset of 0.
    """
    (members, schedule), layout = case, lay_out(*case)
    loop = Loop(members, layout, seed)
    loop.run(25)
    assert loop.wrong == []
    assert layout.peak <= layout.nbytes <= layout.apart == layout.saved + layout.nbytes
    assert json.dumps(to_data(layout)) == json.dumps(to_data(lay_out(*case)))
    apart = [attrs.evolve(one, capabilities=attrs.evolve(one.capabilities, arenas=False)) for one in members]
    assert {place.offset for place in lay_out(apart, schedule).places} <= {0}


@given(shared(), st.data())
@settings(max_examples=30)
def test_every_broken_promise_is_found(case: tuple[list[Member], Schedule], data: st.DataObject) -> None:
    """A layout with one slot moved passes the proof only where the loop finds nothing wrong with it either."""
    layout = lay_out(*case)
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
    loop = Loop(case[0], broken, data.draw(st.integers(0, 1 << 30)))
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
