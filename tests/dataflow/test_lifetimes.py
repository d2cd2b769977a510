"""Schedules, lifetimes and carries: what may be in use at once, and how long each slot's bytes must hold."""

import itertools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given

from slotgraph import BATCH, CACHE_LOC, TOKENS, Step, computed, constant, copied, keep, output, staged
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.sharing import Carry, Member, Schedule, lay_out
from slotgraph.dataflow.slots import Constant, Copied, Slot, slot
from slotgraph.extend import host_parameter, once
from tests.sharing import member_of, schedules
from tests.strategies import HIDDEN

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


@given(schedules())
def test_sets_of_phases_at_once_are_the_largest(schedule: Schedule) -> None:
    """They are all the sets whose phases meet one another, of which none is a part of another."""
    every = [
        {*some}
        for count in range(len(schedule.phases) + 1)
        for some in itertools.combinations(schedule.phases, count)
        if all(schedule.meet(a, b) for a, b in itertools.combinations(some, 2))
    ]
    largest = [some for some in every if not any(some < other for other in every)]
    found = [{*some} for some in schedule.at_once]
    assert sorted(map(sorted, found)) == sorted(map(sorted, largest))


def test_a_span_goes_round() -> None:
    """From a phase to one that comes before it in the order lies the end of the round."""
    assert CYCLE.span("draft", "extend") == ("draft", "verify", "extend")
    assert CYCLE.span("extend", "draft") == ("extend", "draft")
    assert CYCLE.span("verify", "draft") == ("verify", "extend", "draft")
    assert CYCLE.span("verify", "verify") == ("verify",)


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
    assert found.phases == (("verify",) if reason is None else CYCLE.phases)
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


HIDDEN_STATES = copied(TOKENS, HIDDEN, dtype=torch.float32, pad=0)
PHASES = ("draft", "verify", "extend")


def cycle() -> list[Member]:
    """One member a phase, each with hidden states."""
    return [member_of(name, name, {"hidden": HIDDEN_STATES}) for name in PHASES]


OTHERS: dict[str, Any] = {
    "half": copied(TOKENS, HIDDEN, dtype=torch.float16, pad=0),
    "wide": copied(TOKENS, HIDDEN * 2, dtype=torch.float32, pad=0),
    "host": copied(TOKENS, HIDDEN, dtype=torch.float32, pad=0, placement="host"),
    "fixed": constant(1.0, shape=(TOKENS, HIDDEN), dtype=torch.float32),
    "hidden": HIDDEN_STATES,
}


@pytest.mark.parametrize(
    ("carry", "said"),
    [
        (Carry("hidden", "verify", "none"), "there is no member 'none': members are 'draft', 'verify', 'extend'"),
        (Carry("none", "verify", "extend"), "member 'verify' has no slot 'none'; member 'extend' has no slot 'none'"),
        (Carry("hidden", "verify", "extend", "states"), "member 'extend' has no slot 'states'"),
        (Carry("hidden", "verify", "extend", "bound"), r"the memory of extend\.bound was handed in"),
        (Carry("hidden", "verify", "verify"), "both are in phase 'verify'"),
        (
            Carry("hidden", "verify", "extend", "half"),
            r"verify.hidden is float32 \[8, 3\] and extend.half is float16 \[8, 3\]",
        ),
        (
            Carry("hidden", "verify", "extend", "wide"),
            r"verify.hidden is float32 \[8, 3\] and extend.wide is float32 \[8, 6\]: make all but dim 0 alike",
        ),
        (Carry("hidden", "verify", "extend", "host"), "they lie in cpu's device memory and cpu's host memory"),
        (Carry("hidden", "verify", "extend", "fixed"), "extend.fixed is constant, and so never what a step leaves"),
        (Carry("fixed", "verify", "extend", "hidden"), "verify.fixed is constant, and so never what a step leaves"),
    ],
)
def test_what_cannot_carry_over_is_refused(carry: Carry, said: str) -> None:
    """Each names the slots, and how they differ."""
    fields = {**OTHERS, "bound": HIDDEN_STATES}
    members = [member_of(name, name, fields, bound={"bound"}) for name in PHASES]
    with pytest.raises(ConfigError, match=said):
        lay_out(members, CYCLE, [carry])


@pytest.mark.parametrize("schedule", [Schedule(PHASES, [("extend", "verify")]), Schedule(PHASES[1:], (), ("draft",))])
def test_a_value_that_the_next_one_may_overtake_is_refused(schedule: Schedule) -> None:
    """Where writer and reader may be in use at once, the next value is written while this one is read."""
    carry = Carry("hidden", "verify", "extend" if schedule.overlaps else "draft")
    with pytest.raises(ConfigError, match="may be in use at once, so that the next value would be written"):
        lay_out(cycle(), schedule, [carry])


@pytest.mark.parametrize(
    ("carries", "schedule"),
    [
        ([Carry("hidden", "draft", "extend"), Carry("hidden", "verify", "extend")], CYCLE),
        ([Carry("hidden", "draft", "verify"), Carry("hidden", "draft", "extend")], CYCLE),
        (
            [Carry("hidden", "draft", "verify"), Carry("hidden", "verify", "extend")],
            Schedule(PHASES, [("draft", "extend")]),
        ),
    ],
)
def test_a_value_that_another_would_spoil_is_refused(carries: list[Carry], schedule: Schedule) -> None:
    """Slots that carries make one memory must not be in use while one of the values waits in it."""
    with pytest.raises(ConfigError, match="which other carries make the same memory, is in use"):
        lay_out(cycle(), schedule, carries)


def test_a_value_may_go_through_all_phases() -> None:
    """From each phase to the next: one memory, which is never free."""
    carries = [Carry("hidden", a, b) for a, b in (("draft", "verify"), ("verify", "extend"), ("extend", "draft"))]
    layout = lay_out(cycle(), CYCLE, carries)
    assert {(place.offset, place.phases) for place in layout.places} == {(0, PHASES)}


def test_carries_with_a_member_that_does_not_share_are_copied() -> None:
    """Each has its own memory; the batch brings the value, as it would without a pool."""
    members = cycle()
    members[2] = attrs.evolve(members[2], shares=False)
    layout = lay_out(members, CYCLE, [Carry("hidden", "verify", "extend")])
    assert layout.shared_with("extend", "hidden") == ()
