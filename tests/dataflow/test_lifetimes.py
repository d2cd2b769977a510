"""Schedules and lifetimes: what may be in use at once, and how long each slot's bytes must hold."""

import itertools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given

from slotgraph import BATCH, CACHE_LOC, TOKENS, Step, computed, constant, copied, keep, output, staged
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.sharing import Schedule, lay_out
from slotgraph.dataflow.slots import Constant, Copied, Slot, slot
from slotgraph.extend import host_parameter, once
from tests.sharing import member_of, schedules

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
