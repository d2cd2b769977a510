"""Sharing: how long each slot's bytes must hold, and that no two slots that may be needed at once share a byte."""

import itertools
import json
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, CACHE_LOC, TOKENS, Step, computed, constant, copied, keep, output, staged
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError, LayoutError
from slotgraph.dataflow.serial import to_data
from slotgraph.dataflow.sharing import Member, Schedule, check_layout, lay_out
from slotgraph.dataflow.slots import Constant, Copied, Slot, slot
from slotgraph.extend import host_parameter, once
from tests.sharing import Loop, Shared, member_of, shared

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


def count(step: Step) -> int:
    """Live requests."""
    return step.live(BATCH)


@attrs.frozen(kw_only=True)
class Unknown(Slot):
    """A kind of slot that no layout knows: nothing says who writes it."""

    def initial(self) -> int:
        """One."""
        return 1


@attrs.frozen(kw_only=True)
class Bare(Copied):
    """A copied slot that says nothing of its tail."""

    def rule(self) -> None:
        """None."""


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
        (host_parameter(BATCH, pad=0, **DEFAULTS), "in host memory"),
        (computed(count, **DEFAULTS), None),
        (computed(count, placement="host", **DEFAULTS), "in host memory"),
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


def two(slot: Any, **changed: Any) -> list[Member]:
    """A drafting and a verifying member with one slot each."""
    made = [member_of(name, name, {"slot": slot}) for name in ("draft", "verify")]
    return [made[0], attrs.evolve(made[1], **changed)]


@pytest.mark.parametrize(
    ("slot", "changed", "one"),
    [
        (PLAIN, {}, True),
        (PLAIN, {"phase": "draft"}, False),
        (PLAIN, {"kept": {"slot"}}, False),
        (PLAIN, {"shares": False}, False),
        (PLAIN, {"device": "other"}, False),
        (constant(1, shape=BATCH, dtype=torch.int32), {}, False),
        (copied(TOKENS, dtype=torch.int32, pad=keep("why")), {}, False),
        (copied(TOKENS, dtype=torch.int32, pad=once(1)), {}, False),
        (copied(TOKENS, dtype=torch.int32, pad=1, placement="host"), {}, False),
    ],
)
def test_slots_share_where_it_is_safe(slot: Any, changed: dict[str, Any], one: bool) -> None:  # noqa: FBT001 - a parameter
    """Where each step writes all of a slot, in phases that never meet, on one device."""
    layout = lay_out(two(slot, **changed), CYCLE)
    assert (len({(place.block, place.offset) for place in layout.places}) == 1) is one
    assert (layout.shared_with("draft", "slot") != ()) is one


def test_the_layout_says_why() -> None:
    """How long a slot's bytes must hold, and who shares them."""
    fields = {"slot": PLAIN, "ones": constant(1, shape=BATCH, dtype=torch.int32)}
    members = [member_of(name, name, fields) for name in ("draft", "verify", "extend", "prepare")]
    layout = lay_out(members, Schedule(CYCLE.order, [("draft", "verify")], ("prepare",)))
    assert layout.why("draft", "slot") == "each step of draft writes it; shares with extend.slot"
    assert layout.why("verify", "ones") == "a constant, which no step writes; shares with none"
