"""Axes, slots, the words that declare them, kinds of one's own, and every fault of a slot, said when it is declared."""

import functools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slotgraph
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
    staged,
)
from slotgraph.dataflow.axes import Dim, shape_of
from slotgraph.dataflow.buffers import allocate, at_rest
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.errors import BatchError, ComputeError, DeclarationErrors
from slotgraph.dataflow.fill.bucket import Bucket
from slotgraph.dataflow.slots import BY_STEP, Constant, Copied, Output, Writer
from slotgraph.dataflow.sources import Compute, compute_of
from slotgraph.dataflow.tails import holds
from slotgraph.errors import SlotGraphError
from slotgraph.extend import HOST, FillRole, Role, Slot, once, side, slot
from tests.packing import filled
from tests.runners.models import decoder
from tests.strategies import declaration_of, empty

NPU_LIKE = Capabilities(roles={"cache_loc": torch.int32}, fills={"seq_len_fill": 0})
WIDTH, STEPS = Axis("WIDTH", fixed=True), Axis("STEPS", fixed=True)
CAPACITY = {BATCH: 4, TOKENS: 4, WIDTH: 3}
IDS: dict[str, Any] = {"ids": copied(BATCH, dtype=torch.int64, pad=0)}
SIZES = st.fixed_dictionaries({BATCH: st.integers(0, 50), TOKENS: st.integers(0, 50), STEPS: st.integers(1, 5)})
WHOLE = st.integers(0, 7)


@given(sizes=SIZES, a=WHOLE, b=WHOLE)
def test_expressions_come_to_what_plain_numbers_do(sizes: dict[Axis, int], a: int, b: int) -> None:
    """Sums and products over axes have a normal form, come to what plain numbers do, and axes can be written out."""
    size = (BATCH * STEPS + a) * b + TOKENS * TOKENS
    batch, tokens, steps = sizes[BATCH], sizes[TOKENS], sizes[STEPS]
    assert size.at(sizes) == (batch * steps + a) * b + tokens * tokens
    left, right = a * BATCH + b * BATCH + TOKENS, TOKENS + BATCH * (a + b)
    assert (left, hash(left), repr(left)) == (right, hash(right), repr(right))
    written = size.replace({TOKENS: BATCH * 3})
    assert TOKENS not in written.axes
    assert written.at(sizes) == size.at({**sizes, TOKENS: batch * 3})


def test_an_expression_tells_its_one_axis() -> None:
    """A size tells an axis where that is its one varying axis, to the first power."""
    told = [one.reveals() for one in (TOKENS * STEPS + 2, TOKENS * BATCH, TOKENS * TOKENS, Dim.of(STEPS))]
    assert told == [TOKENS, None, None, None]


@pytest.mark.parametrize(
    ("wrong", "error"), [(-1, ValueError), (1.5, TypeError), ("TOKENS", TypeError), (True, TypeError)]
)
def test_what_is_no_size_is_refused(wrong: object, error: type[Exception]) -> None:
    """A size is an axis, an expression or a whole number of at least 0."""
    with pytest.raises(error, match="size"):
        shape_of((BATCH, wrong))


@attrs.frozen(kw_only=True)
class Counter(Slot):
    """A kind of a user's own: how many fills there were, counted on the host."""

    start: int = 0
    counts: list[int] = attrs.field(factory=list, eq=False)

    def initial(self) -> int:
        return self.start

    def computes(self) -> Compute:
        return compute_of(self._next)

    def _next(self) -> int:
        self.counts.append(self.start + len(self.counts) + 1)
        return self.counts[-1]


def fill(fields: dict[str, Any], batch: Any, rows: int, capabilities: Capabilities = NPU_LIKE) -> dict[str, Any]:
    """What one fill of a four-row bucket shows, as lists."""
    slots = declaration_of(fields).slotgraph
    bucket = Bucket(slots, CAPACITY, capabilities, allocate(slots, CAPACITY, capabilities, empty))
    views = filled(bucket, batch, tuple(rows for _ in slots.varying)).views
    return {name: None if tensor is None else tensor.tolist() for name, tensor in views.items()}


def test_a_kind_of_ones_own_is_planned_and_filled_as_any_other() -> None:
    """A subclass of Slot takes part in declarations, plans and fills like any other."""
    counted = {**IDS, "count": slot(Counter(shape=1, dtype=torch.int64, start=40), init=False)}
    assert declaration_of(counted).slotgraph.slots["count"].kind == "counter"
    assert fill(counted, {"ids": torch.tensor([7, 8])}, 2) == {"ids": [7, 8, 0, 0], "count": [41]}


def test_computed_slots_follow_what_they_need() -> None:
    """One that reads another is computed after it, whatever their names are."""
    own: dict[str, Any] = {"shape": BATCH, "dtype": torch.int64, "placement": HOST}
    fields: dict[str, Any] = {
        "ids": copied(BATCH, dtype=torch.int64, pad=0, placement=HOST),
        "after": computed(lambda before: before + 1, **own),
        "before": computed(lambda ids: ids * 2, **own),
    }
    shown = fill(fields, {"ids": torch.tensor([7, 8])}, 2)
    assert (shown["before"], shown["after"]) == ([14, 16, 0, 0], [15, 17, 1, 1])


@attrs.frozen(kw_only=True)
class Written(Slot):
    """A kind of a user's own: the step writes it, as it writes an output slot."""

    @property
    def writers(self) -> frozenset[Writer]:
        return BY_STEP


def test_a_kind_that_the_step_writes_passes_as_an_output_slot() -> None:
    """Who writes a slot is what it says, not what class it is of: it goes through each check as an output slot does."""
    fields: dict[str, Any] = {**IDS, "made": slot(Written(shape=BATCH, dtype=torch.int64), init=False)}
    step: Any = lambda view: torch.add(view.ids, 1, out=view.made)
    runner = decoder(declaration_of(fields), step, buckets=[4], backend="cpu-capture", progress=False)
    assert runner({"ids": torch.tensor([7, 8])}).tolist() == [8, 9]
    assert slotgraph.check(runner, progress=False).findings == ()


def test_the_backend_decides_dtypes_and_pads_of_roles() -> None:
    """Roles take the device's dtype and pad value, other int64 slots stay what they are; fixed axes serve as values."""
    fields = {
        "out_cache_loc": copied(TOKENS, dtype=CACHE_LOC, pad=0),
        "positions": copied(TOKENS, dtype=torch.int64, pad=WIDTH),
        "seq_lens": copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL),
        "extend_seq_lens": constant(WIDTH, shape=BATCH, dtype=torch.int32),
    }
    buffers = allocate(declaration_of(fields).slotgraph, CAPACITY, NPU_LIKE, empty)
    assert [buffers[name].tensor.dtype for name in ("out_cache_loc", "positions")] == [torch.int32, torch.int64]
    places = torch.tensor([70_000, 9])
    batch = {"out_cache_loc": places, "positions": places, "seq_lens": torch.tensor([5, 6], dtype=torch.int32)}
    shown = [[70_000, 9, 0, 0], [70_000, 9, 3, 3], [5, 6, 0, 0], [3] * 4]
    assert fill(fields, batch, 2) == dict(zip(fields, shown, strict=True))


def test_a_role_that_no_backend_knows_keeps_its_default() -> None:
    """A role that no backend knows keeps its own default and takes the dtypes that it accepts."""
    role = Role("slot_ids", torch.int16, accepts=(torch.int64,))
    own = {"ids": copied(BATCH, dtype=role, pad=FillRole("nowhere", -5))}
    assert fill(own, {"ids": torch.tensor([3])}, 1) == {"ids": [3, -5, -5, -5]}
    with pytest.raises(BatchError, match=r"slot 'ids': expected int16.*got int32"):
        fill(own, {"ids": torch.tensor([3], dtype=torch.int32)}, 1)


def test_a_source_is_a_name_a_path_or_a_function() -> None:
    """A source is the slot's own name, a dotted path through objects and mappings, or a function of the batch."""
    sources: dict[str, Any] = {
        **IDS,
        "lens": copied(BATCH, dtype=torch.int64, pad=0, source="ngram.info.lens"),
        "twice": copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: batch["ids"] * 2),
    }
    batch = {"ids": torch.tensor([4, 5]), "ngram": {"info": {"lens": torch.tensor([8, 9])}}}
    assert fill(sources, batch, 2) == {"ids": [4, 5, 0, 0], "lens": [8, 9, 0, 0], "twice": [8, 10, 0, 0]}
    with pytest.raises(SlotGraphError, match=r"slot 'lens': batch\.ngram\.info\.lens is missing"):
        fill(sources, {"ids": torch.tensor([4, 5]), "ngram": None}, 2)
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
def test_values_that_a_dtype_cannot_hold_are_refused(dtype: torch.dtype, fit: list[Any], misfit: list[Any]) -> None:
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
def test_a_result_that_does_not_fit_is_refused(value: Any, message: str) -> None:
    """What a function returns is neither cast nor broadcast nor cut: the error names the slot and both sides."""
    shape = 1 if isinstance(value, int | float) else BATCH
    odd = computed(lambda: value, shape=shape, dtype=torch.int32)
    with pytest.raises(ComputeError, match=rf"slot 'odd'.*{message}"):
        fill({**IDS, "odd": odd}, {"ids": torch.tensor([1, 2])}, 2)


@pytest.mark.parametrize("value", [-1, 256, [-1], True])
def test_no_number_wraps_around(value: Any) -> None:
    """A number that an unsigned slot cannot hold is refused, alone and in a list."""
    with pytest.raises(ComputeError, match="slot 'byte'"):
        fill({"byte": computed(lambda: value, shape=1, dtype=torch.uint8)}, {}, 2)


def _array(step: Step) -> Any:
    return torch.arange(step.padded(BATCH), dtype=torch.int32).numpy()


FITTING: dict[str, tuple[Any, Any]] = {
    "flag": (computed(lambda: True, dtype=torch.bool), True),
    "share": (computed(lambda step: step.live(BATCH) / step.padded(BATCH), shape=1, dtype=torch.float32), [0.75]),
    "rows": (computed(lambda step: [9] * step.padded(BATCH), shape=BATCH, dtype=torch.int16), [9] * 4),
    "array": (computed(_array, shape=BATCH, dtype=torch.int32), [0, 1, 2, 3]),
    "halves": (computed(lambda: [1, 2.5, 3, 4], shape=BATCH, dtype=torch.float64), [1.0, 2.5, 3.0, 4.0]),
    "late": (staged(BATCH, dtype=torch.int64, pad=once(6)), [6] * 4),
    "byte": (computed(lambda: 255, shape=1, dtype=torch.uint8), [255]),
    "huge": (computed(lambda: 2**70, shape=1, dtype=torch.float32), [2.0**70]),
}


def test_a_result_that_fits_is_taken() -> None:
    """Numbers, lists, arrays and tensors of the slot's own shape and kind are taken."""
    shown = fill({**IDS, **{name: field for name, (field, _) in FITTING.items()}}, {"ids": torch.tensor([1, 2, 3])}, 3)
    assert shown == {"ids": [1, 2, 3, 0], **{name: right for name, (_, right) in FITTING.items()}}


def test_a_pad_that_the_devices_dtype_cannot_hold_is_refused() -> None:
    """A pad that only this backend's dtype cannot hold is refused when buffers are allocated."""
    wide = declaration_of({"ids": copied(BATCH, dtype=Role("wide", torch.int64), pad=2**40)}).slotgraph
    with pytest.raises(ComputeError, match=r"slot 'ids': 1099511627776 does not fit int32"):
        allocate(wide, CAPACITY, Capabilities(roles={"wide": torch.int32}), empty)


def test_starts_says_what_a_buffer_holds_before_its_first_fill() -> None:
    """`starts`: what a buffer holds before its first fill. A late capture finds what an early one would."""
    fields = {
        "counts": copied(BATCH, dtype=torch.int32, pad=-1, starts=1),
        "wide": copied(BATCH, 2, dtype=torch.int64, pad=SEQ_LEN_FILL, starts=WIDTH * 2),
        "plain": copied(BATCH, dtype=torch.int64, pad=-2),
    }
    buffers = allocate(declaration_of(fields).slotgraph, CAPACITY, Capabilities(), empty)
    for _ in range(2):
        with at_rest(buffers, Capabilities()):
            assert {b.name: set(b.tensor.flatten().tolist()) for b in buffers} == {
                "counts": {1},
                "wide": {6},
                "plain": {-2},
            }
        buffers["counts"].tensor.fill_(33)
    assert buffers["counts"].tensor.tolist() == [33] * 4
    batch = {"counts": [8], "wide": [[8, 8]], "plain": [8]}
    shown = {"counts": [8, -1, -1, -1], "wide": [[8, 8], *[[1, 1]] * 3], "plain": [8, -2, -2, -2]}
    assert fill(fields, batch, 1, Capabilities()) == shown  # from the first fill on no tail holds what came before it


class Parameters(Inputs):
    """A parameter by another name, by its own, of a kind that is derived; and a host slot that is none."""

    kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, argument="actual_seq_lengths_kv", placement="host")
    context_lens: torch.Tensor | None = copied(
        BATCH, dtype=torch.int32, pad=0, default=None, when="paged", placement="host", argument="context_lens"
    )
    ends: torch.Tensor = computed(
        lambda kv_lens: kv_lens.cumsum(0), shape=BATCH, dtype=torch.int64, placement=HOST, argument="actual_seq_lengths"
    )
    seq_lens_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST)
    where: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0, placement="host", argument="where")
    four: torch.Tensor = slot(
        Constant(value=4, shape=BATCH, dtype=torch.int32, placement=HOST, argument="lens"), init=False
    )


def test_a_declaration_tells_the_slot_of_each_argument() -> None:
    """The declaration tells for each argument the slot that it takes, of those that the settings leave."""
    declared = {"actual_seq_lengths_kv": "kv_lens", "actual_seq_lengths": "ends", "where": "where", "lens": "four"}
    assert Parameters.slotgraph.parameters == {**declared, "context_lens": "context_lens"}
    assert Parameters.slotgraph.under({"paged": False}).parameters == declared

    class Renamed(Parameters):
        kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, argument="actual_seq_kvlen", placement="host")

    assert Renamed.slotgraph.parameters["actual_seq_kvlen"] == "kv_lens"
    assert "actual_seq_lengths_kv" not in Renamed.slotgraph.parameters


@attrs.frozen(kw_only=True)
class Recomputed(Copied):
    """A kind that is copied, and computed too: which of the two comes last would depend on the lowering."""

    def computes(self) -> Compute:
        return compute_of(lambda out: out.add_(1))


INT32: Any = {"dtype": torch.int32}
INT64: Any = {"dtype": torch.int64}
HOSTED: Any = functools.partial(copied, BATCH, placement="host", argument="lens")
STAGED = attrs.evolve(staged(BATCH, **INT32, pad=0, placement=HOST).metadata["slotgraph.slot"], argument="staged")
READ_BEFORE = "it is a host parameter, read before the step, but the step writes it: copy it, or compute it"
NO_NAME = "no name of an operator's argument: give one, such as 'actual_seq_lengths_kv'"
FAULTS: list[tuple[Any, str]] = [
    (copied(BATCH, **INT64, pad=0, limit=TOKENS), "its limit TOKENS varies by step: give a number or a fixed axis"),
    (copied(BATCH, dtype=torch.float32, pad=0, limit=4), "it has a limit, but float32 is not a whole number"),
    (copied(BATCH, dtype=torch.bool, pad=False, limit=4), "it has a limit, but bool is not a whole number"),
    (copied(BATCH, **INT64, pad=0, limit=1.5), "limit=1.5: a size is an axis"),  # type: ignore[arg-type]
    (copied(BATCH, **INT64, pad=0, limit=-1), "limit=-1: a size is at least 0"),
    (copied(BATCH, **INT32, pad=0, starts=0.5), "0.5 does not fit int32"),
    (copied(BATCH, **INT32, pad=0, starts=BATCH), "its value BATCH varies by step"),
    (copied(BATCH, **INT32, pad=once(1), starts=2), "starts=2 and pad=once(...) both say what it holds at first"),
    (copied(BATCH, dtype=torch.uint8, pad=-1, starts=2), "-1 does not fit uint8"),
    (
        computed(lambda step: step.live(BATCH), **INT32, argument="rows"),
        "it is a host parameter but placed on the device: say placement='host', or leave argument= out",
    ),
    (
        HOSTED(dtype=torch.float32, pad=0, argument="float"),
        "it is a host parameter of float32: operators take whole numbers, torch.int32 or torch.int64",
    ),
    (HOSTED(dtype=torch.int16, pad=0, argument="short"), "it is a host parameter of int16: operators take whole"),
    (
        HOSTED(2, **INT32, pad=0, argument="wide"),
        "a host parameter of 2 dims: an operator takes one number, or one row",
    ),
    (HOSTED(**INT32, pad=0, argument="seq lens"), f"argument='seq lens': {NO_NAME}"),
    (HOSTED(**INT32, pad=0, argument=""), f"argument='': {NO_NAME}"),
    (HOSTED(**INT32, pad=0, restored=True, argument="kept"), READ_BEFORE),
    (slot(STAGED, init=False), READ_BEFORE),
    (slot(Output(shape=BATCH, **INT32, placement=HOST, argument="out"), init=False), READ_BEFORE),
    (HOSTED(**INT32, argument="ruleless"), "no tail rule: say pad=value"),
    (
        computed(lambda ids: ids + 1, shape=TOKENS, **INT32, placement=HOST, argument="ends"),
        "it needs slots on the device but is placed on the host",
    ),
    (HOSTED(**INT32, pad=0), "argument 'lens' takes the value of slot 'first'"),
    (slot(Recomputed(shape=BATCH, **INT64, pad=0)), "it is copied from the batch and computed"),
    (
        computed(lambda ids, settings, step: ids + settings.rank + step.live(TOKENS), shape=TOKENS, **INT64),
        "the host value 'step' would be frozen at capture: put what it takes from 'step' into a slot",
    ),
    (computed(lambda setings: setings, **INT64), "nor `step`, `settings` or `ranks`; did you mean 'settings'?"),
    (computed(lambda idz: idz, **INT64), "it needs 'idz', which is neither slot nor field of the declaration, nor"),
    (computed(lambda logits: logits, shape=TOKENS, **INT64), "it needs 'logits', an output"),
]


def test_every_fault_of_a_slot_is_told_at_once() -> None:
    """One class with a slot for each: as many faults, each by its slot and with the way out."""
    fields = {f"slot_{place}": field for place, (field, _) in enumerate(FAULTS)}
    good = {
        "ids": copied(TOKENS, **INT64, pad=0),
        "first": HOSTED(**INT32, pad=0),
        "logits": output(TOKENS, **INT64),
    }
    with pytest.raises(DeclarationErrors, match=f"Drawn breaks {len(FAULTS) + 1} rules") as refused:
        declaration_of({**good, **fields, "settings": copied(BATCH, **INT64, pad=0)})
    faults = [str(fault) for fault in refused.value.exceptions]
    for place, (_, said) in enumerate(FAULTS):
        assert any(f"slot 'slot_{place}': " in fault and said in fault for fault in faults), said
    assert any("slot 'settings': the name has a meaning of its own" in fault for fault in faults)


def test_no_function_may_ask_for_a_field_called_settings() -> None:
    """A field that is called settings is one, but no function may ask for it."""
    count = computed(lambda settings: settings, **INT64)
    with pytest.raises(DeclarationErrors, match="1 rule") as refused:
        declaration_of({"ids": copied(TOKENS, **INT64, pad=0), "count": count, "settings": "decode"})
    assert "slot 'count': it needs 'settings', which has a meaning of its own" in str(refused.value.exceptions[0])
