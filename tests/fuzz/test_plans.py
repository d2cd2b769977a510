"""JSON plans out of anything: the plan that was written, or ConfigError that names what is wrong; nothing else."""

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph.dataflow.capabilities import Capabilities, dtype_from_text
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.explain import Explanation, explain_declaration
from slotgraph.dataflow.plan import ComputeStep, CopyGroup, FillPlan, TailReset
from slotgraph.dataflow.serial import from_data, plan_from_json, plan_to_json, to_data
from tests.fuzz.hostile import NASTY_TEXTS, spoilt, values
from tests.runners.models import PlainInputs

PLAN = FillPlan(
    declaration="Decode",
    sizes=(("BATCH", 8),),
    absent=("positions",),
    tails=(TailReset("seq_lens", (0,), 1, always=False),),
    copies=(CopyGroup(("input_ids",), torch.int64, torch.int64, "device", "foreach"),),
    computed=(ComputeStep("count", "live_tokens", ("step",), "host"),),
    nbytes=4096,
)
EXPLAINED = explain_declaration(PlainInputs.slotgraph, Capabilities(), "cpu", {})


def check(text: str) -> None:
    """A plan that can be written again, or ConfigError with a message."""
    try:
        plan = plan_from_json(text)
    except ConfigError as error:
        assert str(error).startswith("no FillPlan: ")  # noqa: PT017 - what is raised is allowed, not asked for
        return
    assert plan_to_json(plan)
    assert str(plan)


@settings(max_examples=4 * settings().max_examples)
@given(st.data())
def test_spoilt_plans(data: st.DataObject) -> None:
    """A plan of which some places hold something else."""
    check(json.dumps(data.draw(spoilt(copy.deepcopy(to_data(PLAN))))))


@given(st.data())
def test_spoilt_explanations(data: st.DataObject) -> None:
    """An explanation likewise."""
    found = data.draw(spoilt(copy.deepcopy(to_data(EXPLAINED))))
    try:
        assert isinstance(from_data(found, Explanation), Explanation)
    except ConfigError as error:
        assert str(error).startswith("no Explanation: ")  # noqa: PT017 - as above


@given(st.text() | values.map(repr))
def test_any_text(text: str) -> None:
    """Random text."""
    check(text)


@given(st.data())
def test_spoilt_letters(data: st.DataObject) -> None:
    """A plan's text with a letter changed, or cut off."""
    text = plan_to_json(PLAN)
    place = data.draw(st.integers(0, len(text) - 1))
    check(text[:place] + data.draw(st.characters()) + text[place + 1 :])
    check(text[:place])


@pytest.mark.parametrize("text", NASTY_TEXTS, ids=range(len(NASTY_TEXTS)))
def test_nasty_texts(text: str) -> None:
    """Text that has broken readers before is refused."""
    with pytest.raises(ConfigError, match="no FillPlan: "):
        plan_from_json(text)


@pytest.mark.parametrize(
    "value", [{"a": []}, [[]], "_dynamo", "Tensor", "has_mps", "", "\ud800", None, 10**400, [1] * 9]
)
def test_nasty_dtypes(value: object) -> None:
    """What torch has under a name, and is no dtype, is not even looked up; what is no name is refused."""
    data: Any = to_data(PLAN)
    data["copies"][0]["dst_dtype"] = value
    with pytest.raises(ConfigError, match=r"dtype|expected str"):
        from_data(data, FillPlan)


def test_dtypes_run_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a dtype does not ask torch to load a module of that name."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(ValueError, match="torch has no dtype 'surprise'"):
        dtype_from_text("surprise")
    assert asked == []
    assert dtype_from_text("bfloat16") is torch.bfloat16
