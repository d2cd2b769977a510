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
from slotgraph.runners.engine.sharing import Layout, PooledSlot, Schedule, check_layout, lay_out, pooled_slots
from slotgraph.runners.serial import to_data
from tests.strategies import HIDDEN, PAGES, declaration_of, declarations

PHASES = ("prefill", "draft", "verify", "extend", "prepare")


def slots_of(name: str, fields: Mapping[str, Any], **options: Any) -> list[PooledSlot]:
    """The slots of a runner with a declaration made from fields, in the phase of its name, of 4 requests, 8 tokens."""
    capacity = {BATCH: 4, TOKENS: 8, PAGES: 5, HIDDEN: 3, WIDTH: 2}
    return pooled_slots(declaration_of(fields).slotgraph, capacity, Capabilities(), name, name, **options)


@attrs.frozen
class Case:
    """What `lay_out` takes, and slots of which no other may ever write a byte, such as "member 1.ids"."""

    slots: list[PooledSlot]
    schedule: Schedule
    lasting: set[str]

    def layout(self) -> Layout:
        """Lay the slots out."""
        return lay_out(self.slots, self.schedule)


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
def shared(draw: st.DrawFn) -> Case:
    """Random members of a few declarations, several in one phase now and then."""
    schedule = draw(schedules())
    declared = draw(st.lists(declarations(), min_size=1, max_size=2))
    capabilities = draw(st.sampled_from([Capabilities(), Capabilities(), Capabilities(arenas=False)]))
    wide = {HIDDEN: draw(st.integers(1, 3)), PAGES: draw(st.integers(1, 9))}
    found, lasting = list[PooledSlot](), set[str]()
    for number in range(draw(st.sampled_from([1, 2, 3, 4, 4, 5]))):
        declaration = draw(st.sampled_from(declared)).slotgraph
        slots = declaration.slots
        kept = draw(st.sets(st.sampled_from(sorted(slots)), max_size=1))
        found += pooled_slots(
            declaration,
            {BATCH: draw(st.integers(0, 9)), TOKENS: draw(st.integers(0, 99)), **wide},
            capabilities,
            f"member {number}",
            draw(st.sampled_from([*schedule.phases, *[schedule.phases[number % len(schedule.phases)]] * 4])),
            draw(st.sampled_from(["one", "one", "one", "other"])),
            bound=draw(st.sets(st.sampled_from(sorted(slots)), max_size=1)),
            kept=kept,
        )
        for name, one in slots.items():
            if (
                name in kept
                or one.placement == "host"
                or isinstance(one, Constant)
                or isinstance(one.rule(), Once | Keep)
            ):
                lasting.add(f"member {number}.{name}")
    return Case(found, schedule, lasting)


class Loop:
    """Runs members in their phases over a map of bytes: each write leaves a new mark, which is looked for later."""

    def __init__(self, layout: Layout, lasting: set[str], seed: int) -> None:
        self.schedule = layout.schedule
        self.lasting = lasting
        self.places = layout.places
        self.map = [np.zeros(block.nbytes, dtype=np.uint8) for block in layout.blocks]
        self.random = random.Random(seed)
        self.wrong: list[str] = []
        self.active: list[str] = []
        self.marks: dict[PooledSlot, np.ndarray] = {}
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
            needed = place.phase in self.active or str(place) in self.lasting
            if needed and not np.array_equal(self._bytes(place), self.marks[place]):
                self.wrong.append(f"{place} lost its value while {self.active} were in use")

    def _write(self, place: PooledSlot) -> None:
        used = self._bytes(place)
        used[:] = np.resize(np.frombuffer(self.random.randbytes(8), dtype=np.uint8), used.size)
        self.marks[place] = used.copy()

    def _bytes(self, place: PooledSlot) -> np.ndarray:
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
    slots = slots_of("verify", {"slot": field, "other": copied(TOKENS, pad=0, **DEFAULTS)}, kept={"other"})
    layout = lay_out(slots, Schedule(("draft", "verify")))
    assert layout.place("verify", "other").why == "it is kept, because that was asked for"
    found = layout.place("verify", "slot")
    assert found.always == (reason is not None)
    assert (reason or "each step of verify") in found.why


PLAIN = copied(TOKENS, dtype=torch.int32, pad=0)


@given(shared(), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_no_slot_loses_what_it_must_hold(case: Case, seed: int) -> None:
    """Each slot finds what it wrote for as long as its lifetime says, in a layout that is small and always the same.

    Without arenas all slots begin where their allocation does: peer communication may want a storage offset of 0.
    """
    layout = case.layout()
    loop = Loop(layout, case.lasting, seed)
    loop.run(25)
    assert loop.wrong == []
    assert layout.peak <= layout.nbytes <= layout.apart == layout.saved + layout.nbytes
    assert json.dumps(to_data(layout)) == json.dumps(to_data(case.layout()))
    apart = [attrs.evolve(one, arenas=False) for one in case.slots]
    assert {place.offset for place in lay_out(apart, case.schedule).places} <= {0}


@given(shared(), st.data())
@settings(max_examples=30)
def test_every_broken_promise_is_found(case: Case, data: st.DataObject) -> None:
    """A layout with one slot moved passes the proof only where the loop finds nothing wrong with it either."""
    layout = case.layout()
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
    loop = Loop(broken, case.lasting, data.draw(st.integers(0, 1 << 30)))
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
    slots = [one for name in ("draft", "verify") for one in slots_of(name, {"slot": PLAIN, "host": host})]
    layout = lay_out(slots, Schedule(("draft", "verify"), [("draft", "verify")]))
    place = layout.place("verify", "slot")
    assert (layout.place("draft", "slot").offset, place.offset) == (0, 256)
    broken = tuple(attrs.evolve(one, **changed) if one is place else one for one in layout.places)
    with pytest.raises(LayoutError, match=said):
        check_layout(attrs.evolve(layout, places=broken))
