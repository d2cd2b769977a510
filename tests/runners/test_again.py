"""Functions on the host that run only if what they depend on has changed: `computed(..., again=...)`."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch

import slotgraph
from slotgraph import BATCH, DecodeRunner, EagerRunner, InputBuffers, Inputs, Step, computed, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LADDER, Capabilities
from slotgraph.dataflow.lowering import LOWERINGS
from slotgraph.dataflow.packet import Feed
from slotgraph.errors import CaptureError, ComputeError, DeclarationErrors
from slotgraph.extend import Group, fills
from slotgraph.pool import InputPool
from slotgraph.reports import explain_declaration
from tests.packing import NAME, backend_of
from tests.runners.models import decoder, ready

WAYS: Final = [("cpu-capture", lowering) for lowering in LADDER] + [
    ("cpu", "in_graph"),
    ("cpu", "foreach"),
    (NAME, "foreach"),
]
ways = pytest.mark.parametrize(("name", "lowering"), WAYS)
CALLS: Final = list[list[int]]()


def planned(kv_lens: torch.Tensor, step: Step) -> list[int]:
    """Where each request's tokens begin, as libraries plan attention; padded rows count."""
    CALLS.append(kv_lens.tolist())
    starts = [0]
    for length in kv_lens.tolist():
        starts.append(starts[-1] + length * step.live(BATCH))
    return starts


class Planning(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host")
    starts: torch.Tensor = computed(planned, shape=BATCH + 1, dtype=torch.int64, again=("kv_lens",))


def attended(view: Any) -> torch.Tensor:
    """One number of each request, of its own part of the plan."""
    made: torch.Tensor = view.ids * 1000 + view.starts[1:] - view.starts[:-1]
    return made


def batch_of(lens: Sequence[int], ids: int = 1) -> dict[str, Any]:
    """Requests of these lengths."""
    return {"ids": [ids] * len(lens), "kv_lens": [*lens]}


def expected(lens: Sequence[int], ids: int = 1) -> list[int]:
    """What the step gives for them."""
    return [ids * 1000 + length * len(lens) for length in lens]


SEQUENCE: Final = (
    ([3, 4], 1, True),
    ([3, 4], 2, False),  # other ids, which the plan does not depend on
    ([3, 5], 2, True),
    ([3], 2, True),  # another bucket
    ([3, 5], 2, True),
    ([3, 5], 1, False),
    ([1, 2, 3], 1, True),
    ([1, 2, 3, 1], 1, True),  # another size in the same bucket: the padded row had the same length
    ([1, 2, 3, 1, 5], 1, True),  # no graph takes it
    ([1, 2, 3, 1, 5], 2, False),
    ([1, 2, 3], 3, True),
)


@pytest.mark.parametrize("host", [False, True])
@ways
def test_it_runs_if_what_is_named_or_a_size_has_changed(name: str, lowering: str, *, host: bool) -> None:
    """Whatever the lowering and the placement; at a capture once for each bucket."""

    class Placed(Planning):
        starts: torch.Tensor = computed(
            planned, shape=BATCH + 1, dtype=torch.int64, again=("kv_lens",), placement="host" if host else "device"
        )

    backend = backend_of(name, lowering)
    made: Any = DecodeRunner(Placed, attended, buckets=[1, 2, 4], backend=backend, lowering=lowering, output_rows=BATCH)
    CALLS.clear()
    runner = ready(made)
    assert [*CALLS] == [[1] * rows for rows in (4, 2, 1)]
    known = lowering != "slot_by_slot"  # the reference computes each slot in each step
    for lens, ids, runs in SEQUENCE:
        CALLS.clear()
        assert runner(batch_of(lens, ids)).tolist() == expected(lens, ids)
        assert bool(CALLS) is (runs or not (known or len(lens) > 4))
    if known:
        assert runner.stats()["again"] == {"starts": {"ran": 3 + 7, "kept": 2}}


def test_a_function_says_whether_it_runs() -> None:
    """It takes what functions take, a field as well; other sizes need no word."""

    class Told(Planning):
        replans: bool = False
        starts: torch.Tensor = computed(
            planned, shape=BATCH + 1, dtype=torch.int64, again=lambda replans, step: replans and step.live(BATCH) > 1
        )

    runner = EagerRunner(Told, attended, backend="cpu")
    assert runner(batch_of([3, 4])).tolist() == expected([3, 4])
    assert runner(batch_of([3, 9])).tolist() == expected([3, 4])  # that is what it was told
    assert runner({**batch_of([3, 9]), "replans": True}).tolist() == expected([3, 9])
    assert runner({**batch_of([5, 9]), "replans": True}).tolist() == expected([5, 9])
    assert runner(batch_of([7])).tolist() == expected([7])
    assert runner({**batch_of([8]), "replans": True}).tolist() == expected([7])
    assert runner.stats()["again"] == {"starts": {"ran": 4, "kept": 2}}


def test_fields_are_compared_by_value() -> None:
    """Also one that is changed in place."""

    class Versions(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        version: list[int]
        twice: torch.Tensor = computed(lambda version: version[0] * 2, shape=1, dtype=torch.int64, again=("version",))

    runner: Any = decoder(Versions, lambda view: view.ids + view.twice, backend="cpu-capture")
    version = [3]
    assert runner({"ids": [1], "version": version}).tolist() == [7]
    assert runner({"ids": [2], "version": [3]}).tolist() == [8]
    version[0] = 4
    assert runner({"ids": [1], "version": version}).tolist() == [9]
    assert runner.stats()["again"] == {"twice": {"ran": 2, "kept": 1}}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int32])
def test_slots_of_any_dtype_are_compared(dtype: torch.dtype) -> None:
    """Also of those that NumPy does not have; each number and each size counts."""

    class Scaled(Inputs):
        scales: torch.Tensor = copied(BATCH, dtype=dtype, pad=0, placement="host")
        most: torch.Tensor = computed(
            lambda scales: scales.float().max().view(1), shape=1, dtype=torch.float32, again=("scales",)
        )

    runner = EagerRunner(Scaled, lambda view: view.most.clone(), backend="cpu")
    for scales, most in (([0, 1], 1), ([0, 1], 1), ([0, 0], 0), ([0], 0)):
        assert runner({"scales": torch.tensor(scales, dtype=torch.float32).to(dtype)}).item() == most
    assert runner.stats()["again"] == {"most": {"ran": 3, "kept": 1}}


@pytest.mark.parametrize("lowering", ["in_graph", "foreach", "direct"])
def test_a_result_that_graphs_have_no_room_for_is_refused_by_name(lowering: str) -> None:
    """The slot keeps the plan that it has, and the next batch of it runs; so if the function raises."""
    longer = [0]

    def laid_out(kv_lens: torch.Tensor) -> torch.Tensor:
        if longer[0] < 0:
            raise ValueError("the layout of this plan is another one")
        return torch.cat([kv_lens, kv_lens[: longer[0]]])

    class Plans(Inputs):
        kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host")
        plan: torch.Tensor = computed(laid_out, shape=BATCH, dtype=torch.int32, again=("kv_lens",))

    runner: Any = decoder(Plans, lambda view: view.plan * 2, backend="cpu-capture", lowering=lowering)
    assert runner({"kv_lens": [3, 4]}).tolist() == [6, 8]
    plans = runner.graphs.buffers["plan"].tensor
    for longer[0], message in ((1, "slot 'plan': its function's result: expected int32 of shape"), (-1, "another one")):
        with pytest.raises(ComputeError, match=message):
            runner({"kv_lens": [5, 6]})
        assert plans.tolist()[:2] == [3, 4]
    longer[0] = 0
    assert runner({"kv_lens": [5, 6]}).tolist() == [10, 12]
    longer[0] = 1
    with pytest.raises(CaptureError, match="slot 'plan': its function's result"):
        decoder(Plans, lambda view: view.plan * 2, backend="cpu-capture", lowering=lowering)


def test_graphs_of_one_s_own(backend: Backend) -> None:
    """`InputBuffers` keeps it, too: also in a fill in two parts."""
    buffers = InputBuffers(Planning, {BATCH: 4}, backend=backend)
    CALLS.clear()
    for lens, ids, runs in SEQUENCE[:6]:
        CALLS.clear()
        rows = 2 if len(lens) == 2 else 4
        view = buffers.fill(batch_of(lens, ids), {BATCH: rows})
        assert attended(view).tolist()[: len(lens)] == expected(lens, ids)
        assert bool(CALLS) is runs
    buffers.fill(batch_of([6, 7]), {BATCH: 2}, only=["kv_lens"])
    view = buffers.fill(batch_of([6, 7], 3), {BATCH: 2}, skip=["kv_lens"])
    assert attended(view).tolist() == expected([6, 7], 3)
    assert buffers.stats()["again"]["starts"]["kept"] == 3


class Looping(Planning):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)


class Advancing(Looping):
    kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host", then=lambda kv_lens: kv_lens + 1)


EDITS: Final[dict[int, Callable[[Any], object]]] = {
    3: lambda step: step.edit(["b"], kv_lens=[7]),
    5: lambda step: step.edit(["a"], ids=[5]),
    7: lambda step: step.leave(["a"]),
}


@pytest.mark.parametrize("inputs", [Looping, Advancing])
@ways
def test_steps_without_an_edit_of_what_is_named_keep_it(name: str, lowering: str, inputs: type[Inputs]) -> None:
    """It runs where lengths or the number of requests change, and in each step if lengths advance."""
    backend, moves = backend_of(name, lowering), inputs is Advancing
    runner: Any = decoder(inputs, attended, backend=backend, lowering=lowering, output_rows=BATCH)
    CALLS.clear()
    for step in runner.steps(batch_of([3, 4]), keys=["a", "b"]):
        number = step.number
        lens = {"a": 3 + number * moves, "b": 4 + number * moves if number < 3 else 7 + (number - 3) * moves}
        ids = {"a": 1 + number if number < 5 else number, "b": 1 + number}
        assert dict(step.tokens()) == {key: ids[key] * 1000 + lens[key] * len(step.keys) for key in step.keys}
        if number != 1 and lowering != "slot_by_slot":  # the loop begins without trust in any contents
            assert bool(CALLS) is (moves or number in {0, 3, 7})
        CALLS.clear()
        EDITS.get(number + 1, id)(step)
        if number == 9:
            break


def test_explain_says_when_it_runs() -> None:
    """And that a rule makes it run in each step."""

    def notes(inputs: type[Inputs]) -> str:
        slots = explain_declaration(inputs.slotgraph, Capabilities(), "cpu").slots
        return next(str(slot.row()["comes from"]) for slot in slots if slot.name == "starts")

    assert notes(Looping) == "planned(kv_lens, step), again if changed(kv_lens)"
    assert notes(Advancing).endswith("changed(kv_lens), in each step of steps(), since kv_lens advances")


def test_its_memory_is_not_shared() -> None:
    """Another runner's fill would overwrite it."""
    pool = InputPool("decode", "verify")
    runners = [
        DecodeRunner(Planning, attended, buckets=[4], backend="cpu-capture", phase=pool[phase], sharing=True)
        for phase in ("decode", "verify")
    ]
    for runner in runners:
        runner.capture()
    for lens in ([3, 4], [3, 4], [5]):
        for runner in runners:
            assert runner(batch_of(lens)).tolist() == expected(lens)
    assert pool.layout is not None
    assert "no fill writes all of it in each step" in pool.layout.why("decode", "starts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"again": ("ids",)}, "again= is for functions on the host"),
        ({"again": ("kv_lans",)}, "it needs 'kv_lans', which is neither slot nor field.*did you mean 'kv_lens'"),
        ({"again": "kv_lens"}, "again='kv_lens': give a tuple of names of slots and fields"),
        ({"again": ["kv_lens"]}, "give a tuple of names of slots and fields"),
        ({"again": (5,)}, "give a tuple of names of slots and fields"),
        ({"again": lambda ids: bool(ids[0])}, "again= is for functions on the host"),
        ({"again": ("starts",)}, "starts -> starts"),
        ({"again": ("kv_lens",), "function": lambda ranks: ranks.live(BATCH)}, "again= is for functions on the host"),
        ({"again": ("kv_lens",), "function": lambda ids: ids}, "again= is for functions on the host"),
    ],
)
def test_what_the_host_cannot_compare_is_refused(options: dict[str, Any], message: str) -> None:
    """When the class is defined, by name."""
    given: Any = {"function": planned, "shape": BATCH + 1, "dtype": torch.int64, **options}
    declared: Any = computed(**given)
    with pytest.raises(DeclarationErrors) as refusal:

        class Wrong(Planning):
            starts: torch.Tensor = declared

    assert re.search(message, str(refusal.value.exceptions))


def test_check_finds_nothing_where_all_is_named() -> None:
    """With drawn batches and with given ones."""
    runner: Any = decoder(Planning, attended, backend="cpu-capture", output_rows=BATCH)
    assert slotgraph.check(runner, values={"kv_lens": (1, 9)}, progress=False).ok
    assert slotgraph.check(runner, [batch_of(lens, ids) for lens, ids, _ in SEQUENCE], progress=False).ok


class Grouped(Inputs):
    """A plan for each cache group, of the lengths in it."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    lens: dict[str, torch.Tensor] = copied(
        BATCH, dtype=torch.int64, pad=0, placement="host", group=Group("full", "sliding")
    )
    plan: dict[str, torch.Tensor] = computed(
        lambda lens: int(lens.sum()),
        dtype=torch.int64,
        placement="host",
        again=("lens",),
        group=Group("full", "sliding"),
    )


@ways
def test_each_slot_of_a_group_depends_on_its_own(name: str, lowering: str) -> None:
    """`again=` names a group, as the function does: of another cache group's lengths no plan is made anew."""
    runner = ready(
        DecodeRunner(
            Grouped, lambda view: view.ids + 1, buckets=[2], backend=backend_of(name, lowering), lowering=lowering
        )
    )
    for full in (1, 1, 2):
        view = runner.fill({"ids": [1], "lens": {"full": [full], "sliding": [7]}})
        assert [one.item() for one in view.plan.values()] == [full, 7]
    again = runner.stats()["again"]
    kept = [again[slot]["kept"] for slot in ("plan.full", "plan.sliding")]
    assert kept == ([0, 0] if lowering == "slot_by_slot" else [1, 2])  # the reference calls each time


@pytest.mark.parametrize("kind", [list, torch.Tensor])
def test_a_value_on_the_device_is_uploaded_without_a_wait(
    backend: Backend, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the backend's own upload where it has one, with the bytes of the reference, whatever the result's strides."""
    moved = list[torch.Tensor]()
    move = Feed.move

    def noted(feed: Feed, source: torch.Tensor) -> torch.Tensor:
        if len(source) > 1:  # other slots have one row
            moved.append(source)
        return move(feed, source)

    def begins(kv_lens: torch.Tensor) -> Any:
        made = torch.arange(10, dtype=torch.int64)[::2] * kv_lens[0]
        return made.tolist() if kind is list else torch.stack([made, made], 1)[:, 0]

    class Moved(Planning):
        starts: torch.Tensor = computed(begins, shape=BATCH + 1, dtype=torch.int64, again=("kv_lens",))

    monkeypatch.setattr(Feed, "move", noted)
    for lowering in backend.capabilities.lowerings:
        runner = decoder(Moved, lambda view: view.starts.clone(), backend=backend, lowering=lowering, output_rows=None)
        bucket = next(iter(runner.graphs.captured.values())).filling.bucket
        is_copied = kind is torch.Tensor and backend.device.type == "cpu"  # from the same memory
        moved.clear()
        for length in (3, 3, 4):
            assert runner(batch_of([length])).tolist() == [length * place for place in range(0, 10, 2)]
        assert len(moved) == 2 * (bucket._packs and not LOWERINGS[lowering].is_reference and not is_copied)


def test_slots_of_rows_with_gaps_between_are_compared() -> None:
    """A bucket has the front of each row of a slot whose first size is fixed."""

    class Rows(Inputs):
        rows: torch.Tensor = copied(2, BATCH, dtype=torch.float64, pad=0, placement="host")
        most: torch.Tensor = computed(lambda rows: rows.max().view(1), shape=1, dtype=torch.float64, again=("rows",))

    runner: Any = decoder(Rows, lambda view: view.most.clone(), backend="cpu-capture", buckets=[1, 4], output_rows=None)
    for rows, most in (([[1.0], [2.0]], 2), ([[1.0], [3.0]], 3), ([[1.0] * 3, [2.0] * 3], 2)):
        assert runner({"rows": torch.tensor(rows, dtype=torch.float64)}).item() == most


def test_one_call_for_several_slots_is_asked_for_once() -> None:
    """A function that compares with what it saw last says so once, and all slots of the call follow it."""
    seen = list[list[int]]()

    def is_other(kv_lens: torch.Tensor) -> bool:
        seen.append(kv_lens.tolist())
        return len(seen) < 2 or seen[-1] != seen[-2]

    @fills("starts", "doubled")
    def both(kv_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_lens.cumsum(0), kv_lens * 2

    class Both(Inputs):
        kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host")
        starts: torch.Tensor = computed(both, shape=BATCH, dtype=torch.int64, again=is_other)
        doubled: torch.Tensor = computed(both, shape=BATCH, dtype=torch.int32, again=is_other)

    runner: Any = DecodeRunner(Both, lambda view: (view.starts, view.doubled), buckets=[2], backend="cpu-capture")
    ready(runner)
    for lens in ([3, 4], [3, 4], [5, 4], [5, 4], [3, 4]):
        starts, doubled = runner({"kv_lens": lens})
        assert (starts.tolist(), doubled.tolist()) == ([lens[0], sum(lens)], [2 * one for one in lens])
    assert runner.stats()["again"] == {slot: {"ran": 4, "kept": 2} for slot in ("starts", "doubled")}
    assert len(seen) == 6


def declared_both(again: Any, other: Any) -> type[Inputs]:
    """Two slots that one call fills."""

    @fills("one", "two")
    def both(kv_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_lens, kv_lens

    class Made(Inputs):
        kv_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement="host")
        plan: object = None
        one: torch.Tensor = computed(both, shape=BATCH, dtype=torch.int32, again=again)
        two: torch.Tensor = computed(both, shape=BATCH, dtype=torch.int32, again=other)

    return Made


def test_one_call_has_one_again() -> None:
    """The error says so."""
    with pytest.raises(DeclarationErrors) as refusal:
        declared_both(("kv_lens",), ("plan",))
    assert "fills one, two: give them one again=, see two" in str(refusal.value.exceptions[0])


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda kv_lens: kv_lens > 1, r"slot 'one': its function .*<lambda> raised RuntimeError"),
        (("plan",), r"again= names plan, and cannot compare them: .*; name fields of plain values"),
    ],
)
def test_what_does_not_say_whether_it_runs_is_named(again: Any, message: str) -> None:
    """A tensor of several bools, and a field that has no bytes."""
    made: Any = declared_both(again, again)
    runner: Any = EagerRunner(made, lambda view: view.one, backend="cpu")
    batch = {"kv_lens": [1, 2], "plan": lambda: 0}
    if callable(again):
        runner(batch)  # the first step runs it, whatever it says
    with pytest.raises(ComputeError, match=message):
        runner(batch)
