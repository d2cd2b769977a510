"""An explanation says what each slot is, what it follows from, and what a step of given sizes would do."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given

from slotgraph import (
    BATCH,
    CACHE_LOC,
    SEQ_LEN_FILL,
    TOKENS,
    Axis,
    Inputs,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
)
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.plan import Pattern, plan_fill
from slotgraph.extend import side
from slotgraph.runners.explained.declared import Explanation, Extents, SlotFacts, explain_declaration, mermaid
from tests.runners.explained.houses import live_tokens, printed
from tests.strategies import declarations

HIDDEN = Axis("HIDDEN", fixed=True)
NPU = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0})
SIZES: Extents = {BATCH: (37, 48), TOKENS: (37, 48), HIDDEN: (64, 64)}


def _windowed(settings: object) -> bool:
    return bool(settings)


def _redrawn(logits: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    return drawn + logits[:, None]


class Explained(Inputs):
    """Each kind of slot."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, placement="host")
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, source="spec.locations")
    tables: torch.Tensor = copied(BATCH, 4, dtype=torch.int32, pad=keep("not read"), source=side("tables.decode"))
    mrope: torch.Tensor | None = copied(3, TOKENS, dtype=torch.int64, pad=0, default=None, when=_windowed)
    count: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    rows: torch.Tensor = computed(lambda seq_lens: seq_lens, shape=BATCH, dtype=torch.int64, placement="host")
    ones: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32, when="extend.on")
    hidden: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.bfloat16, pad=0)
    logits: torch.Tensor = output(TOKENS, dtype=torch.float32)
    counts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1, starts=1)
    kv_lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=1, source="lens", argument="actual_seq_lengths_kv", limit=HIDDEN, placement="host"
    )
    kv_ends: torch.Tensor = computed(
        lambda kv_lens: kv_lens, shape=BATCH, dtype=torch.int64, placement="host", argument="actual_seq_lengths"
    )
    rank: torch.Tensor = computed(lambda settings: settings.rank, shape=1, dtype=torch.int32)
    turns: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, then=lambda turns: turns - 2)
    drawn: torch.Tensor = copied(TOKENS, 9, dtype=torch.float32, pad=0, then=_redrawn)
    mode: str = "decode"


def explained(extents: Extents = SIZES, **options: Any) -> Explanation:
    """The declaration above, on an NPU's capabilities."""
    return explain_declaration(Explained.slotgraph, NPU, "npu", extents, **options)


def facts(name: str, found: Explanation | None = None) -> SlotFacts:
    """One slot's facts."""
    return next(slot for slot in (found or explained()).slots if slot.name == name)


def test_slots_in_words() -> None:
    """Dtypes and roles, sources, functions with their needs, constants and tails stand as they were declared."""
    expected: dict[str, dict[str, object]] = {
        "input_ids": {"dtype": "int64", "role": None, "tail": "pad=0", "source": "batch.input_ids"},
        "seq_lens": {"placement": "host", "tail": "pad=seq_len_fill"},
        "out_cache_loc": {"dtype": "int32", "role": "cache_loc", "source": "batch.spec.locations"},
        "tables": {"source": "argument tables.decode", "tail": "keep (not read)"},
        "mrope": {"notes": ("optional", "when _windowed")},
        "count": {"function": "live_tokens", "needs": ("step",), "runs_on": "host", "tail": None},
        "rows": {"needs": ("seq_lens",), "runs_on": "host"},
        "ones": {"notes": ("set to 1", "when extend.on")},
        "logits": {"kind": "output", "tail": None, "source": None, "notes": ()},
        "counts": {"tail": "pad=-1, starts as 1"},
        "kv_lens": {"kind": "copied", "notes": ("at most HIDDEN", "argument actual_seq_lengths_kv")},
        "kv_ends": {"kind": "computed", "notes": ("argument actual_seq_lengths",), "runs_on": "host"},
        "rank": {"needs": ("settings",)},
    }
    for name, known in expected.items():
        assert {field: getattr(facts(name), field) for field in known} == known


def test_sizes_give_bytes_and_the_plan() -> None:
    """Bytes are of padded sizes, copied bytes of live ones, and the plan is the planner's own; no sizes, no plan."""
    found = explained()
    assert (facts("input_ids").nbytes, facts("hidden").nbytes) == (48 * 8, 48 * 64 * 2)
    assert found.nbytes == sum(slot.nbytes or 0 for slot in found.slots)
    assert found.copied == 37 * (8 + 4 + 4 + 4 * 4 + 3 * 8 + 4 + 4 + 4 + 9 * 4)
    assert found.plan == plan_fill(Explained.slotgraph, {axis: padded for axis, (_, padded) in SIZES.items()}, NPU)
    assert found.sizes == {"BATCH": (37, 48), "HIDDEN": (64, 64), "TOKENS": (37, 48)}
    bare = explained({})
    assert (bare.plan, bare.nbytes, bare.copied, bare.sizes, bare.slots[0].nbytes) == (None, 0, 0, {}, None)
    assert [slot.name for slot in bare.slots] == list(Explained.slotgraph.slots)
    assert (bare.order, bare.fields) == (("count", "rank", "kv_ends", "rows"), ("mode",))


def test_slots_without_a_tail_have_no_rule() -> None:
    """What a slot of one size starts as is no tail."""

    class Sized(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        scale: torch.Tensor = copied(1, dtype=torch.float32, starts=2.0)

    found = explain_declaration(Sized.slotgraph, NPU, "npu")
    assert [slot.tail for slot in found.slots] == ["pad=0", None]


def test_absent_slots_and_slots_in_place() -> None:
    """Neither is copied; the plan leaves an absent slot out, and resets the tail of one that a producer wrote."""
    patterns = Pattern(), Pattern(("mrope",)), Pattern((), ("input_ids",))
    whole, absent, beside = (explained(pattern=pattern) for pattern in patterns)
    assert absent.plan is not None
    assert absent.plan.absent == ("mrope",)
    assert whole.copied - absent.copied == 3 * 37 * 8
    assert whole.plan is not None
    assert beside.plan is not None
    assert [group.slots for group in beside.plan.copies if group.how == "in place"] == [("input_ids",)]
    assert [tail.always for tail in beside.plan.tails if tail.slot == "input_ids"] == [True]
    assert (whole.plan.nbytes - beside.plan.nbytes, whole.copied - beside.copied) == (48 * 8, 37 * 8)
    by_slot = explained(lowering="slot_by_slot").plan
    assert {group.how for group in by_slot.copies} == {"single"} if by_slot else None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extents": {BATCH: (1, 1)}}, "no size for HIDDEN, TOKENS"),
        ({"extents": {**SIZES, BATCH: (49, 48)}}, "BATCH=49/48: expected at most as many live rows as padded ones"),
        ({"extents": {**SIZES, HIDDEN: (32, 64)}}, "HIDDEN=32/64: expected one size"),
        (
            {"pattern": Pattern(["seq_lens"])},
            "absent names 'seq_lens', which is not an optional slot of Explained: optional are mrope",
        ),
        (
            {"pattern": Pattern((), ["count"])},
            "in_place names 'count', which is not a copied slot of Explained: did you mean 'counts'?",
        ),
        ({"lowering": "fused"}, "lowering 'fused': this backend has foreach, slot_by_slot; or say 'auto'"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    """A missing size, more live rows than padded ones, or a slot that cannot be what it is named for: told in words."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        explained(**options)


def test_tables_show_what_is_declared() -> None:
    """Every slot, its dtype and role, the tail, where it comes from, the plan and the bytes are in the text."""
    found = explained()
    text = printed(found)
    wanted = [slot.name for slot in found.slots] + str(found.plan).splitlines()
    wanted += ["batch.spec.locations, cache_loc"]
    wanted += ["int32 [BATCH, 4]", "keep", "live_tokens(step)", "constant, set to 1", "batch, optional, when _windowed"]
    wanted += ["carried from the batch as they are: mode", "batch.lens, host, at most HIDDEN, argument actual_seq_len"]
    wanted += ["then turns - 2", "then _redrawn(logits, drawn)", "advance turns = turns - 2"]
    wanted += [f"a step of BATCH=37/48, HIDDEN=64/64, TOKENS=37/48 copies {found.copied:,} bytes into {found.nbytes:,}"]
    assert [part for part in wanted if part not in text] == []
    assert "give the size of every axis" in printed(explained({}))
    off = explain_declaration(Explained.slotgraph.under({"extend": {"on": False}}), NPU, "npu")
    assert "switched off by the settings: ones" in printed(off)


def test_mermaid_draws_the_graph() -> None:
    """From the batch over slots and what is computed of them to the captured step, and on to outputs."""
    lines = [line.strip() for line in mermaid(explained()).splitlines()]
    assert lines[0] == "flowchart LR"
    assert {
        "batch --> slot_input_ids",
        'batch -->|"batch.spec.locations"| slot_out_cache_loc',
        'batch -->|"argument tables.decode"| slot_tables',
        "batch -.-> slot_mrope",
        "given_step --> slot_count",
        "slot_seq_lens --> slot_rows",
        "producer --> slot_hidden",
        "view --> captured",
        "captured --> slot_logits",
        'batch -->|"batch.lens"| slot_kv_lens',
        "given_settings --> slot_rank",
        'slot_turns -.->|"then turns - 2"| slot_turns',
        'slot_logits -.->|"then _redrawn(logits, drawn)"| slot_drawn',
        'slot_drawn -.->|"then _redrawn(logits, drawn)"| slot_drawn',
    } <= set(lines)


@given(declarations())
def test_mermaid_is_well_formed(declaration: type[Inputs]) -> None:
    """Whatever is declared, every line is a node, an edge, or of the view."""
    node, edge = r"slot_\w+(\[\".*\"\])?", r"\w+ (?:-->|-\.->)(?:\|\"[^\"]*\"\|)? \w+"
    node_or_edge = re.compile(rf"subgraph view\[.*\]|end|{node}|{edge}")
    first, *lines = mermaid(explain_declaration(declaration.slotgraph, NPU, "npu")).splitlines()
    assert first == "flowchart LR"
    assert all(node_or_edge.fullmatch(line.strip()) for line in lines)
