"""Plans go to JSON and come back equal, and what is no plan is refused with its place."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph.dataflow.capabilities import LADDER, Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.plan import ComputeStep, CopyGroup, FillPlan, Pattern, TailReset, plan_fill
from slotgraph.dataflow.transition import Advance
from slotgraph.runners.explained.declared import Explanation, explain_declaration
from slotgraph.runners.serial import from_data, to_data
from tests.strategies import AXES, CAPABILITIES, HIDDEN, declarations

Change = Callable[[dict[str, Any]], object]

PLAN = FillPlan(
    declaration="Decode",
    sizes=(("BATCH", 8), ("TOKENS", 16)),
    absent=("mrope_positions",),
    tails=(TailReset("seq_lens", 1, always=False), TailReset("scales", -math.inf, always=True)),
    copies=(
        CopyGroup(("input_ids", "positions"), torch.int64, torch.int64, "device", "foreach"),
        CopyGroup(("hidden",), torch.bfloat16, torch.float32, "host", "single", "large"),
    ),
    computed=(ComputeStep("count", "live_tokens", ("step",), "host"),),
    nbytes=4096,
)
FUSED = attrs.evolve(
    PLAN,
    tails=(TailReset("seq_lens", 1, always=False, fused=True), TailReset("embeds", 0, always=True)),
    copies=(
        CopyGroup(("input_ids", "seq_lens"), torch.int64, torch.int64, "device", "fused"),
        CopyGroup(("positions",), torch.int64, torch.int64, "device", "in place"),
    ),
    computed=(ComputeStep("count", "live_tokens", ("step",), "host", packed=True),),
    lowering="in_graph",
    advances=(
        Advance("seen", "largest", ("seen", "seq_lens")),
        Advance("seq_lens", "next", ("seq_lens",), "seq_lens", -1),
    ),
)


def through_json(made: Any, kind: type[Any] = FillPlan) -> Any:
    """The same, written and read again."""
    return from_data(json.loads(json.dumps(to_data(made), allow_nan=False)), kind)


@given(st.data())
def test_plans_are_read_back_as_they_were_written(data: st.DataObject) -> None:
    """Whatever is declared, its plan and its explanation come back from JSON as they were."""
    declaration = data.draw(declarations()).slotgraph
    sizes = {axis: data.draw(st.integers(0, 9)) for axis in AXES} | {HIDDEN: 4}
    optional = sorted(name for name, slot in declaration.slots.items() if slot.optional)
    absent = data.draw(st.sets(st.sampled_from(optional))) if optional else set[str]()
    copied = sorted(name for name, slot in declaration.slots.items() if slot.reads(name) is not None)
    pattern = Pattern(absent, data.draw(st.sets(st.sampled_from(copied))) - absent)
    capabilities, lowering = data.draw(st.sampled_from(CAPABILITIES)), data.draw(st.sampled_from(LADDER))
    plan = plan_fill(declaration, sizes, capabilities, pattern, lowering=lowering)
    assert repr(through_json(plan)) == repr(plan)  # as text, in which NaN equals itself
    assert str(through_json(plan)) == str(plan)
    extents: Any = data.draw(st.sampled_from([{}, dict.fromkeys(AXES, (2, 4)) | {HIDDEN: (3, 3)}]))
    found = explain_declaration(declaration, Capabilities(), "cpu", extents)
    assert repr(through_json(found, Explanation)) == repr(found)


def test_a_plan_written_by_hand_is_read() -> None:
    """What the kernel does, and what rests where it is, comes back from JSON and stands in the text."""
    for plan in (PLAN, FUSED):
        assert through_json(plan) == plan
    assert FUSED.fused == ("input_ids", "seq_lens", "count")
    assert [*FUSED.lines()] == [
        "plan of Decode for BATCH=8, TOKENS=16: 1 copy call, 4096 bytes, in_graph",
        "absent  mrope_positions",
        "upload  one packet, then one kernel for 3 slots, the graph's first node",
        "reset   seq_lens[live:] = 1 in each step, fused",
        "reset   embeds[live:] = 0 in each step",
        "copy    input_ids, seq_lens  (int64, device, fused)",
        "copy    positions  (int64, device, in place)",
        "compute count = live_tokens(step) on the host, rides in the upload",
        "advance seen = largest(seen, seq_lens), operators",
        "advance seq_lens = seq_lens - 1",
    ]


def test_json_of_plans_is_plain() -> None:
    """Dtypes stand by their short names, tuples as lists, nothing needs a parser that takes NaN, and types stay."""
    data = json.loads(json.dumps(to_data(PLAN)), parse_constant=pytest.fail)
    assert data == to_data(PLAN)
    assert (data["copies"][1]["src_dtype"], data["tails"][1]["value"]) == ("float32", "-inf")
    assert data["sizes"] == [["BATCH", 8], ["TOKENS", 16]]
    for value in (True, 0, -7, 0.5, math.inf, -math.inf, math.nan, 1 << 62):
        plan = attrs.evolve(PLAN, tails=(TailReset("x", value, always=True),))
        found = through_json(plan).tails[0].value
        assert (type(found), repr(found)) == (type(value), repr(value))
    capabilities = to_data(Capabilities(roles={"loc": torch.int32}))
    assert capabilities["roles"] == {"loc": "int32"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(tailz=[]), "unknown key 'tailz'; did you mean 'tails'?"),
        (lambda d: d.pop("tails"), "'tails' is missing"),
        (lambda d: d["tails"][1].pop("value"), "'value' is missing @ $.tails[1].value"),
        (lambda d: d["tails"][0].update(value="many"), "expected a number, true, false"),
        (lambda d: d.update(absent="01"), "expected a list, got '01' @ $.absent"),
        (lambda d: d.update(absent=[True]), "expected str, got True @ $.absent[0]"),
        (lambda d: d["tails"][0].update(always=1), "expected bool, got 1"),
        (lambda d: d["tails"].append(3), "expected keys and values, got 3 @ $.tails[2]"),
        (lambda d: d["copies"][0].update(dst_dtype="int65"), "torch has no dtype 'int65'"),
        (lambda d: d["copies"][0].update(placement="moon"), "moon"),
        (lambda d: d.update(sizes=[["BATCH"]]), "expected 2 values, got ['BATCH']"),
        (lambda d: d.update(nbytes=5.0), "expected int, got 5.0 @ $.nbytes"),
        (lambda d: d.update(tails=3, nbytes="x"), "got 3 @ $.tails; expected int, got 'x' @ $.nbytes"),
    ],
)
def test_what_is_no_plan_is_refused(change: Change, message: str) -> None:
    """An unknown key, a missing one, or a value of another type is an error that says which and where."""
    data = copy.deepcopy(to_data(PLAN))
    change(data)
    with pytest.raises(ConfigError, match="no FillPlan: ") as caught:
        from_data(data, FillPlan)
    assert message in str(caught.value)
