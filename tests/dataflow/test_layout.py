"""Layouts: no two slots that may be needed at once share a byte, and the total is small."""

import json
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, constant, copied, keep, standard
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError, LayoutError
from slotgraph.dataflow.serial import to_data
from slotgraph.dataflow.sharing import Carry, Member, Schedule, check_layout, lay_out
from slotgraph.extend import once
from slotgraph.speculative import WIDTH
from tests.sharing import Loop, Shared, member_of, shared
from tests.strategies import HIDDEN

CYCLE = Schedule(("draft", "verify", "extend"))
PLAIN = copied(TOKENS, dtype=torch.int32, pad=0)


@given(shared(), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_no_slot_loses_what_it_must_hold(case: Shared, seed: int) -> None:
    """Whatever phases begin and end, each slot finds what it wrote for as long as its lifetime says."""
    loop = Loop(case, case.layout, seed)
    loop.run(25)
    assert loop.wrong == []


@pytest.mark.parametrize(
    "slot",
    [
        PLAIN,
        copied(TOKENS, dtype=torch.int32, pad=keep("why")),
        copied(TOKENS, dtype=torch.int32, pad=once(3)),
        constant(5, shape=BATCH, dtype=torch.int32),
    ],
)
def test_a_loop_sees_what_is_lost(slot: Any) -> None:
    """It finds nothing in a layout, and finds slots that spoil one another where all lie in one place."""
    members = [member_of(name, name, {"slot": slot}) for name in ("draft", "verify")]
    members += [member_of("extend", "extend", {"other": PLAIN})]
    case = Shared(Schedule(CYCLE.order, [("draft", "extend")]), members, [])
    layout = case.layout
    spoilt = attrs.evolve(layout, places=tuple(attrs.evolve(one, offset=0) for one in layout.places))
    loops = [Loop(case, one, 7) for one in (layout, spoilt)]
    for loop in loops:
        loop.run(30)
    assert loops[0].wrong == []
    assert any(".slot lost its own value" in said for said in loops[1].wrong)


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
    assert {place.offset for place in lay_out(members, case.schedule, case.carries).places} <= {0}


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
        ({"allocation": 0}, "hold one value, and do not begin at one address"),
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


def test_what_carries_over_is_one_memory_for_as_long_as_it_takes() -> None:
    """Also under another name, and where one has fewer rows; in between, no other slot lies there."""
    fields = {"plain": copied(TOKENS * 40, dtype=torch.float32, pad=0)}
    hidden = copied(TOKENS, HIDDEN * 100, dtype=torch.float32, pad=0)
    members = [
        member_of("draft", "draft", {**fields, "states": hidden}),
        member_of("verify", "verify", fields),
        member_of("extend", "extend", {**fields, "hidden": hidden}, capacity={BATCH: 2, TOKENS: 4, HIDDEN: 3}),
    ]
    layout = lay_out(members, CYCLE, [Carry("hidden", "extend", "draft", "states")])
    ends = [layout.place("extend", "hidden"), layout.place("draft", "states")]
    assert {(end.offset, end.phases) for end in ends} == {(ends[0].offset, ("draft", "extend"))}
    others = {str(other) for other in layout.shared_with("draft", "states")}
    assert "extend.hidden" in others
    assert others.isdisjoint({"draft.plain", "extend.plain"})
    told = "its value carries over from extend.hidden to draft.states"
    assert layout.why("draft", "states").startswith(f"{told}; shares with ")
    further = lay_out(members, CYCLE, [Carry("states", "draft", "extend", "hidden")])
    assert {str(other) for other in further.shared_with("draft", "states")} == {"extend.hidden"}
    assert further.place("extend", "hidden").phases == CYCLE.phases


def test_a_chained_slot_has_room_for_all_its_parts() -> None:
    """Its parent is laid out, and what carries over is its first part, which must be large enough for it."""
    hidden = copied(TOKENS, HIDDEN * 100, dtype=torch.float32, pad=0)
    members = [member_of(name, name, {"hidden": hidden}) for name in ("verify", "extend")]
    members[1] = attrs.evolve(members[1], chained={"hidden": 3})
    carry = Carry("hidden", "verify", "extend")
    layout = lay_out(members, CYCLE, [carry])
    assert layout.place("extend", "hidden").shape == (3, 8, 300)
    assert layout.nbytes == layout.place("extend", "hidden").nbytes >= 3 * 8 * 300 * 4
    members[1] = attrs.evolve(members[1], capacity={TOKENS: 4, HIDDEN: 3})
    with pytest.raises(ConfigError, match="one of both is chained, and a part of it has fewer rows"):
        lay_out(members, CYCLE, [carry])


def test_a_bound_slot_has_no_place() -> None:
    """Its memory is someone else's."""
    layout = lay_out(two(PLAIN, bound={"slot"}), CYCLE)
    with pytest.raises(ConfigError, match="no place for slot 'slot' of member 'verify': it is bound"):
        layout.place("verify", "slot")


def test_the_layout_says_why() -> None:
    """How long a slot's bytes must hold, and who shares them."""
    fields = {"slot": PLAIN, "ones": constant(1, shape=BATCH, dtype=torch.int32)}
    members = [member_of(name, name, fields) for name in ("draft", "verify", "extend", "prepare")]
    layout = lay_out(members, Schedule(CYCLE.order, [("draft", "verify")], ("prepare",)))
    assert layout.why("draft", "slot") == "each step of draft writes it; shares with extend.slot"
    assert layout.why("verify", "ones") == "a constant, which no step writes; shares with none"


class Nested(standard.DecodeInputs, standard.PipelineProxies, standard.NgramEmbedding):
    """Slots whose sources are nested objects and side arguments."""


class NestedPrefill(standard.PrefillInputs, standard.PrefillPipelineProxies, standard.NgramEmbedding):
    """The same, for a prefill, where tails are zero."""


def test_nested_sources_share_like_the_rest() -> None:
    """Where a value comes from has no part in where it lies."""
    sizes = {BATCH: 8, TOKENS: 16, standard.HIDDEN: 64, standard.VOCAB: 100, standard.FILL: 1, WIDTH: 2}
    members = [
        Member(name=name, phase=name, declaration=kind.slotgraph, capacity=sizes, capabilities=Capabilities())
        for name, kind in (("prefill", NestedPrefill), ("decode", Nested), ("verify", Nested))
    ]
    layout = lay_out(members, Schedule(("prefill", "decode", "verify")))
    shared = {str(other) for other in layout.shared_with("prefill", "pp_hidden_states")}
    assert {"decode.next_token_logits", "verify.next_token_logits"} <= shared
