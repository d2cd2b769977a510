"""Every lowering against the oracle: over one set of buffers, the same bytes, whichever lowering filled each step."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, Step, computed, copied, keep
from slotgraph.dataflow import packet
from slotgraph.dataflow import plan as plans
from slotgraph.dataflow.bucket import Bucket, hand_over
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import Capabilities, Lowering, resolve_dtype
from slotgraph.dataflow.declaration import declare
from slotgraph.dataflow.errors import ComputeError
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.packet import MOST_OUTER, WORD
from slotgraph.dataflow.plan import LARGE_BYTES, LARGE_LANE_BYTES, plan_fill
from slotgraph.dataflow.ready import Ready
from slotgraph.dataflow.slots import Copied
from slotgraph.dataflow.tails import Pad
from slotgraph.dataflow.views import Views
from slotgraph.runners.testing.ground import differences, scribble
from tests.fused import Kernel, feed_for, kernel_of
from tests.sources import HOST_DATA, IN_BUFFERS, KINDS, Given, Maker
from tests.strategies import (
    AXES,
    CAPABILITIES,
    HIDDEN,
    PAGES,
    Round,
    Sizes,
    batch_of,
    declaration_of,
    declarations,
    empty,
    noise,
    poisoned,
    rounds,
    same_bytes,
    source_for,
)

WAYS = ("fused", "fused", "fused", "in_graph", "alone", "foreach", "slot_by_slot", "exact")


@attrs.frozen
class Turn:
    """One step: its sizes, by which lowering, and of what kinds its sources are, slot by slot."""

    round: Round
    way: str
    kinds: Sequence[str]
    twice: bool
    produced: int | None

    def kind(self, index: int) -> str:
        """The kind of the source of one slot."""
        return self.kinds[index % len(self.kinds)]


@st.composite
def turns(draw: st.DrawFn, world: "World") -> list[Turn]:
    """Random steps over few buckets, so that each of them is filled in several ways."""
    made = []
    paddings = [
        turn.padded for turn in draw(st.lists(rounds(world.declaration, world.capacity), min_size=1, max_size=3))
    ]
    for _ in range(draw(st.integers(1, 7))):
        way, turn = draw(st.sampled_from(WAYS)), draw(rounds(world.declaration, world.capacity))
        padded = draw(st.sampled_from(paddings))
        live = {axis: min(rows, padded[axis]) for axis, rows in turn.live.items()}
        turn = attrs.evolve(turn, live=live, padded=live if way == "exact" else padded)
        of = draw(st.sampled_from([KINDS, KINDS, HOST_DATA, IN_BUFFERS]))
        kinds = draw(st.lists(st.sampled_from(of), min_size=1, max_size=5))
        made.append(Turn(turn, way, kinds, draw(st.booleans()), draw(st.none() | st.integers(0, 99))))
    return made


def assert_same(mine: Views, right: Views, declaration: type[Inputs], live: Sizes) -> None:
    """Both views hold the same slots, the same bytes in each, and None for the same ones."""
    assert set(mine) == set(right)
    assert list(differences(mine, right, declaration.slotgraph.slots, live)) == []


class World:
    """One declaration over two sets of buffers: one for all lowerings, one for the oracle.

    Buckets share one packet, as a runner's do. handed_out: producers were given the slots.
    """

    def __init__(
        self, declaration: type[Inputs], capabilities: Capabilities, seed: int | None = None, *, out: bool = False
    ) -> None:
        self.declaration = declaration
        self.slots = declaration.slotgraph
        self.capabilities = capabilities
        self.capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
        self.mine, self.right = self._buffers(seed), self._buffers(seed)
        self.feed = feed_for(self.mine)
        self.exact = Bucket(self.slots, self.capacity, capabilities, self.mine, exact=True, feed=self.feed)
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.kernels: dict[tuple[Any, ...], tuple[Bucket, Kernel]] = {}
        self.mine.ledger.handed_out = out

    def _buffers(self, seed: int | None) -> Buffers:
        if seed is None:
            return allocate(self.slots, self.capacity, self.capabilities, empty)
        return poisoned(self.declaration, self.capabilities, self.capacity, seed)

    def bucket(self, turn: Round) -> Bucket:
        """The bucket of a turn's padded sizes, planned once as a runner does."""
        key = tuple(turn.padded[axis] for axis in AXES)
        if key not in self.buckets:
            self.buckets[key] = Bucket(self.slots, turn.padded, self.capabilities, self.mine, feed=self.feed)
        return self.buckets[key]

    def fused(self, turn: Round) -> tuple[Bucket, Kernel]:
        """A turn's bucket for one pattern, filled by a kernel, and its kernel."""
        key = (turn.absent, *(turn.padded[axis] for axis in AXES))
        if key not in self.kernels:
            fused = Bucket(self.slots, turn.padded, self.capabilities, self.mine, lowering="in_graph", feed=self.feed)
            self.kernels[key] = fused, kernel_of(fused, turn.absent)
        return self.kernels[key]

    def given(self, turn: Turn) -> dict[str, Given]:
        """What the batch brings for each slot; what lies in buffers is read when producers are done."""
        found: dict[str, Given] = {}
        read = [(i, n, s) for i, (n, s) in enumerate(self.slots.slots.items()) if s.reads(n) is not None]
        for late in (False, True):
            for index, name, slot in read:
                kind = turn.kind(index)
                if name not in turn.round.absent and late == (kind != "in place"):
                    value = source_for(slot, self.capabilities, turn.round, turn.round.choices >> (2 * index))
                    dtype = resolve_dtype(slot.dtype, self.capabilities)
                    maker = Maker(self.mine[name], dtype, value, self.mine, turn.round.live)
                    found[name] = maker.make(kind)
        return found

    def produce(self, seed: int) -> None:
        """Write over every row of every slot, as producers may who were given them."""
        for index, (name, slot) in enumerate(sorted(self.slots.slots.items())):
            if isinstance(slot, Copied):
                for buffers in (self.mine, self.right):
                    whole = buffers[name].tensor
                    whole.copy_(noise(tuple(whole.shape), whole.dtype, seed + index))

    def step(self, turn: Turn) -> None:
        """Fill both, by one lowering and by the oracle, and compare."""
        if turn.produced is not None and self.mine.ledger.handed_out:
            self.produce(turn.produced)
        sizes, brought = turn.round, self.given(turn)
        batch, side = self._batch(turn, {name: one.value for name, one in brought.items()})
        plain, beside = self._batch(turn, {name: one.plain for name, one in brought.items()})
        live = tuple(sizes.live[axis] for axis in self.slots.varying)
        ready = self.fill(turn, batch, live, side)
        step = Step(sizes.live, sizes.padded)
        right = fill_slot_by_slot(self.slots, self.right, self.capabilities, step, plain, beside)
        assert_same(ready.views, right, self.declaration, sizes.live)
        self.assert_untouched()
        for buffers in (self.mine, self.right):
            scribble(buffers, sizes.padded, torch.Generator().manual_seed(sizes.seed))

    def _batch(self, turn: Turn, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return batch_of(self.declaration, self.capabilities, turn.round, values)

    def fill(self, turn: Turn, batch: Any, live: tuple[int, ...], side: Mapping[str, Any]) -> Ready:
        """Fill mine by the turn's lowering."""
        absent, bucket = turn.round.absent, self.bucket(turn.round)
        if turn.way == "slot_by_slot":
            self.feed.disarm()
            return bucket.fill_slot_by_slot(batch, live, absent, side)
        if turn.way in ("fused", "in_graph", "alone"):
            ready = self.by_kernel(turn, batch, live, side)
        else:
            ready = (self.exact if turn.way == "exact" else bucket).fill(batch, live, absent, side)
            self.feed.disarm()
            self.fused(turn.round)[1]()
        ready.compute_on_device(batch)
        return ready

    def by_kernel(self, turn: Turn, batch: Any, live: tuple[int, ...], side: Mapping[str, Any]) -> Ready:
        """Fill by the kernel, which takes every batch that fits."""
        fused, kernel = self.fused(turn.round)
        ready = fused.fill(batch, live, turn.round.absent, side)
        for _ in range(1 + turn.twice):
            kernel()
        if turn.way == "alone":
            self.feed.upload.packet[:WORD].zero_()
            self.feed.was_disarmed()
            kernel()
        return ready

    def assert_untouched(self) -> None:
        """No one writes beyond what is live where no rule says so: kept tails, constants, other buckets' rows."""
        for name, slot in self.slots.slots.items():
            if not isinstance(slot.rule(), Pad):
                mine, right = self.mine[name].tensor, self.right[name].tensor
                assert same_bytes(mine, right), f"{name}: {mine} is not {right}"


@settings(max_examples=2 * settings().max_examples)  # there is much to draw
@given(data=st.data(), declaration=declarations(), capabilities=st.sampled_from(CAPABILITIES), out=st.booleans())
def test_lowerings_take_turns(
    data: st.DataObject, declaration: type[Inputs], capabilities: Capabilities, *, out: bool
) -> None:
    """Over one set of buffers, steps of all lowerings and kinds of sources leave what the oracle leaves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LARGE_LANE_BYTES", data.draw(st.sampled_from([LARGE_LANE_BYTES, 1, 64])))
        patch.setattr(plans, "LARGE_BYTES", data.draw(st.sampled_from([LARGE_BYTES, 1, 64])))
        patch.setattr(packet, "MOST_OUTER", data.draw(st.sampled_from([MOST_OUTER, 1])))
        world = World(declaration, capabilities, data.draw(st.none() | st.integers(0, 1 << 20)), out=out)
        for turn in data.draw(turns(world)):
            world.step(turn)


TABLES = declaration_of(
    {
        "rows": copied(BATCH, dtype=torch.int64, pad=0),
        "pages": copied(PAGES, dtype=torch.int64, pad=-1),
        "tokens": copied(TOKENS, dtype=torch.int64, pad=-1),
        "block_tables": copied(BATCH, PAGES, dtype=torch.int32, pad=-7),
        "mask": copied(3, TOKENS, PAGES, dtype=torch.bool, pad=True, strided=True),
    }
)


@given(data=st.data())
def test_tails_along_two_dims(data: st.DataObject) -> None:
    """Slots whose live rows are a box within a box keep no stale corner, whatever the sizes before."""
    world = World(TABLES, Capabilities())
    for turn in data.draw(turns(world)):
        world.step(turn)


@given(data=st.data(), declaration=declarations())
def test_handing_over_shows_the_batch_itself(data: st.DataObject, declaration: type[Inputs]) -> None:
    """Without copies the views are the batch's own tensors, and computed slots are what the oracle computes."""
    capabilities = Capabilities()
    world = World(declaration, capabilities)
    slots = declaration.slotgraph
    turn = data.draw(rounds(declaration, world.capacity))
    turn = Round(turn.live, turn.live, turn.absent, 0, turn.seed)  # sources of the slots' own dtypes
    batch, side = batch_of(declaration, capabilities, turn)
    live = tuple(turn.live[axis] for axis in slots.varying)
    ready = hand_over(world.exact, batch, live, turn.absent, side)
    ready.compute_on_device()
    right = fill_slot_by_slot(slots, world.right, capabilities, Step(turn.live, turn.live), batch, side)
    assert_same(ready.views, right, declaration, turn.live)
    for name, slot in slots.slots.items():
        source: Any = slot.reads(name)
        if source is not None:
            given = source.read(batch, side)
            own = given is not None and (slot.rewritten or slot.restored)  # the step writes what is the caller's
            assert (ready.views[name] is given) != own


@given(data=st.data(), declaration=declarations())
def test_order_of_declaration_changes_nothing(data: st.DataObject, declaration: type[Inputs]) -> None:
    """The same slots in another order make the same plan and the same bytes."""
    slots = declaration.slotgraph.slots
    names = data.draw(st.permutations(sorted(slots)))
    other = declare("Drawn", {name: slots[name] for name in names}, declaration.slotgraph.fields)
    sizes = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
    plans = [plan_fill(one, sizes, Capabilities()) for one in (other, declaration.slotgraph)]
    assert repr(plans[0]) == repr(plans[1])  # as text, in which NaN equals itself


def test_each_plan_has_its_own_order() -> None:
    """Sources of other dtypes or in place, for which slots are copied in another order, reach their own slots."""
    rows = copied(BATCH, dtype=torch.int64, pad=0, converts=(torch.int32,))
    slots = declaration_of(dict.fromkeys("abc", rows)).slotgraph
    buffers = allocate(slots, {BATCH: 4}, Capabilities(), empty)
    bucket = Bucket(slots, {BATCH: 4}, Capabilities(), buffers)
    for seed in range(4):
        for odd in "abc":
            for in_place in (False, True):
                batch = {name: noise((3,), torch.int64, seed + index) for index, name in enumerate("abc")}
                right = {name: value.tolist() for name, value in batch.items()}
                batch[odd] = buffers[odd].tensor[:3].copy_(batch[odd]) if in_place else batch[odd].int()
                bucket.fill(batch, (3,))
                assert {name: buffers[name].tensor[:3].tolist() for name in "abc"} == right


def test_the_oracle_by_hand() -> None:
    """The oracle itself against bytes worked out by hand: a copy, a tail, a kept tail, a host count, a device slot."""
    fields = {
        "seq_lens": copied(BATCH, dtype=torch.int32, pad=1),
        "kept": copied(BATCH, dtype=torch.int64, pad=keep("shown here")),
        "count": computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32),
        "ends": computed(lambda seq_lens: torch.cumsum(seq_lens, 0), shape=BATCH, dtype=torch.int64),
    }
    slots = declaration_of(fields).slotgraph
    buffers = allocate(slots, {BATCH: 4}, Capabilities(), empty)

    def fill(batch: list[int]) -> Views:
        values = {"seq_lens": torch.tensor(batch, dtype=torch.int32), "kept": torch.tensor(batch)}
        step = Step({BATCH: len(batch)}, {BATCH: 4})
        return fill_slot_by_slot(slots, buffers, Capabilities(), step, values)

    fill([5, 6, 7])
    views = fill([8])
    shown = {name: tensor.tolist() for name, tensor in views.items() if tensor is not None}
    assert shown == {"seq_lens": [8, 1, 1, 1], "kept": [8, 6, 7, 0], "count": [1], "ends": [8, 9, 10, 11]}


class Small(Inputs):
    """What the tests below fill: rows that are copied, converted and computed."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7)
    ends: torch.Tensor = copied(BATCH, dtype=torch.int16, pad=-9)
    starts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-8)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=-1.5, converts=(torch.float32,))
    count: torch.Tensor = computed(lambda step, limit: step.live(BATCH) + limit, shape=1, dtype=torch.int8)
    limit: int = 100


def small(lowering: Lowering = "in_graph") -> tuple[Bucket, Kernel]:
    """A bucket of four rows with its kernel."""
    declaration, capabilities, sizes = Small.slotgraph, Capabilities(), {BATCH: 4}
    buffers = poisoned(Small, capabilities, sizes, 5)
    bucket = Bucket(declaration, sizes, capabilities, buffers, lowering=lowering, feed=feed_for(buffers))
    return bucket, kernel_of(bucket)


def contents(bucket: Bucket) -> list[Any]:
    """What the buffers hold."""
    return [buffer.tensor.tolist() for buffer in bucket.buffers]


def three_rows() -> dict[str, torch.Tensor]:
    """A batch of tensors."""
    ends, starts = noise((3,), torch.int16, 3), noise((3,), torch.int32, 4)
    rows, weights = noise((3,), torch.int64, 1), noise((3, 2), torch.float32, 2)
    return {"rows": rows, "weights": weights, "ends": ends, "starts": starts}


def test_the_same_sources_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the same tensors uploads nothing, and reads what they hold by then."""
    fused, kernel = small()
    sent: list[bytes] = []
    send = fused.feed.upload.send

    def counted(data: bytes, kept: object) -> None:
        sent.append(data)
        send(data, kept)

    monkeypatch.setattr(fused.feed.upload, "send", counted)
    batch = three_rows()
    for seed in range(4):
        batch["rows"].copy_(noise((3,), torch.int64, seed))
        fused.fill(batch, (3,))
        kernel()
        assert contents(fused)[0] == [*batch["rows"].tolist(), 7]
    assert len(sent) == 1


def test_what_does_not_fit_is_said_before_anything_is_sent() -> None:
    """A host function whose result its slot cannot hold raises; packet and buffers stay, and the next step is right."""
    fused, kernel = small()
    batch = three_rows()
    fused.fill(batch, (3,))
    kernel()
    before, packet = contents(fused), fused.feed.upload.packet.clone()
    for limit in (126, 1e9, "many", [1, 2]):
        with pytest.raises((ComputeError, TypeError)):
            fused.fill({**batch, "rows": batch["rows"] + 1, "limit": limit}, (3,))
        assert torch.equal(fused.feed.upload.packet, packet)
        assert contents(fused) == before
    fused.fill({**batch, "limit": 124}, (3,))
    kernel()
    assert contents(fused)[-1] == [127]
