"""Functions that fill several slots by one call, and tails that are declared of computed slots, in runners.

tests/life/test_functions.py and tests/strategies.py draw them at random.
"""

import contextlib
import types
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import (
    BATCH,
    Axis,
    DecodeRunner,
    EagerRunner,
    InputBuffers,
    Inputs,
    Step,
    computed,
    copied,
    keep,
)
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.plan import FillPlan
from slotgraph.errors import CaptureError, ComputeError, DeclarationErrors
from slotgraph.extend import fills, once
from slotgraph.runners.serial import from_data, to_data
from tests.packing import backend_of

CALLS: Final = list[str]()
INT: Final = torch.int32
HEADS: Final = Axis("HEADS", fixed=True)
PAGES: Final = Axis("PAGES")


@fills("cu_seqlens", "longest")
def lengths(seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """On the device: where the tokens of each request begin, and the most tokens of one."""
    CALLS.append("lengths")
    starts = torch.zeros(seq_lens.shape[0] + 1, dtype=INT, device=seq_lens.device)
    starts[1:] = seq_lens.cumsum(0)
    return starts, seq_lens.amax().reshape(1)


@fills("rows", "count")
def rows_of(step: Step) -> tuple[list[int], int]:
    """On the host: a number for each row, and how many requests there are."""
    CALLS.append("rows_of")
    return [10 + row for row in range(step.padded(BATCH))], step.live(BATCH)


@fills("first", "last")
def ends(cu_seqlens: torch.Tensor, out: dict[str, torch.Tensor]) -> None:
    """On the device: both ends of each request, written where they are wanted."""
    CALLS.append("ends")
    out["first"].copy_(cu_seqlens[:-1])
    if "last" in out:
        out["last"].copy_(cu_seqlens[1:])


class Lengths(Inputs):
    """Lengths, and what follows from them."""

    seq_lens: torch.Tensor = copied(BATCH, dtype=INT, pad=1, then=lambda seq_lens: seq_lens + 1)
    cu_seqlens: torch.Tensor = computed(lengths, shape=BATCH + 1, dtype=INT, pad=-1)
    longest: torch.Tensor = computed(lengths, shape=1, dtype=INT)
    rows: torch.Tensor = computed(rows_of, shape=BATCH, dtype=torch.int64, pad=HEADS * 2, placement="device")
    count: torch.Tensor = computed(rows_of, dtype=INT, placement="host")
    first: torch.Tensor = computed(ends, shape=BATCH, dtype=INT)
    last: torch.Tensor | None = computed(ends, shape=BATCH, dtype=INT, pad=7, when="lasts")


def seen(view: Lengths) -> dict[str, Any]:
    """What a view shows."""
    names = Lengths.slotgraph.slots
    return {name: None if getattr(view, name) is None else getattr(view, name).tolist() for name in names}


def right(lens: list[int], padded: int, *, lasts: bool = True) -> dict[str, Any]:
    """What it must show."""
    live, pad = len(lens), padded - len(lens)
    cu = [sum(lens[:row]) for row in range(live + 1)] + [-1] * pad
    return {
        "seq_lens": lens + [1] * pad,
        "cu_seqlens": cu,
        "longest": [max([*lens, 1])],
        "rows": [10 + row for row in range(live)] + [6] * pad,
        "count": live,
        "first": cu[:-1],
        "last": cu[1 : live + 1] + [7] * pad if lasts else None,
    }


def made(backend: Any, *, lasts: bool = True, **options: Any) -> Any:
    """A captured runner."""
    given: Any = {"buckets": [2, 4, 8], "sizes": {HEADS: 3}, "settings": {"lasts": lasts}, "output_rows": BATCH}
    runner: Any = DecodeRunner(
        Lengths, lambda view: view.rows + view.cu_seqlens[:-1], backend=backend, **given, **options
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize("lasts", [True, False])
def test_one_call_fills_several_slots(lowering: str, *, lasts: bool) -> None:
    """In each lowering the host's function is called once a step, the device's in captures alone; tails are theirs."""
    runner = made("cpu-capture", lowering=lowering, lasts=lasts)
    for lens, bucket in (([5, 6, 7], 4), ([9], 2), ([1, 2, 3, 4, 5, 6, 7, 8], 8), ([4, 4, 4], 4)):
        CALLS.clear()
        view = runner.fill({"seq_lens": lens})
        assert runner.replay(view).tolist() == [10 + row + sum(lens[:row]) for row in range(len(lens))]
        assert seen(view) == right(lens, bucket, lasts=lasts)
        assert CALLS == ["rows_of"] or lowering == "slot_by_slot"
        assert CALLS.count("lengths") <= 1 >= CALLS.count("ends")  # the reference calls what the graph does again


@pytest.mark.parametrize("lowering", LADDER)
def test_one_call_fills_several_slots_in_steps(lowering: str) -> None:
    """In steps() too, and only if the number of requests changes; rows that left are in the tail."""
    runner, lens = made("cpu-capture", lowering=lowering), {"a": 5, "b": 6, "c": 7}
    for step in runner.steps({"seq_lens": [*lens.values()]}, keys=[*lens]):
        view = {name: runner.graphs.buffers[name].tensor for name in ("cu_seqlens", "rows", "last", "count")}
        padded, expected = 2 if len(lens) < 3 else 4, [*lens.values()]
        shown = {
            name: one[: padded + (name == "cu_seqlens")].tolist() if one.dim() else one.item()
            for name, one in view.items()
        }
        assert shown == {name: value for name, value in right(expected, padded).items() if name in shown}
        assert runner.graphs.buffers["longest"].tensor.item() == max([*expected, 1])
        CALLS.clear()
        if step.number == 1:
            step.leave(["b"])
            del lens["b"]
            lens = {"a": lens["a"], "c": lens["c"]}
        if step.number == 3:
            step.join({"seq_lens": [40, 2]}, ["d", "e"])
        lens = {key: rows + 1 for key, rows in lens.items()} | ({"d": 40, "e": 2} if step.number == 3 else {})
        if step.number == 5:
            break


@fills("doubled", "here")
def of_number(number: int) -> tuple[int, int]:
    """On the host: two values of a field."""
    CALLS.append("of_number")
    return 2 * number, number


class Placed(Inputs):
    """A function whose first slot is on the device, where a packet brings it after the other was computed."""

    ids: torch.Tensor = copied(BATCH, dtype=INT, pad=0)
    number: int
    doubled: torch.Tensor = computed(of_number, dtype=INT)
    here: torch.Tensor = computed(of_number, dtype=INT, placement="host")


@pytest.mark.parametrize("lowering", LADDER)
def test_slots_of_one_call_on_both_sides_have_the_same_batch(lowering: str) -> None:
    """Whichever of them is written first, one call gives both, and none has the value of an earlier batch."""
    runner: Any = DecodeRunner(
        Placed, lambda view: view.ids + view.doubled, buckets=[2], backend="cpu-capture", lowering=lowering
    )
    runner.capture()
    for number in (3, 4, 5):
        CALLS.clear()
        view = runner.fill({"ids": [1], "number": number})
        assert (view.doubled.item(), view.here.item()) == (2 * number, number)
        assert CALLS == ["of_number"] or lowering == "slot_by_slot"


def test_rows_that_live_alone_have_no_tail(backend: Backend) -> None:
    """Eager steps see live rows, and the same numbers."""
    options: Any = {"backend": backend, "sizes": {HEADS: 3}, "settings": {"lasts": True}}
    for no_copy in (False, True):
        runner: Any = EagerRunner(Lengths, seen, no_copy=no_copy, **options)
        for lens in ([5, 6, 7], [5, 6, 7, 8], [2, 3]):
            CALLS.clear()  # the first step asks which sizes functions want
            assert runner({"seq_lens": torch.tensor(lens, dtype=INT, device=backend.device)}) == right(lens, len(lens))
        assert sorted(CALLS) == ["ends", "lengths", "rows_of"]


def test_micro_batches_have_tails_of_their_own(backend: Backend) -> None:
    """Eagerly and in a graph, where live rows are on the device."""
    names = ("cu_seqlens", "longest", "first", "last")

    def halves(view: Lengths) -> list[torch.Tensor]:
        parts = [view.narrow(BATCH, start, start + 4) for start in (0, 4)]
        return [getattr(part, name).clone() for part in parts for name in names]

    runner: Any = DecodeRunner(
        Lengths, halves, buckets=[8], backend=backend, sizes={HEADS: 3}, settings={"lasts": True}, output_rows=None
    )
    runner.capture()
    for lens in ([5, 6, 7], [1, 2, 3, 4, 5, 6], [9]):
        batch = {"seq_lens": torch.tensor(lens, dtype=INT, device=backend.device)}
        expected = [right(part, 4) for part in (lens[:4], lens[4:])]
        assert [one.tolist() for one in runner(batch)] == [part[name] for part in expected for name in names]
        view = runner.fill(batch)
        runner.replay(view)
        CALLS.clear()
        for start, part in zip((0, 4), expected, strict=True):
            assert seen(view.narrow(BATCH, start, start + 4)) == part
        assert sorted(CALLS) == ["ends", "ends", "lengths", "lengths", "rows_of", "rows_of"]


def test_input_buffers_fill_them_in_graphs_and_out_of_them(backend: Backend) -> None:
    """fill() runs all functions; behind fill_in_graph() a graph runs those of the device."""
    sizes: Any = {BATCH: 4, HEADS: 3}
    for in_graph in (False, True):
        buffers: Any = InputBuffers(Lengths, sizes, settings={"lasts": True}, backend=backend)
        graph = None
        if in_graph:
            buffers.prepare({BATCH: 4})
            graph = backend.capture(lambda: buffers.fill_in_graph({BATCH: 4}))  # noqa: B023 - at once
        for lens in ([5, 6, 7], [3]):
            view = buffers.fill({"seq_lens": torch.tensor(lens, dtype=INT, device=backend.device)}, {BATCH: 4})
            if graph is not None:
                graph.replay()
            backend.synchronize()
            assert seen(view) == right(lens, 4)


def test_plans_and_explanations_tell() -> None:
    """The plan has tails and calls, as text and as data; the table has the tail."""
    runner = made("cpu-capture", lowering="foreach")
    plan = runner.plan(4)
    assert from_data(to_data(plan), FillPlan) == plan
    text = str(plan)
    assert (
        "compute cu_seqlens = lengths(seq_lens) on the device, one call for cu_seqlens and longest, then [live:] = -1\n"
        in text
    )
    assert "compute count = rows_of(step) on the host, one call for rows and count\n" in text
    assert "compute _live_BATCH = live_rows(step) on the host" in text
    rows = {one.name: one.row() for one in slotgraph.explain(runner).declaration.slots}
    assert rows["cu_seqlens"]["tail"] == "pad=-1"
    assert rows["longest"]["tail"] is None


@pytest.mark.parametrize("lowering", ["slot_by_slot", "foreach", "in_graph"])
def test_check_knows_tails_of_computed_slots(lowering: str) -> None:
    """A sound step passes; one whose live rows depend on such a tail does not, unless the slot says poison=()."""
    assert slotgraph.check(made("cpu-capture", lowering=lowering), progress=False).findings == ()
    for poison, slots in ((None, {"rows"}), ((), set[str]())):

        class Summed(Inputs):
            ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
            rows: torch.Tensor = computed(
                lambda step: list(range(step.padded(BATCH))), shape=BATCH, dtype=torch.int64, pad=0, poison=poison
            )

        runner = DecodeRunner(
            Summed, lambda view: view.ids + view.rows.sum(), buckets=[4], backend="cpu-capture", lowering=lowering
        )
        runner.capture()
        assert {one.slot for one in slotgraph.check(runner, progress=False).findings} == slots


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (
            lambda ids: (ids, ids.sum()),
            r"slot 'one': its function's result: expected int64 of shape \[1\], got int64 of shape \[\]",
        ),
        (
            lambda ids: (ids.int(), ids[:1]),
            r"slot 'all': its function's result: expected int64 of shape \[4\], got int32",
        ),
        (lambda ids: ids, r"slot 'all': its function fills all, one: return a tuple with a value for each, got tensor"),
        (lambda ids: (ids,), r"slot 'all': its function fills all, one: return a tuple with a value for each"),
        (lambda ids: ids.nothing, r"slot 'all': its function .*<lambda> raised AttributeError"),
    ],
)
@pytest.mark.parametrize("placement", ["host", "device"])
def test_each_result_is_checked_by_its_own_slot(value: Any, what: str, placement: Any) -> None:
    """The error names the slot, and the next step is none the worse."""
    is_wrong, good = True, fills("all", "one")(lambda ids: value(ids) if is_wrong else (ids, ids[:1]))

    class Both(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement=placement)
        all: torch.Tensor = computed(good, shape=BATCH, dtype=torch.int64)
        one: torch.Tensor = computed(good, shape=1, dtype=torch.int64)

    runner: Any = DecodeRunner(Both, lambda view: view.all + view.one, buckets=[4], backend="cpu-capture")
    if placement == "host":
        runner.capture()
    with pytest.raises(ComputeError if placement == "host" else CaptureError, match=what):
        runner({"ids": [5, 6]}) if placement == "host" else runner.capture()
    is_wrong = False
    if placement == "host":
        assert [runner({"ids": ids}).tolist() for ids in ([5, 6], [7, 1])] == [[10, 11], [14, 8]]


@pytest.mark.parametrize("lowering", LADDER)
def test_slots_that_a_subclass_drops_are_not_filled(lowering: str) -> None:
    """Those of functions on the device and on the host, and of one that writes `out`; the others are as before."""
    fewer: Any = types.new_class("Fewer", (Lengths,), {"drop": ["longest", "count", "last"]})
    given: Any = {"buckets": [2, 4], "sizes": {HEADS: 3}, "settings": {"lasts": True}, "output_rows": BATCH}
    runner: Any = DecodeRunner(
        fewer,
        lambda view: view.rows + view.cu_seqlens[:-1] + view.first,
        backend="cpu-capture",
        lowering=lowering,
        **given,
    )
    runner.capture()
    for lens in ([5, 6, 7], [9], [4, 4, 4]):
        expected = right(lens, 2 if len(lens) < 3 else 4)
        view = runner.fill({"seq_lens": lens})
        assert runner.replay(view).tolist() == [10 + row + 2 * sum(lens[:row]) for row in range(len(lens))]
        assert {name: getattr(view, name).tolist() for name in ("cu_seqlens", "rows", "first")} == {
            name: expected[name] for name in ("cu_seqlens", "rows", "first")
        }


def declared(base: Any = Inputs, drop: Any = (), **slots: Any) -> Any:
    """A declaration of some slots."""
    body = {"seq_lens": copied(BATCH, dtype=INT, pad=1), **slots}
    return type("Faulty", (base,), {"__annotations__": dict.fromkeys(body, torch.Tensor), **body}, drop=drop)


AGAIN: Final[Any] = rows_of  # type checkers refuse it, too
BOTH: Final = {
    "cu_seqlens": computed(lengths, shape=BATCH + 1, dtype=INT),
    "longest": computed(lengths, shape=1, dtype=INT),
}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (
            lambda: declared(**{**BOTH, "longest": computed(lambda seq_lens: seq_lens[:1], shape=1, dtype=INT)}),
            "see longest",
        ),
        (lambda: declared(cu_seqlens=BOTH["cu_seqlens"]), "compute each of them by it, and no other slot, see longest"),
        (lambda: declared(**BOTH, other=computed(lengths, shape=1, dtype=INT)), "see other"),
        (lambda: declared(declared(**BOTH), longest=copied(1, dtype=INT)), "no other slot, see longest"),
        (
            lambda: declared(**{**BOTH, "longest": computed(lengths, shape=1, dtype=INT, placement="host")}),
            "slot 'longest': it needs slots on the device but is placed on the host",
        ),
        (
            lambda: declared(kept=computed(lambda step: 1, shape=BATCH, dtype=INT, pad=keep("no one reads it"))),
            "slot 'kept': its function gives every row, and keep",
        ),
        (
            lambda: declared(kept=computed(lambda step: 1, shape=BATCH, dtype=INT, pad=once(1))),
            "slot 'kept': its function gives every row, and once=1",
        ),
        (
            lambda: declared(kept=computed(lambda step: 1, shape=1, dtype=INT, pad=1)),
            "say pad=value of a dim that varies",
        ),
        (lambda: declared(kept=computed(lambda step: 1, shape=BATCH, dtype=INT, pad=0.5)), "0.5 does not fit int32"),
        (
            lambda: declared(ids=copied(BATCH, dtype=INT, pad=0, then=rows_of)),
            "one call of rows_of fills rows, count, by @fills: give a function of a single value",
        ),
        (lambda: declared(kept=computed(lambda step: 1, dtype=INT, again=AGAIN)), "slot 'kept': again="),
    ],
)
def test_what_cannot_be_declared_is_refused_by_name(make: Any, what: str) -> None:
    """Slots of one call belong together, also in subclasses; a function's slot has a tail by value or none."""
    with pytest.raises(DeclarationErrors) as refused:
        make()
    assert what in str(refused.value)


@pytest.mark.parametrize("names", [(), ("one",), ("one", "one"), (lengths,), ("one", 2)])
def test_fills_takes_names(names: Any) -> None:
    """Used without names, by one name or by the same one twice, it says what it takes."""
    with pytest.raises(TypeError, match="@fills takes the names of two slots or more, all different"):
        fills(*names)


def test_fills_takes_functions() -> None:
    """A kernel that is none is refused on a device without kernels, too."""
    wrong: Any = 5
    with pytest.raises(TypeError, match="kernel= of @fills takes a function that launches it, got 5"):
        fills("one", "two", kernel=wrong)
    with pytest.raises(TypeError, match="@fills marks a function, got 5"):
        fills("one", "two")(wrong)


def test_a_subclass_may_declare_them_anew() -> None:
    """With the same function and another shape, dtype or tail."""

    class Wider(declared(**BOTH)):  # type: ignore[misc] # a declaration that was made here
        longest: torch.Tensor = computed(lengths, shape=1, dtype=INT)
        cu_seqlens: torch.Tensor = computed(lengths, shape=BATCH + 1, dtype=INT, pad=9)

    runner: Any = DecodeRunner(
        Wider, lambda view: view.cu_seqlens.clone(), buckets=[4], backend="cpu", output_rows=None
    )
    runner.capture()
    assert runner({"seq_lens": [3, 4]}).tolist() == [0, 3, 7, 9, 9]


def test_an_axis_that_settings_switch_off_is_not_asked_for() -> None:
    """A tail's live rows are counted only while its slot is there."""

    class Paged(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        pages: torch.Tensor | None = copied(PAGES, dtype=torch.int64, pad=0, when="paged")
        next_pages: torch.Tensor | None = computed(
            lambda ids, pages: pages + 1, shape=PAGES, dtype=torch.int64, pad=3, when="paged"
        )

    for paged in (True, False):
        sizes, batch = ({PAGES: 4}, {"pages": [1, 2]}) if paged else ({}, {})
        runner: Any = DecodeRunner(
            Paged, lambda view: view.ids + 1, buckets=[2], sizes=sizes, settings={"paged": paged}, backend="cpu-capture"
        )
        runner.capture()
        view = runner.fill({"ids": [5], **batch})
        assert runner.replay(view).tolist() == [6]
        assert view.next_pages is None or view.next_pages.tolist() == [2, 3, 3, 3]


def test_values_of_any_dtype_are_tails() -> None:
    """Of halves, NaN, bools and small or large integers, on both sides, along one dim or two."""
    values = {
        torch.bool: True, torch.uint8: 255, torch.int16: -7, torch.int64: 1 << 40, torch.bfloat16: -2.5,
        torch.float16: float("inf"), torch.float32: float("nan"), torch.float64: -0.0,
        torch.uint16: 65535, torch.uint32: 1 << 31, torch.uint64: 1 << 62, torch.complex64: 1.5,
    }  # fmt: skip
    for dtype, value in values.items():
        for on_host in (False, True):
            function: Any = (
                (lambda step: torch.ones(step.padded(BATCH), step.padded(BATCH), dtype=dtype))  # noqa: B023 - at once
                if on_host
                else (lambda ids: torch.ones(len(ids), len(ids), dtype=dtype, device=ids.device))  # noqa: B023
            )

            class Squared(Inputs):
                ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
                found: torch.Tensor = computed(function, shape=(BATCH, BATCH), dtype=dtype, pad=value)

            runner: Any = DecodeRunner(Squared, lambda view: view.ids, buckets=[3], backend="cpu-capture")
            runner.capture()
            view = runner.fill({"ids": [1, 2]})
            runner.replay(view)
            right = torch.full((3, 3), value, dtype=dtype)
            right[:2, :2] = 1
            assert torch.equal(view.found.view(torch.uint8), right.view(torch.uint8)), (dtype, on_host)


@pytest.mark.parametrize("name", ["cpu", "cpu-capture"])
def test_interrupted_calls_leave_nothing_for_the_next(name: str) -> None:
    """A function that raises, and results that do not fit, leave no part of their step to the next one."""
    fails, batch = [False], [0]

    @fills("one", "two")
    def both(settings: Any) -> tuple[Any, Any]:
        del settings
        batch[0] += 1
        return batch[0], "no number" if fails[0] else batch[0]

    class Counted(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        one: torch.Tensor = computed(both, shape=1, dtype=torch.int64)
        two: torch.Tensor = computed(both, shape=1, dtype=torch.int64, placement="host")

    runner: Any = DecodeRunner(
        Counted, lambda view: view.ids + view.one, buckets=[2], settings=1, backend=backend_of(name)
    )
    runner.capture()
    for number in range(6):
        fails[0] = number % 3 == 1
        with contextlib.suppress(ComputeError):
            view = runner.fill({"ids": [0]})
            runner.replay(view)
            assert view.one.item() == view.two.item() == batch[0]
