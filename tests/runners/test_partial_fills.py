"""Fills in part: some slots are written early, others are left as they are, and none holds another step's rows."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, InputBuffers, Inputs, computed, copied
from slotgraph.backends import load
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import BatchError, ConfigError
from slotgraph.extend import HOST
from tests.packing import backend_of
from tests.runners.models import batch_for
from tests.strategies import same_bytes

SIZES = {BATCH: 8, TOKENS: 8}
PADDED = ({BATCH: 4, TOKENS: 4}, {BATCH: 8, TOKENS: 8})


class Verify(Inputs):  # the metadata of a verify step, and what the model reads
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, converts=(torch.int64,))
    lens_cpu: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement=HOST)
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-7)
    table: torch.Tensor = copied(BATCH, 3, dtype=torch.int32, pad=-1)
    mask: torch.Tensor | None = copied(TOKENS, dtype=torch.bool, pad=False, default=None)
    ends: torch.Tensor = computed(lambda seq_lens: seq_lens.cumsum(0), shape=BATCH, dtype=torch.int64)
    most: torch.Tensor = computed(lambda lens_cpu: int(lens_cpu.max()), shape=1, dtype=torch.int64)


COPIED = ("seq_lens", "lens_cpu", "ids", "table", "mask")
NAMES = (*COPIED, "ends", "most")
METADATA = ("seq_lens", "lens_cpu")


def batch_of(rows: int, seed: int, *, masked: bool = True) -> dict[str, Any]:
    """Random rows, some of host data."""
    batch: dict[str, Any] = dict(batch_for(Verify, {BATCH: rows, TOKENS: rows}, seed))
    batch["ids"] = batch["ids"].tolist() if seed % 2 else batch["ids"]
    batch["mask"] = batch["lens_cpu"] > 50 if masked else None
    return batch


def copy_of(view: Any) -> Any:
    """What a view holds now."""
    return {name: None if (one := getattr(view, name)) is None else one.clone() for name in NAMES}


def assert_same(found: Any, expected: Any) -> None:
    """Compare two views, or copies of them."""
    for name in NAMES:
        mine, other = found[name], expected[name]
        assert (mine is None) == (other is None), name
        assert mine is None or same_bytes(mine, other), (name, mine, other)


def pair(backend: str, lowering: str) -> tuple[Any, Any]:
    """Buffers under test, and others that are filled whole."""
    made = backend_of(backend, lowering)
    one, other = (InputBuffers(Verify, SIZES, backend=made, lowering=lowering) for _ in range(2))
    return one, other


by_lowering = pytest.mark.parametrize("lowering", LADDER)
by_backend = pytest.mark.parametrize("backend", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
lowerings = st.sampled_from(LADDER)
rows = st.tuples(st.integers(1, 4), st.integers(0, 1), st.integers(0, 99), st.booleans())


@by_backend
@given(lowering=lowerings, steps=st.lists(st.tuples(rows, st.sets(st.sampled_from(COPIED))), min_size=1, max_size=6))
def test_two_parts_are_one_fill(backend: str, lowering: str, steps: list[Any]) -> None:
    """Whatever is written first, the rest makes it the fill of the whole batch."""
    assume(lowering in backend_of(backend).capabilities.lowerings)
    buffers, others = pair(backend, lowering)
    for (count, bucket, seed, masked), first in steps:
        batch = batch_of(count, seed, masked=masked)
        right = copy_of(others.fill(batch, PADDED[bucket]))
        early = copy_of(buffers.fill(batch, PADDED[bucket], only=first))
        computed_early = {name for name, need in (("ends", "seq_lens"), ("most", "lens_cpu")) if need in first}
        for name in first | computed_early:
            assert early[name] is None or same_bytes(early[name], right[name]), name
        assert_same(copy_of(buffers.fill(batch, PADDED[bucket], skip=first)), right)


@by_backend
@given(lowering=lowerings, steps=st.lists(st.tuples(rows, st.sets(st.sampled_from(COPIED))), min_size=2, max_size=8))
def test_a_skipped_slot_holds_the_last_batchs_rows_or_is_written(backend: str, lowering: str, steps: list[Any]) -> None:
    """A slot that is left holds the last batch's rows, which had these sizes; else the fill writes it, too."""
    assume(lowering in backend_of(backend).capabilities.lowerings)
    buffers, others = pair(backend, lowering)
    last: Any = None
    values: dict[str, Any] = {}
    for (count, bucket, seed, masked), skip in steps:
        batch = batch_of(count, seed, masked=masked)
        is_alike = last == (count, bucket, masked)
        merged = {name: values[name] if is_alike and name in skip else one for name, one in batch.items()}
        right = copy_of(others.fill(merged, PADDED[bucket]))
        found = copy_of(buffers.fill(batch, PADDED[bucket], skip=skip))
        assert_same(found, right)
        last, values = (count, bucket, masked), merged
        buffers.fill(merged, PADDED[bucket])


@by_lowering
def test_a_skipped_slot_is_left_as_it_is(lowering: str) -> None:
    """Neither rows nor tails of a slot that is left are written, and its source is not looked at."""
    buffers, _ = pair("cpu", lowering)
    batch = batch_of(2, 4)
    before = copy_of(buffers.fill(batch, PADDED[0]))
    other = batch_of(2, 6)
    after = copy_of(buffers.fill({**other, "table": "no table"}, PADDED[0], skip=["table"]))
    assert same_bytes(after["table"], before["table"])
    assert after["seq_lens"].tolist() == [*other["seq_lens"].tolist(), 1, 1]
    with pytest.raises(BatchError, match="'table'"):  # of another size, so that it must be written
        buffers.fill({**batch_of(3, 6), "table": "no table"}, PADDED[0], skip=["table"])


def test_a_producers_slots_are_filled_in_each_fill() -> None:
    """Where a producer has a view to write by, every fill is whole."""
    buffers, _ = pair("cpu", "direct")
    batch = batch_of(2, 4)
    buffers.fill(batch, PADDED[0])
    buffers.view(PADDED[0], written=True).table.fill_(5)
    assert buffers.fill(batch, PADDED[0], skip=["table"]).table.tolist()[2:] == [[-1] * 3] * 2


@by_lowering
def test_the_rest_is_left_to_the_graph(lowering: str) -> None:
    """What is written early is there before the replay; the replay does the rest."""
    backend = load("cpu-capture")()
    buffers = InputBuffers(Verify, SIZES, backend=backend, lowering=lowering)
    padded = PADDED[1]
    buffers.prepare(padded)

    def captured() -> Any:
        buffers.fill_in_graph(padded)
        view: Any = buffers.view(padded)
        return torch.cat([view.ends, view.table.sum(1), view.ids])

    graph = backend.capture(captured)
    for seed in range(12):
        batch = batch_of(1 + seed % 8, seed)
        early = copy_of(buffers.fill(batch, padded, only=METADATA))
        right = copy_of(InputBuffers(Verify, SIZES, backend="cpu").fill(batch, padded))
        assert all(same_bytes(early[name], right[name]) for name in (*METADATA, "ends", "most"))
        buffers.fill(batch, padded, skip=METADATA)
        graph.replay()
        assert same_bytes(graph.outputs, torch.cat([right["ends"], right["table"].sum(1), right["ids"]]))


def test_names_that_are_no_slots_are_refused() -> None:
    """A fill refuses an unknown slot, a value that is no list of names, and only= beside skip=. It writes nothing."""
    buffers, _ = pair("cpu", "direct")
    options: dict[str, Any]
    batch = batch_of(2, 4)
    before = copy_of(buffers.fill(batch, PADDED[0]))
    for options, match in (
        ({"only": ["tables"]}, "only names 'tables'.*did you mean 'table'"),
        ({"skip": ["tables"]}, "skip names 'tables'"),
        ({"only": ["ids"], "skip": ["table"]}, "both given"),
        ({"only": "ids"}, "only: expected names of slots in a list or tuple, got 'ids'"),
        ({"only": (name for name in ["ids"])}, "only: expected names of slots"),  # read twice, it would name none
        ({"skip": 5}, "skip: expected names of slots"),
        ({"absent": "ids"}, "absent: expected names of slots"),
    ):
        with pytest.raises(ConfigError, match=match):
            buffers.fill(batch_of(2, 9), PADDED[0], **options)
    assert_same(copy_of(buffers.fill(batch, PADDED[0])), before)
