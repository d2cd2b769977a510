"""Sampling: what is drawn is admitted by a fill, whatever is declared, and holds what its slots bear."""

from collections.abc import Mapping
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, Axis, Inputs, computed, constant, copied, output, staged
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.capabilities import Capabilities, resolve_dtype
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.fill.bucket import Bucket
from slotgraph.dataflow.sources import Call
from slotgraph.extend import HOST, side
from slotgraph.runners.engine.sampling import Sample, sample_batch
from tests.packing import feed_for, filled
from tests.strategies import AXES, CAPABILITIES, HIDDEN, Round, declaration_of, declarations, poisoned, rounds

CONTEXT = Axis("CONTEXT", fixed=True)
LIVE = {BATCH: 3, TOKENS: 12, HIDDEN: 4, CONTEXT: 40}
META = torch.device("meta")
ROWS = copied(BATCH, dtype=torch.int64, pad=0)
ON_NPU = Capabilities(roles={"cache_loc": torch.int32})


class Sampled(Inputs):
    """Slots of every kind, and where sources stand."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=CONTEXT)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, limit=CONTEXT)
    unlimited_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    locations: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    tables: torch.Tensor = copied(BATCH, 5, dtype=torch.int32, pad=0, source="tables.full")
    windows: torch.Tensor = copied(BATCH, 5, dtype=torch.int32, pad=0, source="tables.window")
    hidden: torch.Tensor | None = copied(
        TOKENS, HIDDEN, dtype=torch.bfloat16, pad=0, source=side("proxy.hidden"), default=None
    )
    flags: torch.Tensor | None = copied(BATCH, dtype=torch.bool, pad=False, default=None)
    on_host: torch.Tensor = copied(BATCH, dtype=torch.float64, pad=0, placement=HOST)
    kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, source="lens", placement="host", argument="kv_lens")
    waves: torch.Tensor = copied(TOKENS, dtype=torch.complex64, pad=0)
    bytes: torch.Tensor = copied(TOKENS, dtype=torch.uint8, pad=0)
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    ones: torch.Tensor = constant(1, shape=BATCH, dtype=torch.int32)
    embeds: torch.Tensor = staged(TOKENS, HIDDEN, dtype=torch.float32, pad=0)
    logits: torch.Tensor = output(TOKENS, HIDDEN, dtype=torch.float32)
    mode: str = "decode"


class Marked(Inputs):
    """A field that a batch must bring."""

    rows: torch.Tensor = ROWS
    mode: str


def seeded(seed: int = 0) -> torch.Generator:
    """A generator of numbers."""
    return torch.Generator().manual_seed(seed)


def sample(seed: int = 0, inputs: type[Inputs] = Sampled, **said: Any) -> Sample:
    """A batch of the sizes above."""
    return sample_batch(inputs.slotgraph, Capabilities(), LIVE, seeded(seed), **said)


def test_sampled_sources_are_where_they_are_read() -> None:
    """Mappings along paths, side arguments beside the batch; on the device, or on the CPU; roles with their dtypes."""
    found = sample()
    plain = {"input_ids", "positions", "seq_lens", "unlimited_lens", "locations", "flags", "on_host", "lens", "waves"}
    assert set(found.batch) == plain | {"bytes", "tables"}
    assert set(found.batch["tables"]) == {"full", "window"}
    assert {name: list(value) for name, value in found.side.items()} == {"proxy": ["hidden"]}
    found = sample_batch(Sampled.slotgraph, ON_NPU, LIVE, seeded(), absent={"hidden", "flags"}, device=META)
    devices = {name: value.device.type for name, value in found.batch.items() if isinstance(value, torch.Tensor)}
    assert {name for name, device in devices.items() if device == "cpu"} == {"on_host", "lens"}
    assert found.batch["locations"].dtype == torch.int32
    assert (found.side, "flags" in found.batch) == ({}, False)


@given(seed=st.integers(0, 1 << 30))
def test_sampled_values_are_what_slots_bear(seed: int) -> None:
    """Limits are kept, lengths are at least 1, locations are distinct and never 0, and other numbers are small."""
    batch = sample(seed).batch
    assert 0 <= batch["positions"].min() <= batch["positions"].max() <= LIVE[CONTEXT]
    assert 1 <= batch["seq_lens"].min() <= batch["seq_lens"].max() <= LIVE[CONTEXT]
    assert batch["unlimited_lens"].tolist() == [1, 1, 1]
    assert sorted(batch["locations"].tolist()) == list(range(1, 13))
    assert set(batch["input_ids"].tolist()) <= {0, 1}


@given(data=st.data(), declaration=declarations(), capabilities=st.sampled_from(CAPABILITIES))
def test_a_fill_admits_every_sampled_batch(
    data: st.DataObject, declaration: type[Inputs], capabilities: Capabilities
) -> None:
    """Whatever is declared, absent and live: a fill of what was drawn raises nothing, and shows it."""
    found = declaration.slotgraph.slots.items()
    slots = {n: s for n, s in found if not isinstance(s.reads(n), Call) and s.computes() is None}
    plain = attrs.evolve(declaration.slotgraph, slots=slots)
    capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
    turn: Round = data.draw(rounds(declaration, capacity))
    absent = turn.absent & set(slots)
    made = sample_batch(plain, capabilities, turn.live, seeded(turn.seed), absent=absent)
    buffers = poisoned(declaration, capabilities, capacity, turn.seed)
    bucket = Bucket(plain, turn.padded, capabilities, buffers, absent=absent, feed=feed_for(buffers))
    ready = filled(bucket, made.batch, tuple(turn.live[axis] for axis in plain.varying), made.side)
    for name, slot in plain.slots.items():
        source = slot.reads(name)
        if source is not None:
            value = source.read(made.batch, made.side)
            assert (value is None) == (name in absent) == (ready.views[name] is None)
            assert value is None or value.dtype == resolve_dtype(slot.dtype, capabilities)
            assert value is None or tuple(value.shape) == extent(slot.shape, turn.live)


def test_values_of_ones_own_are_sampled() -> None:
    """A pair of bounds, or a function; a field's value, or a function of the sizes."""
    values: Mapping[str, Any] = {
        "input_ids": (100, 101),
        "on_host": (0.5, 0.75),
        "tables": lambda shape, dtype, generator: torch.randint(7, 9, shape, generator=generator).to(dtype),
        "mode": "verify",
    }
    batch = sample(values=values).batch
    assert set(batch["input_ids"].tolist()) == {100, 101}
    assert 0.5 <= batch["on_host"].min() <= batch["on_host"].max() <= 0.75
    assert set(batch["tables"]["full"].flatten().tolist()) == {7, 8}
    assert batch["mode"] == "verify"
    again = {"rows": ROWS, "again": copied(BATCH, dtype=torch.int64, pad=0, source="rows")}  # of one path, one tensor
    assert list(sample(inputs=declaration_of(again)).batch) == ["rows"]
    marked = sample(inputs=Marked, values={"mode": lambda live, _: f"{live[BATCH]} rows"})
    assert marked.batch["mode"] == "3 rows"


CALLED = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch.rows)
WITHIN = copied(BATCH, dtype=torch.int64, pad=0, source="rows.inner")
NARROW = copied(BATCH, dtype=CACHE_LOC, pad=0, limit=2)
UNSIZED = copied(BATCH, Axis("ELSE", fixed=True), dtype=torch.int64, pad=0)
REFUSED: list[tuple[type[Inputs], dict[str, Any], str]] = [
    (declaration_of({"rows": CALLED}), {}, r"slot 'rows' reads .*lambda.*\(batch\): .*batches="),
    (declaration_of({"rows": ROWS, "inner": WITHIN}), {}, r"slot 'inner' reads batch.rows.inner"),
    (declaration_of({"locations": NARROW}), {}, r"slot 'locations': 3 rows need as many locations"),
    (declaration_of({"rows": UNSIZED}), {}, r"slot 'rows': live lacks a size for ELSE"),
    (Marked, {}, r"field 'mode' of Marked has no default: give its value, values="),
    (Sampled, {"absent": {"flag"}}, r"absent names 'flag', which is not an optional slot .*: did you mean 'flags'\?"),
    (Sampled, {"values": {"count": (1, 2)}}, r"values names 'count', which is not a copied slot of Sampled"),
    (Sampled, {"values": {"input_ids": (2, 1)}}, r"slot 'input_ids': values has \(2, 1\) for it"),
    (Sampled, {"values": {"bytes": lambda *_: torch.ones(5)}}, r"slot 'bytes': .* shape \[12\], got shape \[5\]"),
    (Sampled, {"values": {"bytes": lambda *_: [1]}}, r"slot 'bytes': .* shape \[12\], got list"),
]


@pytest.mark.parametrize(("inputs", "said", "why"), REFUSED)
def test_what_cannot_be_drawn_is_said(inputs: type[Inputs], said: dict[str, Any], why: str) -> None:
    """Functions of the batch, fields without defaults, and names and values that fit nothing."""
    with pytest.raises(ConfigError, match=why):
        sample(inputs=inputs, **said)
