"""An explanation says what each slot is, what it follows from, and what a step of given sizes would do."""

import io
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from rich.console import Console

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    Inputs,
    Step,
    computed,
    constant,
    copied,
    keep,
    output,
    side,
    staged,
)
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.explain import Explanation, Extents, SlotFacts, explain_declaration
from slotgraph.dataflow.mermaid import mermaid
from slotgraph.dataflow.planner import plan_fill
from slotgraph.runners.explained.tables import tables
from tests.strategies import declarations

HIDDEN = Axis("HIDDEN", fixed=True)
NPU = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0})
SIZES: Extents = {BATCH: (37, 48), TOKENS: (37, 48), HIDDEN: (64, 64)}


def _live_tokens(step: Step) -> int:
    return step.live(TOKENS)


def _rows(seq_lens: torch.Tensor) -> torch.Tensor:
    return torch.arange(seq_lens.shape[0])


def _windowed(settings: object) -> bool:
    return bool(settings)


class Explained(Inputs):
    """Each kind of slot."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, placement="host")
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, source="spec.locations")
    tables: torch.Tensor = copied(BATCH, 4, dtype=torch.int32, pad=keep("not read"), source=side("tables.decode"))
    mrope: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, default=None, when=_windowed)
    count: torch.Tensor = computed(_live_tokens, shape=1, dtype=torch.int32)
    rows: torch.Tensor = computed(_rows, shape=BATCH, dtype=torch.int64, placement="host")
    ones: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32, when="extend.on")
    hidden: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.bfloat16, pad=0)
    logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
    mode: str = "decode"


def explained(
    extents: Extents = SIZES, absent: tuple[str, ...] = (), in_place: tuple[str, ...] = (), lowering: str | None = None
) -> Explanation:
    """The declaration above, on an NPU's capabilities."""
    how: Any = lowering
    return explain_declaration(Explained.slotgraph, NPU, "npu", extents, absent, in_place, how)


def facts(name: str, found: Explanation | None = None) -> SlotFacts:
    """One slot's facts."""
    return next(slot for slot in (found or explained()).slots if slot.name == name)


def test_dtype_is_the_declared_role_and_the_resolved_one() -> None:
    """A reader sees both what was declared and what the backend makes of it."""
    assert (facts("out_cache_loc").dtype, facts("out_cache_loc").role) == ("int32", "cache_loc")
    assert (facts("input_ids").dtype, facts("input_ids").role) == ("int64", None)


def test_where_values_come_from() -> None:
    """Sources, side arguments, functions with their needs, and constants stand as they were written."""
    assert facts("out_cache_loc").source == "batch.spec.locations"
    assert (facts("tables").source, facts("tables").argument) == ("argument tables.decode", "tables")
    assert (facts("count").function, facts("count").needs, facts("count").runs_on) == (
        "_live_tokens",
        ("step",),
        "host",
    )
    assert (facts("rows").needs, facts("rows").runs_on) == (("seq_lens",), "host")
    assert facts("ones").value == "1"
    assert (facts("mrope").optional, facts("mrope").when) == (True, "_windowed")
    assert (facts("ones").when, facts("seq_lens").placement) == ("extend.on", "host")


def test_tails_are_said_where_there_is_one() -> None:
    """A rule stands as it was declared, and not at all where the slot has no rows to pad."""
    assert (facts("seq_lens").tail, facts("tables").tail) == ("pad=seq_len_fill", "keep (not read)")
    assert (facts("count").tail, facts("logits").tail) == (None, None)


def test_sizes_give_bytes_and_the_plan() -> None:
    """Bytes are of padded sizes, copied bytes of live ones, and the plan is the planner's own."""
    found = explained()
    assert (facts("input_ids").padded, facts("input_ids").nbytes, facts("input_ids").copied) == ((48,), 384, 37 * 8)
    assert (facts("hidden").padded, facts("hidden").nbytes, facts("hidden").copied) == ((48, 64), 48 * 64 * 2, 0)
    assert found.nbytes == sum(slot.nbytes or 0 for slot in found.slots)
    assert found.copied == 37 * (8 + 4 + 4 + 4 * 4 + 3 * 8)
    assert found.plan == plan_fill(Explained.slotgraph, {axis: padded for axis, (_, padded) in SIZES.items()}, NPU)
    assert [axis.name for axis in found.axes] == ["BATCH", "HIDDEN", "TOKENS"]


def test_absent_slots_are_left_out_of_the_plan() -> None:
    """The plan of a batch that comes without an optional slot neither copies nor resets it."""
    found = explained(absent=("mrope",))
    assert found.plan is not None
    assert found.plan.absent == ("mrope",)
    assert facts("mrope", found).copied == 0


def test_slots_in_place_are_not_copied() -> None:
    """The plan of a batch whose producer wrote a slot names it, resets its tail, and moves no bytes of it."""
    whole, found = explained(), explained(in_place=("input_ids",))
    assert whole.plan is not None
    assert found.plan is not None
    assert [group.slots for group in found.plan.copies if group.how == "in place"] == [("input_ids",)]
    assert [tail.always for tail in found.plan.tails if tail.slot == "input_ids"] == [True]
    assert whole.plan.nbytes - found.plan.nbytes == 48 * 8
    assert facts("input_ids", found).copied == 0
    assert found.copied == (whole.copied or 0) - 37 * 8


def test_host_data() -> None:
    """Where the device packs uploads, the plan of a batch with host data says what rides; elsewhere it is the same."""
    plans = [
        explain_declaration(Explained.slotgraph, capabilities, "some", SIZES, hosted=["input_ids"]).plan
        for capabilities in (Capabilities(packed_uploads=True), Capabilities())
    ]
    assert plans[0] is not None
    assert "input_ids" in plans[0].packed
    assert plans[1] == explain_declaration(Explained.slotgraph, Capabilities(), "some", SIZES).plan
    with pytest.raises(
        ConfigError, match="Explained: a batch cannot bring host data for 'count': it is no slot that is"
    ):
        explain_declaration(Explained.slotgraph, Capabilities(), "some", SIZES, hosted=["count"])


@pytest.mark.parametrize("lowering", [None, "auto", "foreach", "slot_by_slot"])
def test_plan_of_a_lowering(lowering: str | None) -> None:
    """The plan is that of the lowering asked for, else of the device's preferred one."""
    plan = explained(lowering=lowering).plan
    assert plan is not None
    assert plan.lowering == ("slot_by_slot" if lowering == "slot_by_slot" else "foreach")
    singles = [group for group in plan.copies if group.how == "single"]
    assert (len(singles) == len(plan.copies)) == (lowering == "slot_by_slot")


def test_lowering_that_the_device_has_not() -> None:
    """A device is not said to run what it cannot run."""
    with pytest.raises(ConfigError, match="lowering 'fused': this backend has foreach, slot_by_slot; or say 'auto'"):
        explained(lowering="fused")


def test_without_sizes_the_declaration_alone() -> None:
    """No sizes, no plan and no bytes; all that is declared is there all the same."""
    found = explained({})
    assert (found.plan, found.nbytes, found.copied, found.axes) == (None, None, None, ())
    assert [slot.name for slot in found.slots] == list(Explained.slotgraph.slots)
    assert (found.order, found.fields) == (("count", "rows"), ("mode",))


@pytest.mark.parametrize(
    ("extents", "absent", "message"),
    [
        ({BATCH: (1, 1)}, (), "no size for HIDDEN, TOKENS"),
        ({**SIZES, BATCH: (49, 48)}, (), "BATCH=49/48: expected at most as many live rows as padded ones"),
        ({**SIZES, BATCH: (-1, 48)}, (), "BATCH=-1/48: expected at most"),
        ({**SIZES, HIDDEN: (32, 64)}, (), "HIDDEN=32/64: expected one size"),
        (SIZES, ("seq_lens",), "a batch cannot come without 'seq_lens': optional are mrope"),
        (SIZES, ("nothing",), "cannot come without 'nothing'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(extents: Extents, absent: tuple[str, ...], message: str) -> None:
    """A missing size, more live rows than padded ones, or an absent slot that is required is an error in words."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        explained(extents, absent)


@pytest.mark.parametrize("name", ["count", "hidden", "nothing"])
def test_what_no_producer_writes_in_place(name: str) -> None:
    """Only a slot that is copied can be written in its place instead."""
    message = f"Explained: a producer cannot write '{name}' in place: it is no slot that is copied"
    with pytest.raises(ConfigError, match=message):
        explained(in_place=(name,))


def shown(found: Explanation) -> str:
    """The tables as text."""
    console = Console(file=io.StringIO(), width=200)
    console.print(tables(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_tables_show_everything() -> None:
    """Every slot, its dtype and role, the tail, where it comes from, the plan and the bytes are in the text."""
    text = shown(explained())
    for slot in explained().slots:
        assert slot.name in text
    assert "int32 (cache_loc)" in text
    assert "keep (not read)" in text
    assert "_live_tokens(step)" in text
    assert "set once: 1" in text
    assert "copied, optional, when _windowed" in text
    assert str(explained().plan).splitlines()[0] in text
    assert "carried from the batch as they are: mode" in text
    assert "BATCH=37/48, HIDDEN=64, TOKENS=37/48" in text


def test_tables_take_text_as_it_stands() -> None:
    """Square brackets are shapes, not rich's markup."""
    assert "[BATCH, 4]" in shown(explained({}))


def test_tables_name_what_is_switched_off() -> None:
    """Slots that the settings switch off are named, so that no one looks for them."""
    found = explain_declaration(Explained.slotgraph.under({"extend": {"on": False}}), NPU, "npu")
    assert "switched off by the settings: ones" in shown(found)
    assert "ones" not in [slot.name for slot in found.slots]


def test_mermaid_draws_the_graph() -> None:
    """From the batch over slots and what is computed of them to the captured step, and on to outputs."""
    lines = [line.strip() for line in mermaid(explained()).splitlines()]
    assert lines[0] == "flowchart LR"
    assert {
        "batch --> slot_input_ids",
        'batch -->|"batch.spec.locations"| slot_out_cache_loc',
        'argument_tables -->|"argument tables.decode"| slot_tables',
        "batch -.-> slot_mrope",
        "given_step --> slot_count",
        "slot_seq_lens --> slot_rows",
        "producer --> slot_hidden",
        "slot_rows --> captured",
        "captured --> slot_logits",
    } <= set(lines)


def test_mermaid_quotes_what_it_would_stumble_over() -> None:
    """Quotes and angle brackets in a function's name are written as mermaid's entities."""

    class Odd(Inputs):
        end: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch)

    text = mermaid(explain_declaration(Odd.slotgraph, NPU, "npu"))
    assert "#lt;lambda#gt;(batch)" in text
    assert "slot_end[" in text


_NODE = re.compile(r"(\w+)(?:\[\[|\(\[|\[)\".*\"(?:\]\]|\]\)|\])(?::::\w+)?")
_EDGE = re.compile(r"(\w+) (?:-->|-\.->)(?:\|\"[^\"]*\"\|)? (\w+)")


@given(declarations())
def test_mermaid_is_well_formed(declaration: type[Inputs]) -> None:
    """Whatever is declared, every line is a node, an edge between nodes that are there, or a colour."""
    first, *lines = mermaid(explain_declaration(declaration.slotgraph, NPU, "npu")).splitlines()
    nodes = {match[1] for line in lines if (match := _NODE.fullmatch(line.strip()))}
    assert first == "flowchart LR"
    for line in (line.strip() for line in lines):
        edge = _EDGE.fullmatch(line)
        assert edge or _NODE.fullmatch(line) or line.startswith("classDef ")
        assert not edge or set(edge.groups()) <= nodes
