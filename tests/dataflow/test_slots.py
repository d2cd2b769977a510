"""Slots, the words that declare them, and kinds of one's own."""

from typing import Any

import attrs
import pytest
import torch

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
    staged,
)
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import allocate
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError, ComputeError
from slotgraph.dataflow.sources import Compute, compute_of
from slotgraph.dataflow.tails import holds
from slotgraph.errors import SlotGraphError
from slotgraph.extend import FillRole, Role, Slot, once, side, slot
from tests.strategies import declaration_of, empty

NPU_LIKE = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0})
WIDTH = Axis("WIDTH", fixed=True)


@attrs.frozen(kw_only=True)
class Counter(Slot):
    """A kind of a user's own: how many fills there were, counted on the host."""

    start: int = 0
    counts: list[int] = attrs.field(factory=list, eq=False)

    def initial(self) -> int:
        """The first count."""
        return self.start

    def computes(self) -> Compute:
        """Count on."""
        return compute_of(self._next)

    def _next(self) -> int:
        self.counts.append(self.start + len(self.counts) + 1)
        return self.counts[-1]


def fill(inputs: type[Inputs], batch: Any, rows: int, capabilities: Capabilities = NPU_LIKE) -> dict[str, Any]:
    """What one fill of a four-row bucket shows, as lists."""
    sizes = {BATCH: 4, TOKENS: 4, WIDTH: 3}
    buffers = allocate(inputs.slotgraph, sizes, capabilities, empty)
    bucket = Bucket(inputs.slotgraph, sizes, capabilities, buffers)
    views = bucket.fill(batch, tuple(rows for _ in inputs.slotgraph.varying)).views
    return {name: None if tensor is None else tensor.tolist() for name, tensor in views.items()}


def test_a_kind_of_ones_own() -> None:
    """A subclass of Slot takes part in declarations, plans and fills like any other."""
    counter = Counter(shape=1, dtype=torch.int64, start=40)

    class Counted(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        count: torch.Tensor = slot(counter, init=False)

    assert Counted.slotgraph.slots["count"].kind == "counter"
    shown = fill(Counted, {"ids": torch.tensor([7, 8])}, 2)
    assert shown == {"ids": [7, 8, 0, 0], "count": [41]}


def test_what_the_backend_decides() -> None:
    """Roles take the device's dtype and pad value, other int64 slots stay what they are; fixed axes serve as values."""

    class Roles(Inputs):
        out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
        positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=WIDTH)
        seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
        extend_seq_lens: torch.Tensor = constant(WIDTH, shape=BATCH, dtype=torch.int32)

    places = torch.tensor([70_000, 9])
    batch = {"out_cache_loc": places, "positions": places, "seq_lens": torch.tensor([5, 6], dtype=torch.int32)}
    sizes = {BATCH: 4, TOKENS: 4, WIDTH: 3}
    buffers = allocate(Roles.slotgraph, sizes, NPU_LIKE, empty)
    assert buffers["out_cache_loc"].tensor.dtype == torch.int32
    assert buffers["positions"].tensor.dtype == torch.int64
    shown = fill(Roles, batch, 2)
    assert shown["out_cache_loc"] == [70_000, 9, 0, 0]
    assert shown["positions"] == [70_000, 9, 3, 3]
    assert shown["seq_lens"] == [5, 6, 0, 0]
    assert shown["extend_seq_lens"] == [3, 3, 3, 3]


def test_roles_of_ones_own() -> None:
    """A role that no backend knows keeps its own default and takes the dtypes that it accepts."""
    slots_role, fill_role = Role("slot_ids", torch.int16, accepts=(torch.int64,)), FillRole("nowhere", -5)

    class Own(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=slots_role, pad=fill_role)

    assert fill(Own, {"ids": torch.tensor([3])}, 1) == {"ids": [3, -5, -5, -5]}
    with pytest.raises(BatchError, match=r"slot 'ids': expected int16.*got int32"):
        fill(Own, {"ids": torch.tensor([3], dtype=torch.int32)}, 1)


def test_sources() -> None:
    """A source is the slot's own name, a dotted path through objects and mappings, or a function of the batch."""

    class Sources(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source="ngram.info.lens")
        twice: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch["ids"] * 2)

    batch = {"ids": torch.tensor([4, 5]), "ngram": {"info": {"lens": torch.tensor([8, 9])}}}
    assert fill(Sources, batch, 2) == {"ids": [4, 5, 0, 0], "lens": [8, 9, 0, 0], "twice": [8, 10, 0, 0]}
    with pytest.raises(SlotGraphError, match=r"slot 'lens': batch\.ngram\.info\.lens is missing"):
        fill(Sources, {"ids": torch.tensor([4, 5]), "ngram": None}, 2)


def test_words_that_are_refused() -> None:
    """A path has names only, and keep() has a reason."""
    with pytest.raises(ValueError, match="names and dots"):
        side("a..b")
    with pytest.raises(ValueError, match="reason"):
        keep(" ")


@pytest.mark.parametrize(
    ("dtype", "fit", "misfit"),
    [
        (torch.bool, [True, False, 0, 1], [2, -1, 0.0, 1.0]),
        (torch.uint8, [0, 255], [-1, 256, 1.0, True]),
        (torch.int64, [-(2**63), 2**63 - 1], [2**63, 0.5, False]),
        (torch.float16, [0, 1.5, float("inf"), 65504.0], [70_000.0, True]),
        (torch.float32, [3, float("nan"), 2**70], [1e39, 10**400]),
    ],
)
def test_what_a_dtype_holds(dtype: torch.dtype, fit: list[Any], misfit: list[Any]) -> None:
    """No float in an index slot, no number for a truth value, nothing out of range."""
    assert all(holds(dtype, value) for value in fit)
    assert not any(holds(dtype, value) for value in misfit)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1.5, "number 1.5"),
        (2**40, "number 1099511627776"),
        ([1, 2, 3], r"shape \[3\]"),
        ([1.0, 2.0, 3.0, 4.0], "float32"),
        ([True, False, True, False], "bool"),
        (torch.arange(4), "int64"),
        (torch.arange(3, dtype=torch.int32), r"shape \[3\]"),
        ([2**40, 1, 1, 1], "int32 cannot hold"),
        ("four", "str"),
        (2**70, "int too big|number 1180591620717411303424"),
        (torch.ones(4, dtype=torch.int32).to_sparse(), "sparse_coo int32"),
        ([[1], [2, 3]], r"\[\[1\], \[2, 3\]\]"),
    ],
)
def test_results_that_do_not_fit(value: Any, message: str) -> None:
    """What a function returns is neither cast nor broadcast nor cut: the error names the slot and both sides."""
    shape = 1 if isinstance(value, int | float) else BATCH

    class Odd(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        odd: torch.Tensor = computed(lambda: value, shape=shape, dtype=torch.int32)

    with pytest.raises(ComputeError, match=rf"slot 'odd'.*{message}"):
        fill(Odd, {"ids": torch.tensor([1, 2])}, 2)


@pytest.mark.parametrize("value", [-1, 256, [-1], True])
def test_no_number_wraps_around(value: Any) -> None:
    """A number that an unsigned slot cannot hold is refused, alone and in a list."""
    byte = declaration_of({"byte": computed(lambda: value, shape=1, dtype=torch.uint8)})
    with pytest.raises(ComputeError, match="slot 'byte'"):
        fill(byte, {}, 2)


def test_results_that_fit() -> None:
    """Numbers, lists, arrays and tensors of the slot's own shape and kind are taken."""

    class Even(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        flag: torch.Tensor = computed(lambda: True, dtype=torch.bool)
        share: torch.Tensor = computed(lambda step: step.live(BATCH) / step.padded(BATCH), shape=1, dtype=torch.float32)
        rows: torch.Tensor = computed(lambda step: [9] * step.padded(BATCH), shape=BATCH, dtype=torch.int16)
        array: torch.Tensor = computed(_array, shape=BATCH, dtype=torch.int32)
        halves: torch.Tensor = computed(lambda: [1, 2.5, 3, 4], shape=BATCH, dtype=torch.float64)
        late: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=once(6))
        byte: torch.Tensor = computed(lambda: 255, shape=1, dtype=torch.uint8)
        huge: torch.Tensor = computed(lambda: 2**70, shape=1, dtype=torch.float32)

    shown = fill(Even, {"ids": torch.tensor([1, 2, 3])}, 3)
    assert shown["flag"] is True
    assert (shown["share"], shown["rows"], shown["array"]) == ([0.75], [9] * 4, [0, 1, 2, 3])
    assert (shown["halves"], shown["late"]) == ([1.0, 2.5, 3.0, 4.0], [6] * 4)
    assert (shown["byte"], shown["huge"]) == ([255], [2.0**70])


def _array(step: Step) -> Any:
    return torch.arange(step.padded(BATCH), dtype=torch.int32).numpy()


def test_values_that_fit_no_device() -> None:
    """A pad that only this backend's dtype cannot hold is refused when buffers are allocated."""
    wide = Role("wide", torch.int64)

    class Wide(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=wide, pad=2**40)

    narrow = Capabilities(roles={"wide": torch.int32})
    with pytest.raises(ComputeError, match=r"slot 'ids': 1099511627776 does not fit int32"):
        allocate(Wide.slotgraph, {BATCH: 4}, narrow, empty)
