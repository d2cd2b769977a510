"""Layouts: no two slots that may be needed at once share a byte, and the total is small."""

import json
import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, WIDTH, Axis, Step, constant, copied, keep, once, output, standard
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError, LayoutError
from slotgraph.dataflow.serial import from_data, to_data
from slotgraph.dataflow.sharing.layout import Layout
from slotgraph.dataflow.sharing.lifetimes import Carry, Lifetime, Member
from slotgraph.dataflow.sharing.phases import Schedule
from slotgraph.dataflow.sharing.planner import lay_out
from slotgraph.dataflow.sharing.proof import check_layout
from tests.sharing import Loop, Shared, member_of, plain_declarations, shared
from tests.strategies import HIDDEN, PAGES

VOCABULARY = Axis("VOCABULARY", fixed=True)
CYCLE = Schedule(("draft", "verify", "extend"))


@given(shared(), st.integers(0, 1 << 30))
@settings(max_examples=40)
def test_no_slot_loses_what_it_must_hold(case: Shared, seed: int) -> None:
    """Whatever phases begin and end, each slot finds what it wrote for as long as its lifetime says."""
    loop = Loop(case, case.layout, seed)
    loop.run(25)
    assert loop.wrong == []


def test_a_loop_sees_what_is_lost() -> None:
    """It finds each way in which slots that lie in one place spoil one another."""
    fields = {
        "plain": copied(TOKENS, dtype=torch.int32, pad=0),
        "kept": copied(TOKENS, dtype=torch.int32, pad=keep("why")),
        "once": copied(TOKENS, dtype=torch.int32, pad=once(3)),
        "fixed": constant(5, shape=BATCH, dtype=torch.int32),
    }
    lost = {"plain": "its own value", "kept": "the kind of value", "once": "its own value", "fixed": "its own value"}
    for slot, what in lost.items():
        members = [member_of(name, name, {slot: fields[slot]}) for name in ("draft", "verify")]
        members += [member_of("extend", "extend", {"other": fields["plain"]})]
        case = Shared(Schedule(("draft", "verify", "extend"), [("draft", "extend")]), members, [])
        layout = case.layout
        spoilt = attrs.evolve(layout, places=tuple(attrs.evolve(one, offset=0) for one in layout.places))
        loops = [Loop(case, one, 7) for one in (layout, spoilt)]
        for loop in loops:
            loop.run(30)
        assert loops[0].wrong == []
        assert any(f".{slot} lost {what}" in said for said in loops[1].wrong)


@given(shared())
@settings(max_examples=20)
def test_sharing_never_takes_more(case: Shared) -> None:
    """At least what must hold at once, at most what sharing by name takes, which is at most no sharing at all."""
    layout = case.layout
    assert layout.peak <= layout.nbytes <= layout.by_name <= layout.apart
    assert layout.saved == layout.apart - layout.nbytes


@given(shared(plain_declarations()))
def test_sharing_takes_no_more_than_engines_do_where_theirs_is_right(case: Shared) -> None:
    """Where slots of one name never meet, blocks by name are right, and no smaller."""
    alone = [attrs.evolve(member, kept=(), shares=True) for member in case.members]
    layout = lay_out(alone, case.schedule)
    named = {place.slot: [one for one in layout.places if one.slot == place.slot] for place in layout.places}
    meet = any(
        case.schedule.meet(one.phase, other.phase)
        for places in named.values()
        for one in places
        for other in places
        if one is not other
    )
    assert meet or layout.nbytes <= layout.blindly


@given(shared())
@settings(max_examples=10)
def test_layouts_are_data(case: Shared) -> None:
    """They go to JSON and back, the same each time they are made."""
    layout = case.layout
    assert from_data(json.loads(json.dumps(to_data(layout))), Layout) == layout == case.layout


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
        check_layout(broken, case.members, case.carries)
    except LayoutError:
        return
    loop = Loop(case, broken, data.draw(st.integers(0, 1 << 30)))
    loop.run(60)
    assert loop.wrong == []


def places_of(layout: Layout, slot: str) -> list[tuple[int, int]]:
    """Block and offset of a slot, in each member that has it."""
    return [(place.block, place.offset) for place in layout.places if place.slot == slot]


def two(slot: Any, other: Any = None, **changed: Any) -> list[Member]:
    """A drafting and a verifying member with one slot each."""
    made = [member_of(name, name, {"slot": one}) for name, one in (("draft", slot), ("verify", other or slot))]
    return [made[0], attrs.evolve(made[1], **changed)]


def ramp(step: Step) -> torch.Tensor:
    """Row numbers, as a constant that a function makes."""
    return torch.arange(step.padded(BATCH), dtype=torch.int32)


def steep(step: Step) -> list[int]:
    """Others, as a list."""
    return [3 * row for row in range(step.padded(BATCH))]


SMALLER = {BATCH: 2, TOKENS: 4, PAGES: 5, HIDDEN: 3, WIDTH: 2}


@pytest.mark.parametrize(
    ("slot", "other", "changed", "one"),
    [
        (constant(1, shape=BATCH, dtype=torch.int32), None, {}, True),
        (constant(1, shape=BATCH, dtype=torch.int32), None, {"capacity": SMALLER}, True),
        (constant(ramp, shape=BATCH, dtype=torch.int32), None, {"capacity": SMALLER}, True),
        (constant(ramp, shape=BATCH, dtype=torch.int32), constant(steep, shape=BATCH, dtype=torch.int32), {}, False),
        (constant(steep, shape=BATCH, dtype=torch.int32), None, {"capacity": SMALLER}, True),
        (constant(1, shape=BATCH, dtype=torch.int32), constant(2, shape=BATCH, dtype=torch.int32), {}, False),
        (constant(1, shape=BATCH, dtype=torch.int32), constant(1, shape=BATCH, dtype=torch.int64), {}, False),
        (constant(1, shape=(BATCH, 2), dtype=torch.int32), constant(1, shape=(BATCH, 3), dtype=torch.int32), {}, False),
        (constant(math.nan, shape=BATCH, dtype=torch.float32), None, {}, True),
        (constant(0.0, shape=4, dtype=torch.float32), constant(-0.0, shape=4, dtype=torch.float32), {}, False),
        (constant(1, shape=BATCH, dtype=torch.int32, placement="host"), None, {}, True),
        (constant(1, shape=BATCH, dtype=torch.int32), None, {"shares": False}, False),
        (constant(1, shape=BATCH, dtype=torch.int32), None, {"device": "other"}, False),
        (copied(TOKENS, dtype=torch.int32, pad=keep("stale ids are ids")), None, {}, True),
        (copied(TOKENS, dtype=torch.int32, pad=keep("stale ids are ids")), None, {"phase": "draft"}, False),
        (
            copied(TOKENS, dtype=torch.int32, pad=keep("stale ids are ids")),
            copied(TOKENS, dtype=torch.int32, pad=keep("another reason")),
            {},
            False,
        ),
        (
            copied(TOKENS, dtype=torch.int32, pad=keep("stale ids are ids"), limit=HIDDEN),
            None,
            {"capacity": {**SMALLER, HIDDEN: 2}},
            False,
        ),
        (copied(TOKENS, dtype=torch.int32, pad=once(1)), None, {}, False),
        (copied(TOKENS, dtype=torch.int32, pad=1, placement="host"), None, {}, False),
        (copied(TOKENS, dtype=torch.int32, pad=1), None, {}, True),
        (copied(TOKENS, dtype=torch.int32, pad=1), None, {"phase": "draft"}, False),
        (copied(TOKENS, dtype=torch.int32, pad=1), None, {"kept": {"slot"}}, False),
    ],
)
def test_same_names_share_where_it_is_safe(slot: Any, other: Any, changed: dict[str, Any], one: bool) -> None:  # noqa: FBT001
    """Values, dtypes, rows, reasons and the sizes that they hang on are all part of what must match."""
    layout = lay_out(two(slot, other, **changed), CYCLE)
    assert (len({*places_of(layout, "slot")}) == 1) is one
    assert (layout.shared_with("draft", "slot") != ()) is one


def test_ids_of_another_vocabulary_stand_in_no_kept_tail() -> None:
    """A stale id of the target's may be past the end of a draft's smaller table."""
    fields = {
        "ids": copied(TOKENS, dtype=torch.int64, pad=keep("stale ids are ids")),
        "logits": output(TOKENS, VOCABULARY, dtype=torch.float32),
    }
    members = [
        member_of(name, name, fields, capacity={BATCH: 4, TOKENS: 8, VOCABULARY: size})
        for name, size in (("draft", 50), ("verify", 70))
    ]
    assert len({*places_of(lay_out(members, CYCLE), "ids")}) == 2
    members[1] = attrs.evolve(members[1], capacity=members[0].capacity)
    assert len({*places_of(lay_out(members, CYCLE), "ids")}) == 1


def test_what_carries_over_is_one_memory_for_as_long_as_it_takes() -> None:
    """Also under another name, and where the rooms differ; in between, no other slot lies there."""
    fields = {"plain": copied(TOKENS * 40, dtype=torch.float32, pad=0)}
    hidden = copied(TOKENS, HIDDEN * 100, dtype=torch.float32, pad=0)
    members = [
        member_of("draft", "draft", {**fields, "states": hidden}),
        member_of("verify", "verify", fields),
        attrs.evolve(member_of("extend", "extend", {**fields, "hidden": hidden}), capacity=SMALLER),
    ]
    layout = lay_out(members, CYCLE, [Carry("hidden", "extend", "draft", "states")])
    ends = [layout.place("extend", "hidden"), layout.place("draft", "states")]
    assert ends[0].offset == ends[1].offset
    assert {end.lifetime.phases for end in ends} == {("draft", "extend")}
    sharing = {str(other) for other in layout.shared_with("draft", "states")}
    assert "extend.hidden" in sharing
    assert sharing.isdisjoint({"draft.plain", "extend.plain"})
    further = lay_out(members, CYCLE, [Carry("states", "draft", "extend", "hidden")])
    assert {str(other) for other in further.shared_with("draft", "states")} == {"extend.hidden"}
    assert further.place("extend", "hidden").lifetime.phases == CYCLE.phases
    assert layout.why("draft", "states")[0] == (
        "draft.states: its value carries over from extend.hidden to draft.states"
    )


def test_a_chained_slot_has_room_for_all_its_parts() -> None:
    """Its parent is laid out, and what carries over is its first part, which must be large enough for it."""
    hidden = copied(TOKENS, HIDDEN * 100, dtype=torch.float32, pad=0)
    members = [member_of(name, name, {"hidden": hidden}) for name in ("verify", "extend")]
    members[1] = attrs.evolve(members[1], chained={"hidden": 3})
    carry = Carry("hidden", "verify", "extend")
    layout = lay_out(members, CYCLE, [carry])
    assert layout.place("extend", "hidden").shape == (3, 8, 300)
    assert layout.nbytes == layout.place("extend", "hidden").nbytes >= 3 * 8 * 300 * 4
    members[1] = attrs.evolve(members[1], capacity=SMALLER)
    with pytest.raises(ConfigError, match="one of both is chained, and a part of it has fewer rows"):
        lay_out(members, CYCLE, [carry])


@given(shared())
@settings(max_examples=20)
def test_without_arenas_all_begin_where_their_allocation_does(case: Shared) -> None:
    """Peer communication may want a storage offset of 0."""
    members = [
        attrs.evolve(member, capabilities=attrs.evolve(member.capabilities, arenas=False)) for member in case.members
    ]
    layout = lay_out(members, case.schedule, case.carries)
    assert {place.offset for place in layout.places} <= {0}


def test_a_bound_slot_has_no_place() -> None:
    """Its memory is someone else's."""
    layout = lay_out(two(copied(TOKENS, dtype=torch.int32, pad=0), bound={"slot"}), CYCLE)
    with pytest.raises(ConfigError, match="no place for slot 'slot' of member 'verify': it is bound"):
        layout.place("verify", "slot")


def test_the_layout_says_why() -> None:
    """Who shares with whom and why that is safe, who does not and why not."""
    fields = {"slot": copied(TOKENS, dtype=torch.int32, pad=0), "ones": constant(1, shape=BATCH, dtype=torch.int32)}
    members = [member_of(name, name, fields) for name in ("draft", "verify", "extend", "prepare")]
    schedule = Schedule(("draft", "verify", "extend"), [("draft", "verify")], ("prepare",))
    layout = lay_out(members, schedule)
    assert layout.why("draft", "slot") == (
        "draft.slot: each step of draft writes it",
        "shares with extend.slot: draft ends before extend begins",
        "not with verify.slot: draft and verify may overlap",
        "not with prepare.slot: prepare is in use at any time",
    )
    assert layout.why("verify", "ones") == (
        "verify.ones: a constant, which no step writes",
        "shares with draft.ones, extend.ones, prepare.ones: both hold the same values, and no step writes them",
    )
    assert layout.neighbours("draft") == {"extend"}
    assert layout.neighbours("prepare") == frozenset()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"offset": 128}, "begins at byte 128: not aligned"),
        ({"offset": 1 << 20}, "ends at byte"),
        ({"offset": -256}, "ends at byte 0 of a block"),
        ({"nbytes": 0}, "has 0 bytes, too few for"),
        ({"shape": (3,)}, r"is torch\.int32 \[3\], and should be torch\.int32 \[8\]"),
        ({"dtype": torch.int64}, r"is torch\.int64"),
        ({"block": 7}, "lies in block 7, which is none for it"),
        ({"block": 1}, "lies in cpu's host memory, not in cpu's device"),
        ({"slot": "none"}, r"verify\.none has 1 places, and needs 0; verify\.slot has 0 places, and needs 1"),
        ({"lifetime": Lifetime((), always=False, why="")}, "is needed in verify, and said to be in"),
        (
            {"offset": 0},
            r"draft\.slot and verify\.slot share memory, but draft\.slot is needed in draft, and verify\.slot in",
        ),
    ],
)
def test_the_proof_names_what_is_wrong(changed: dict[str, Any], said: str) -> None:
    """Whatever a layout breaks, by a fault or because its file was changed."""
    host = copied(TOKENS, dtype=torch.int32, pad=0, placement="host")
    members = [
        member_of(name, name, {"slot": copied(TOKENS, dtype=torch.int32, pad=0), "host": host})
        for name in ("draft", "verify")
    ]
    layout = lay_out(members, Schedule(("draft", "verify"), [("draft", "verify")]))
    place = layout.place("verify", "slot")
    assert (layout.place("draft", "slot").offset, place.offset) == (0, 256)
    broken = tuple(attrs.evolve(one, **changed) if one is place else one for one in layout.places)
    with pytest.raises(LayoutError, match=said):
        check_layout(attrs.evolve(layout, places=broken), members)


def test_the_proof_wants_what_carries_over_in_one_place() -> None:
    """And where a backend pools nothing, no byte in two places."""
    members = two(copied(TOKENS, dtype=torch.int32, pad=0))
    carry = Carry("slot", "draft", "verify")
    with pytest.raises(
        LayoutError, match=r"draft\.slot and verify\.slot hold one value, and do not begin at one address"
    ):
        check_layout(lay_out([attrs.evolve(one, shares=False) for one in members], CYCLE), members, [carry])
    apart = [attrs.evolve(one, capabilities=Capabilities(pools_inputs=False)) for one in members]
    with pytest.raises(LayoutError, match="share memory, but"):
        check_layout(lay_out(members, CYCLE), apart)


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
    for slot in ("pp_hidden_states", "pp_residual", "ngram_column_starts", "ngram_req_lens"):
        assert "verify." + slot in map(str, layout.shared_with("decode", slot))
    shared = {str(other) for other in layout.shared_with("prefill", "pp_hidden_states")}
    assert {"decode.next_token_logits", "verify.next_token_logits"} <= shared
