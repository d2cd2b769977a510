"""Memory of inputs: buffers and fills without a runner, and memory that its owner hands in."""

import re
from typing import Any, Final, cast

import pytest
import torch

from slotgraph import (
    BATCH,
    TOKENS,
    Axis,
    DecodeRunner,
    InputBuffers,
    Inputs,
    computed,
    constant,
    copied,
    keep,
    output,
    staged,
)
from slotgraph.backends import Backend, choose, load
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.errors import BatchError, BindError, CaptureError, CheckError, ConfigError, DeclarationError
from slotgraph.extend import HOST, Exclusive, once, side
from tests.runners.models import assert_right, batch_for, decoder, plain_runner, random_batch
from tests.strategies import same_bytes

PAGES = Axis("PAGES")
CAPACITY: Final = {BATCH: 6, TOKENS: 9, PAGES: 4}


class Wide(Inputs):  # slots over two axes that are independent here, on the device and on the host, some computed
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-7)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, converts=(torch.int64,))
    lengths_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, placement=HOST)
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    heats: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=0.5, default=None)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, source=side("flags"))
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    ends: torch.Tensor = computed(lambda lengths: lengths.cumsum(0), shape=BATCH, dtype=torch.int64)


def batch_of(requests: int, tokens: int, pages: int, seed: int, *, heats: bool = True) -> tuple[Any, torch.Tensor]:
    """Random values, and the side argument."""
    batch: Any = batch_for(Wide, {BATCH: requests, TOKENS: tokens, PAGES: pages}, seed)
    batch["flags"] = batch["lengths_cpu"] > 50
    batch["lengths"] = batch["lengths"].to((torch.int32, torch.int64)[seed % 2])
    batch["ids"] = batch["ids"] if seed % 3 else batch["ids"].tolist()
    batch["heats"] = batch["heats"] if heats else None
    return batch, batch.pop("flags")


@pytest.mark.parametrize("lowering", LADDER)
def test_fills_of_any_sizes_leave_the_oracles_bytes(cpu: str, lowering: str) -> None:
    """Any live sizes in any padded sizes, axis by axis, or in few, where one plan fills often, leave the oracle's."""
    buffers = InputBuffers(Wide, CAPACITY, backend=cpu, lowering=lowering)
    assert re.fullmatch(rf"<InputBuffers of Wide on {cpu}: .*BATCH \d+.*, {lowering}, \S+ K?i?B>", repr(buffers))
    draw = torch.Generator().manual_seed(5)
    for seed in range(60):
        requests, tokens, pages = (int(torch.randint(0, most + 1, (1,), generator=draw)) for most in (6, 9, 4))
        padded = {BATCH: max(requests, 1 + seed % 6), TOKENS: max(tokens, 1 + seed % 9)} if seed < 30 else {}
        batch, flags = batch_of(requests, tokens, pages, seed, heats=seed % 4 > 0)
        view = buffers.fill(batch, padded, flags=flags)
        live = {BATCH: requests, TOKENS: tokens, PAGES: pages}
        step = Wide.slotgraph.step([live[axis] for axis in Wide.slotgraph.varying], {**CAPACITY, **padded})
        other = InputBuffers(Wide, CAPACITY, backend=cpu, lowering="slot_by_slot")._layer.buffers
        side = {"flags": flags}
        right: Any = fill_slot_by_slot(Wide.slotgraph, other, choose(cpu).capabilities, step, batch, side)
        for name, expected in right.items():
            mine = getattr(view, name)
            assert (mine is None) == (expected is None), name
            assert mine is None or same_bytes(mine, expected), (name, mine, expected)


@pytest.mark.parametrize("lowering", LADDER)
def test_unpadded_fills_write_live_rows_alone(cpu: str, lowering: str) -> None:
    """Fills without padding, whole or in two parts, among padded ones: the live rows, and no row behind them."""
    buffers = InputBuffers(Wide, CAPACITY, backend=cpu, lowering=lowering)
    oracle = InputBuffers(Wide, CAPACITY, backend=cpu, lowering="slot_by_slot")
    draw = torch.Generator().manual_seed(6)
    for seed in range(60):
        requests, tokens, pages = (int(torch.randint(0, most + 1, (1,), generator=draw)) for most in (6, 9, 4))
        batch, flags = batch_of(requests, tokens, pages, seed, heats=seed % 4 > 0)
        live = {BATCH: requests, TOKENS: tokens, PAGES: pages}
        before: Any = {name: one.clone() for name, one in slots_of(buffers.view()).items()}
        right = slots_of(oracle.fill(batch, live, flags=flags))
        if seed % 3 == 0:  # two parts, or the whole
            buffers.fill_unpadded(batch, only=["lengths", "tables"], flags=flags)
            view = buffers.fill_unpadded(batch, skip=["lengths", "tables"], flags=flags)
        else:
            view = buffers.fill_unpadded(batch, flags=flags)
        assert slots_of(view).keys() == right.keys()
        for name, tensor in slots_of(buffers.view()).items():
            if name in right:
                part = tuple(map(slice, right[name].shape))
                assert same_bytes(slots_of(view)[name], right[name]), name
                before[name][part] = right[name]
            assert same_bytes(tensor, before[name]), name
        if seed % 2:  # a padded fill finds the tails dirty
            again = slots_of(buffers.fill(batch, flags=flags))
            assert all(same_bytes(again[name], one) for name, one in slots_of(oracle.fill(batch, flags=flags)).items())
    assert len(buffers._known) <= 1  # nothing is made for a size
    with pytest.raises(BatchError, match="TOKENS"):
        buffers.fill_unpadded({**batch_of(2, 3, 1, 1)[0], "ids": [0] * 10}, flags=batch_of(2, 3, 1, 1)[1])


def slots_of(view: Any) -> dict[str, torch.Tensor]:
    """The slots that are present in a view."""
    return {name: one for name, one in vars(view).items() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("lowering", LADDER)
def test_a_graph_of_the_callers_own_gives_the_eager_answer(lowering: str) -> None:
    """The caller captures with the fill's device part in front, and replays behind each fill: the eager answer."""
    backend = load("cpu-capture")()
    buffers = InputBuffers(Wide, CAPACITY, backend=backend, lowering=lowering)
    step: Any = lambda view: view.ids.sum() + view.ends * 3 + view.tables.sum(1) + view.count
    graphs = {}
    for requests in (2, 6):
        padded = {BATCH: requests, TOKENS: 9}
        buffers.prepare(padded, absent={"heats"})

        def captured(padded: Any = padded) -> Any:
            buffers.fill_in_graph(padded, absent={"heats"})
            return step(buffers.view(padded, absent={"heats"}))

        graphs[requests] = backend.capture(captured)
    plain = InputBuffers(Wide, CAPACITY, backend="cpu", lowering="slot_by_slot")
    for seed in range(20):
        requests = 1 + seed % 6
        bucket = 2 if requests <= 2 else 6
        batch, flags = batch_of(requests, 1 + seed % 9, seed % 5, seed, heats=False)
        buffers.fill(batch, {BATCH: bucket, TOKENS: 9}, flags=flags)
        graphs[bucket].replay()
        right = step(plain.fill(batch, {BATCH: bucket, TOKENS: 9}, flags=flags))
        assert torch.equal(graphs[bucket].outputs[:requests], right[:requests])


def test_live_sizes_that_no_source_tells_may_be_given() -> None:
    """Live rows may be given where no copied slot tells them; else the error says so."""

    class Untold(Inputs):
        count: torch.Tensor = computed(lambda step: [step.live(BATCH)] * 3, shape=BATCH, dtype=torch.int32)

    buffers = InputBuffers(Untold, {BATCH: 4}, backend="cpu")
    assert buffers.fill({}, {BATCH: 3}, live={BATCH: 2}).count.tolist() == [2, 2, 2]
    with pytest.raises(DeclarationError, match="or give live="):
        buffers.fill({})


@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_adopted_memory_is_kept_where_asked(lowering: str) -> None:
    """Adopted memory holds what it held, or the initial value; either way each fill resets its padding."""
    for kept in (False, True):
        mine = torch.arange(9)
        buffers = InputBuffers(Wide, CAPACITY, bind={"ids": mine}, keep_bound=kept, backend="cpu", lowering=lowering)
        assert mine.tolist() == (list(range(9)) if kept else [-7] * 9)
        batch, flags = batch_of(2, 3, 1, 1)
        view = buffers.fill(batch, {TOKENS: 7}, flags=flags)
        assert view.ids.data_ptr() == mine.data_ptr()
        assert mine.tolist() == [*batch["ids"].tolist(), *[-7] * 4, *(range(7, 9) if kept else [-7] * 2)]


@pytest.mark.parametrize("lazy", [False, True])
def test_runners_keep_adopted_memory_over_captures(backend: Backend, lazy: bool) -> None:
    """A capture runs on initial values, and the owner's contents are there again after it."""

    class Owned(Inputs):
        rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        table: torch.Tensor = staged(BATCH, 2, dtype=torch.int64, pad=keep("its owner writes it"))

    seen = list[torch.Tensor]()

    def step(view: Owned) -> torch.Tensor:
        if not seen:
            seen.append(view.table.clone())
        return view.table[:, 0] + view.rows

    for kept in (True, False):
        mine = torch.arange(8, device=backend.device).view(4, 2)
        seen.clear()
        runner = DecodeRunner(
            Owned,
            step,
            buckets=[2, 4],
            bind={"table": mine},
            keep_bound=kept,
            lazy=lazy,
            backend=backend,
            progress=False,
        )
        runner.capture()
        rows = torch.tensor([10, 20, 30], device=backend.device)
        assert runner({"rows": rows}).tolist() == ([10, 22, 34] if kept else [10, 20, 30])
        assert seen[0].count_nonzero() == 0
        assert mine.tolist() == ([[0, 1], [2, 3], [4, 5], [6, 7]] if kept else [[0, 0]] * 4)
        mine[:3] = 5
        assert runner({"rows": rows}).tolist() == [15, 25, 35]
    with pytest.raises(ConfigError, match="keep_bound: expected True or False, got 1"):
        DecodeRunner(Owned, step, keep_bound=cast("bool", 1), backend=backend)


def test_sizes_and_slots_that_do_not_fit_are_refused() -> None:
    """Sizes and slots that do not fit are named, before anything is made."""
    with pytest.raises(ConfigError, match="needs sizes= for PAGES, TOKENS"):
        InputBuffers(Wide, {BATCH: 3}, backend="cpu")
    buffers = InputBuffers(Wide, CAPACITY, backend="cpu")
    batch, flags = batch_of(3, 4, 2, 1)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({TOKENS: 10}, ConfigError, "padded size 10 of TOKENS is more than its capacity, 9"),
        ({Axis("OTHER"): 1}, ConfigError, "padded names OTHER"),
        ({BATCH: 2}, BatchError, "more than the 2 of this bucket"),
    ]
    for padded, error, said in wrong:
        with pytest.raises(error, match=said):
            buffers.fill(batch, padded, flags=flags)
    with pytest.raises(BatchError, match="flag"):
        buffers.fill(batch, flag=flags)
    before = buffers.fill(batch, flags=flags).ids.tolist()
    with pytest.raises(BatchError, match="slot 'ids'"):
        buffers.fill({**batch, "lengths": batch["lengths"] + 1}, live={TOKENS: 5}, flags=flags)
    assert buffers.view().ids.tolist() == before
    with pytest.raises(CaptureError, match=r"call fill\(\) or prepare\(\)"):
        buffers.fill_in_graph({BATCH: 5})
    with pytest.raises(ConfigError, match="ids"):
        buffers.prepare(absent={"ids"})


def test_a_batch_larger_than_adopted_memory_is_refused(cpu: str) -> None:
    """A batch that adopted memory cannot hold is refused by the slot's name, and the next one is right."""
    runner = plain_runner(cpu, bind={"ids": torch.full((8,), 33)})
    assert plain_runner(cpu).graphs.memory().inputs > runner.graphs.memory().inputs  # of what is allocated here
    first, before = random_batch(3, seed=1), runner.fill(random_batch(3, seed=1))
    with pytest.raises(BatchError, match=r"slot 'ids' is bound to memory that cannot grow, .*BATCH 8"):
        runner(random_batch(9, seed=2))
    assert_right(runner.replay(before), first)
    batch = random_batch(8, seed=3)
    assert_right(runner(batch), batch)


def test_constants_and_outputs_may_lie_in_adopted_memory(cpu: str) -> None:
    """A constant and a tail that is written once are established there too; a step's result lies in what was given."""

    class Fixed(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=once(5))
        fives: torch.Tensor = constant(5, shape=BATCH, dtype=torch.int64)
        logits: torch.Tensor = output(BATCH, dtype=torch.int64)

    tensors = {name: torch.full((4,), 77) for name in ("ids", "fives", "logits")}
    runner = decoder(Fixed, lambda view: view.logits.copy_(view.ids * view.fives), backend=cpu, bind=tensors)
    assert tensors["fives"].tolist() == tensors["ids"].tolist() == [5] * 4
    assert runner({"ids": torch.tensor([2, 3])}).data_ptr() == tensors["logits"].data_ptr()
    assert tensors["logits"].tolist() == [10, 15, 25, 25]


REFUSED: list[tuple[str, Any, str]] = [
    ("idz", torch.zeros(8), "bind names 'idz', which is not a slot of PlainInputs"),
    ("weights", [0.0] * 8, "slot 'weights': expected a tensor to adopt, got list"),
    ("weights", Exclusive([0.0]), "slot 'weights': expected a tensor to adopt, got list"),  # type: ignore[arg-type]
    ("weights", torch.zeros(7), r"slot 'weights': expected shape \[8\] .*full capacity.*got \[7\]"),
    ("weights", torch.zeros(9), r"slot 'weights': expected shape \[8\] .*got \[9\]"),
    ("weights", torch.zeros(8, 1), r"slot 'weights': expected shape \[8\] .*got \[8, 1\]"),
    ("weights", torch.zeros(8).double(), "slot 'weights': expected float32, got float64"),
    ("places", torch.zeros(8, dtype=torch.int32), "slot 'places': expected int64, got int32"),
    ("weights", torch.zeros(8, device="meta"), "slot 'weights': expected memory on cpu, got meta"),
    ("weights", torch.zeros(16)[::2], r"slot 'weights': expected a contiguous.* got strides \[2\]; adopt"),
    ("pairs", torch.zeros(2, 8).t(), r"slot 'pairs': expected a contiguous.* strides \[1, 8\]"),
    ("weights", torch.zeros(1).expand(8), r"slot 'weights': expected a contiguous.* strides \[0\]"),
    ("weights", torch.inference_mode()(torch.zeros)(8), "slot 'weights': made under inference_mode"),
    ("weights", torch.zeros(8, requires_grad=True), r"slot 'weights': requires grad; adopt `\.detach\(\)`"),
]


def test_memory_that_cannot_be_a_slot_is_refused(cpu: str) -> None:
    """Memory that cannot serve as a slot is refused with the slot and what was expected; it is not written."""
    for name, tensor, says in REFUSED:
        before = tensor.clone() if isinstance(tensor, torch.Tensor) else tensor
        sound = torch.full((8,), 12)
        with pytest.raises(BindError, match=says):
            plain_runner(cpu, bind={"ids": sound, name: tensor})
        assert sound.tolist() == [12] * 8
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            assert torch.equal(tensor, before)
    wrong: dict[str, Any] = {"weights": torch.zeros(18).double()[::2], "ids": [1], "idz": torch.zeros(8)}
    with pytest.raises(BindError) as refused:
        plain_runner(cpu, buckets=[8], bind=wrong)
    for said in ("'weights': expected shape [8]", "got float64", "strides [2]", "'ids': expected a tensor", "'idz'"):
        assert said in str(refused.value)  # all at once
    memory = torch.zeros(24)
    for start in (0, 4, 15):
        bind = {"pairs": memory[:16].view(8, 2), "weights": memory[start : start + 8]}
        with pytest.raises(BindError, match=r"slots '\w+' and '\w+' are bound to overlapping memory: each needs"):
            plain_runner(cpu, buckets=[8], bind=bind)


MOST = 6


class Adopted(Inputs):  # slots whose memory is the owner's
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=0.5)


def test_debugging_finds_who_writes_exclusive_memory() -> None:
    """A tail that somebody else wrote is told by its slot; without the promise the same step is right."""
    owned = batch_for(Adopted, {BATCH: MOST}, 0)
    promised = {**owned, "ids": Exclusive(owned["ids"])}
    options: dict[str, Any] = {"bind": promised, "output_rows": None, "buckets": [2, MOST], "debug": True}
    runner = decoder(Adopted, lambda view: {"ids": view.ids.clone()}, backend="cpu-capture", **options)
    runner(batch_for(Adopted, {BATCH: 3}, 1))
    owned["pairs"].fill_(77)  # not promised
    runner(batch_for(Adopted, {BATCH: 3}, 2))
    owned["ids"].fill_(99)
    with pytest.raises(CheckError, match=r"tail of slot 'ids' does not hold -3: .* adopted as Exclusive"):
        runner(batch_for(Adopted, {BATCH: 3}, 3))
    assert runner(batch_for(Adopted, {BATCH: 3}, 4))["ids"][3:].tolist() == [-3] * 3  # no tail is believed afterwards
