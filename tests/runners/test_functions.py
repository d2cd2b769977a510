"""What a function of slots sees: the live rows and the declared tail of its own step, by every lowering."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, InputBuffers, Inputs, computed, copied, output, staged
from slotgraph.backends import load
from slotgraph.dataflow.capabilities import LADDER

GONE: Final = 900
ON_CPU: Final = [(backend, lowering) for backend in ("cpu", "cpu-capture") for lowering in LADDER]
WAYS: Final = [
    *ON_CPU,
    *[pytest.param("cuda", lowering, marks=pytest.mark.cuda) for lowering in LADDER if lowering != "direct"],
]
by_all_ways = pytest.mark.parametrize(("backend", "lowering"), WAYS)
Edit = Callable[[Any], object]


def ids(**options: Any) -> Any:
    """A slot that grows, so that there is something to follow."""
    return copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1, **options)


def captured(backend: str, lowering: str, inputs: type[Inputs], step: Any, **options: Any) -> Any:
    """A captured runner of buckets of 2, 4 and 8, or a skip where there is no such way."""
    available = load(backend).is_available()
    if not available:
        pytest.skip(f"{backend}: {available.reason}")
    if lowering not in load(backend)().capabilities.lowerings:
        pytest.skip(f"{backend} has no lowering {lowering!r} here")
    options = {"buckets": (2, 4, 8), "output_rows": None, **options}
    runner: Any = DecodeRunner(inputs, step, backend=backend, lowering=lowering, **options)
    runner.capture()
    return runner


def outputs(runner: Any, batch: dict[str, Any], edits: dict[int, Edit], count: int, ahead: int = 0) -> list[list[int]]:
    """What each of so many steps returned. edits: by the number of a step, what is then said."""
    found = list[list[int]]()
    for step in runner.steps(batch, ahead=ahead):
        found.append(step.outputs.tolist())
        edits.get(step.number, id)(step)
        if step.number == count - 1:
            break
    return found


class Hosted(Inputs):  # what the host computes from a slot in its own memory
    ids: torch.Tensor = ids()
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    longest: torch.Tensor = computed(lambda lens: int(lens.max()), shape=1, dtype=torch.int64)
    ends: torch.Tensor = computed(lambda lens: lens.cumsum(0), shape=BATCH, dtype=torch.int64)


@by_all_ways
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_function_on_the_host_sees_no_request_that_left(backend: str, lowering: str, ahead: int) -> None:
    """After a request left, its row in a host slot is a tail when the host computes from that slot: in each step."""
    runner = captured(backend, lowering, Hosted, lambda view: torch.cat([view.longest, view.ends[-1:]]))
    batch = {"ids": [1, 2, 3, 4], "lens": [5, 6, 7, GONE]}
    found = outputs(runner, batch, {0: lambda step: step.leave([3])}, 5, ahead)
    lands = 1 + ahead * (lowering in {"in_graph", "foreach", "direct"})  # others launch no step ahead
    assert found == [[GONE, 18 + GONE]] * lands + [[7, 18]] * (5 - lands)


class HostedAhead(Hosted):  # whose host slot grows by a function
    lens: torch.Tensor = copied(
        BATCH, dtype=torch.int64, pad=0, placement="host", then=lambda lens: lens + (lens.sum() > 0)
    )


@by_all_ways
def test_a_host_slot_that_advances_is_no_other(backend: str, lowering: str) -> None:
    """The same where a rule advances the host slot in each step."""
    runner = captured(backend, lowering, HostedAhead, lambda view: torch.cat([view.longest, view.ends[-1:]]))
    found = outputs(runner, {"ids": [1, 2, 3, 4], "lens": [5, 6, 7, GONE]}, {1: lambda step: step.leave([3])}, 4)
    assert found == [[GONE, 18 + GONE], [GONE + 1, 22 + GONE], [9, 24], [10, 27]]


class Summing(Inputs):  # rules that reduce over a slot that stays, and over one that advances
    ids: torch.Tensor = ids()
    w: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    ahead: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=10, then=lambda ahead, w: ahead + w)
    total: torch.Tensor = copied(1, dtype=torch.int64, then=lambda w: w.sum().reshape(1))
    after: torch.Tensor = copied(1, dtype=torch.int64, then=lambda ahead: ahead.sum().reshape(1))


@by_all_ways
def test_a_rule_sees_no_row_of_an_earlier_batch(backend: str, lowering: str) -> None:
    """Its sums are of the bucket of its step, live rows and tail, and not of a fuller batch that was there before."""
    runner = captured(backend, lowering, Summing, lambda view: torch.cat([view.total, view.after]))
    full = {"ids": [0] * 8, "w": [1000] * 8, "ahead": [7000] * 8, "total": [0], "after": [0]}
    batch = {"ids": [0] * 3, "w": [1, 1, 1], "ahead": [2, 3, 4], "total": [0], "after": [0]}
    runner(full)
    # One padded row of 10 is in the bucket of 4: 3 + 4 + 5 + 10. Then row 2 leaves: 4 + 5, in a bucket of 2.
    found = outputs(runner, batch, {1: lambda step: step.edit([0], w=[1]), 3: lambda step: step.leave([2])}, 6)
    assert found == [[0, 0], [3, 22], [3, 25], [3, 28], [3, 31], [2, 15]]


class Chained(Inputs):  # rules that read the new value of another slot, by its whole
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=1, then=lambda positions: positions * 2)
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids, positions: ids * 0 + positions.sum())
    last: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=5, then=lambda last, ids: last * 0 + ids.amax())


@by_all_ways
@pytest.mark.parametrize("edits", [False, True])
def test_a_rule_that_reads_a_new_value_sees_its_tail(backend: str, lowering: str, edits: bool) -> None:  # noqa: FBT001
    """Padded rows of a new value are the slot's own, also where two rules follow, in steps with and without edits."""
    runner = captured(backend, lowering, Chained, lambda view: torch.stack([view.ids[0], view.last[0]]))
    batch = {"positions": [1, 2, 3], "ids": [0, 0, 0], "last": [0, 0, 0]}
    edit: Edit = (lambda step: step.edit()) if edits else id
    found = outputs(runner, batch, dict.fromkeys(range(9), edit), 4)
    assert found == [[0, 0], [13, 13], [25, 25], [49, 49]]  # the sums of 2, 4, 6 and a padded 1, and so on


class Written(Inputs):  # a slot that the step writes, padded rows and all, and rules over it
    ids: torch.Tensor = ids()
    seen: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, rewritten=True)
    total: torch.Tensor = copied(1, dtype=torch.int64, then=lambda seen: seen.sum().reshape(1))


@by_all_ways
@pytest.mark.parametrize("edits", [False, True])
def test_a_rule_sees_the_declared_tail_of_what_the_step_writes(backend: str, lowering: str, edits: bool) -> None:  # noqa: FBT001
    """What the step leaves in padded rows of a slot is no tail."""

    def step(view: Written) -> torch.Tensor:
        view.seen.add_(100)
        return view.total.clone()

    runner = captured(backend, lowering, Written, step)
    edit: Edit = (lambda step: step.edit()) if edits else id
    batch = {"ids": [1, 2, 3], "seen": [1, 2, 3], "total": [0]}
    assert outputs(runner, batch, dict.fromkeys(range(9), edit), 3) == [[0], [306], [606]]


WIDE: Final = Axis("WIDE", fixed=True)


class Apart(Inputs):  # slots that the fill kernel does not write: by their dtype, and by their many outer rows
    ids: torch.Tensor = ids()
    z: torch.Tensor = copied(TOKENS, dtype=torch.complex128, pad=7, then=lambda z: z * 2)
    tall: torch.Tensor = copied(WIDE, TOKENS, dtype=torch.int32, pad=7, then=lambda tall: tall + 1)
    noted: torch.Tensor = copied(WIDE, TOKENS, dtype=torch.int32, pad=0, rewritten=True)
    spread: torch.Tensor = computed(lambda noted: noted.amax().reshape(1), shape=1, dtype=torch.int32)


@by_all_ways
def test_slots_beside_the_kernel_advance_as_others_do(backend: str, lowering: str) -> None:
    """Their live rows do in each step, once, and their tails are reset in each step, also in those without news."""

    def step(view: Apart) -> torch.Tensor:
        view.noted.add_(view.ids)
        view.noted[:, -1] += 1000  # a padded row
        return torch.cat([view.ids, view.z.real.long(), view.tall[-1], view.spread])

    runner = captured(backend, lowering, Apart, step, sizes={WIDE: 1100}, buckets=(4, 8))
    three = torch.arange(1, 4, device=runner.stage.backend.device)
    tall = torch.zeros(1100, 3, dtype=torch.int32) + torch.tensor([10, 20, 30], dtype=torch.int32)
    batch = {
        "ids": three.clone(),
        "z": three.to(torch.complex128),
        "tall": tall.to(three.device),
        "noted": torch.zeros(1100, 3, dtype=torch.int32, device=three.device),
    }
    found = outputs(runner, batch, {1: lambda step: step.leave([0]), 2: lambda step: step.edit()}, 4)
    assert found == [
        [1, 2, 3, 0, 1, 2, 3, 7, 10, 20, 30, 7, 0],
        [2, 3, 4, 0, 2, 4, 6, 7, 11, 21, 31, 7, 3],
        [5, 4, 0, 0, 12, 8, 7, 7, 32, 22, 7, 7, 7],
        [6, 5, 0, 0, 24, 16, 7, 7, 33, 23, 7, 7, 12],
    ]


PAGES: Final = Axis("PAGES")


class Free(Inputs):  # axes that do not follow from one another
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda ids: ids + 1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-1, then=lambda lens: lens + 10)
    ends: torch.Tensor = copied(BATCH + 1, dtype=torch.int64, pad=-1, then=lambda ends: ends + 100)
    table: torch.Tensor = copied(BATCH * PAGES, 2, dtype=torch.int64, pad=-1, then=lambda table: table + 1000)
    stays: torch.Tensor = copied(PAGES * 2, dtype=torch.int64, pad=-1)
    apart: torch.Tensor = copied(  # from the kernel
        TOKENS, dtype=torch.complex128, pad=-1, converts=(torch.int64,), then=lambda apart: apart + 5
    )
    total: torch.Tensor = copied(1, dtype=torch.int64, then=lambda ids: ids.sum().reshape(1))
    made: torch.Tensor = output(1, dtype=torch.int64)


@pytest.mark.parametrize("name", ["cpu", "cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_replay_without_a_fill_knows_each_axis(name: str) -> None:
    """Live rows on each axis advance, and padded rows do not, whatever the other axes hold."""
    available = load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    backend: Any = load(name)()
    if "in_graph" not in backend.capabilities.lowerings:
        pytest.skip(f"{name} has no lowering 'in_graph' here")
    padded = {BATCH: 4, TOKENS: 8, PAGES: 3}
    buffers = InputBuffers(Free, padded, lowering="in_graph", backend=backend)
    buffers.prepare()

    def step() -> None:
        buffers.fill_in_graph()
        view = buffers.view()
        view.made.copy_(view.total)

    graph = backend.capture(step)
    for requests, tokens, pages in ((2, 5, 3), (4, 1, 1), (1, 8, 2), (3, 2, 1)):
        rows = {"ids": tokens, "lens": requests, "ends": requests + 1, "table": requests * pages, "stays": pages * 2}
        rows["apart"] = tokens
        batch = {name: torch.arange(1, count + 1, device=backend.device) for name, count in rows.items()}
        batch["table"] = batch["table"][:, None].repeat(1, 2)
        view = buffers.fill({**batch, "total": [0]}, live={BATCH: requests, TOKENS: tokens, PAGES: pages})
        added = {"ids": 1, "lens": 10, "ends": 100, "table": 1000, "stays": 0, "apart": 5}
        total = 0
        for number in range(4):
            graph.replay()
            for slot, count in rows.items():
                held, live = getattr(view, slot).cpu(), batch[slot].cpu() + added[slot] * number
                assert torch.equal(held[:count], live), (slot, number)
                assert bool((held[count:] == -1).all()), (slot, number)
            assert int(view.made) == total
            total = int((batch["ids"].cpu() + number + 1).sum()) - (8 - tokens)  # of the new ids


class Produced(Inputs):  # a producer writes a slot in host memory, and the host computes from it
    ids: torch.Tensor = ids()
    lens: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, placement="host")
    most: torch.Tensor = computed(lambda lens: int(lens.sum()), shape=1, dtype=torch.int64)


@by_all_ways
def test_a_function_on_the_host_sees_what_a_producer_wrote(backend: str, lowering: str) -> None:
    """It is called again in each step, also without news, and sees no padded row that the producer wrote."""
    runner = captured(backend, lowering, Produced, lambda view: view.most.clone(), buckets=(4, 8))
    lens = runner.inputs(4).lens
    lens.copy_(torch.tensor([1, 2, 3, 50]))
    found = []
    for step in runner.steps({"ids": [1, 2, 3]}):
        found += step.outputs.tolist()
        lens += 10
        if step.number == 2:
            break
    assert found == [6, 36, 66]


class Started(Inputs):  # a slot that the step may write, with numbers of its own at first, and a rule over it
    ids: torch.Tensor = ids()
    seen: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, starts=4, rewritten=True)
    total: torch.Tensor = copied(1, dtype=torch.int64, then=lambda seen: seen.sum().reshape(1))


@by_all_ways
def test_a_capture_leaves_the_tails_that_rules_read(backend: str, lowering: str) -> None:
    """A rule that a warm-up runs resets no tail: the slot holds what it held at first."""
    runner = captured(backend, lowering, Started, lambda view: view.total.clone())
    assert runner.graphs.buffers["seen"].tensor.tolist() == [4] * 8


class Following(Inputs):  # a slot that takes the value of one that stays
    ids: torch.Tensor = ids()
    a: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    b: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda a: a)


@by_all_ways
def test_slots_advance_before_any_of_them_is_edited(backend: str, lowering: str) -> None:
    """In the step of an edit a slot takes what another one held before; in the next step what the edit brought."""
    runner = captured(backend, lowering, Following, lambda view: torch.cat([view.a, view.b]))
    batch = {"ids": [1, 2], "a": [3, 4], "b": [5, 6]}
    found = outputs(runner, batch, {0: lambda step: step.edit([0, 1], a=[7, 8])}, 3)
    assert found == [[3, 4, 5, 6], [7, 8, 3, 4], [7, 8, 7, 8]]
