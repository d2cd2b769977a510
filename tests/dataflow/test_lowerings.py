"""Every lowering against the oracle: the same bytes, tails included, over random declarations and step sequences."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Inputs, Step, computed, copied, keep
from slotgraph.dataflow.bucket import Bucket, hand_over
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import Capabilities
from slotgraph.dataflow.declaration import declare
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.planner import plan_fill
from slotgraph.dataflow.views import Views
from slotgraph.runners.testing.ground import differences, scribble
from tests.fused import feed_for
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
)


def assert_same(mine: Views, right: Views, declaration: type[Inputs], live: Sizes) -> None:
    """Both views hold the same slots, the same bytes in each, and None for the same ones."""
    assert set(mine) == set(right)
    assert list(differences(mine, right, declaration.slotgraph.slots, live)) == []


class World:
    """One declaration over two sets of buffers: one for the lowering under test, one for the oracle."""

    def __init__(self, declaration: type[Inputs], capabilities: Capabilities, seed: int | None) -> None:
        self.declaration = declaration
        self.capabilities = capabilities
        self.capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
        self.mine, self.right = self._buffers(seed), self._buffers(seed)
        self.buckets: dict[tuple[int, ...], Bucket] = {}
        self.feed = feed_for(self.mine)

    def _buffers(self, seed: int | None) -> Buffers:
        if seed is None:
            return allocate(self.declaration.slotgraph, self.capacity, self.capabilities, empty)
        return poisoned(self.declaration, self.capabilities, self.capacity, seed)

    def bucket(self, turn: Round) -> Bucket:
        """The bucket of a turn's padded sizes, planned once as a runner does."""
        key = tuple(turn.padded[axis] for axis in AXES)
        if key not in self.buckets:
            declaration = self.declaration.slotgraph
            self.buckets[key] = Bucket(declaration, turn.padded, self.capabilities, self.mine, feed=self.feed)
        return self.buckets[key]

    def play(self, turn: Round) -> None:
        """Fill both from the same batch, compare, and let the model scribble over both."""
        batch, side = batch_of(self.declaration, self.capabilities, turn)
        live = tuple(turn.live[axis] for axis in self.declaration.slotgraph.varying)
        ready = self.bucket(turn).fill(batch, live, turn.absent, side)
        ready.compute_on_device()
        step = Step(turn.live, turn.padded)
        right = fill_slot_by_slot(self.declaration.slotgraph, self.right, self.capabilities, step, batch, side)
        assert_same(ready.views, right, self.declaration, turn.live)
        for buffers in (self.mine, self.right):
            scribble(buffers, turn.padded, torch.Generator().manual_seed(turn.seed))


@given(data=st.data(), declaration=declarations(), capabilities=st.sampled_from(CAPABILITIES))
def test_grouped_fill_gives_the_oracles_bytes(
    data: st.DataObject, declaration: type[Inputs], capabilities: Capabilities
) -> None:
    """A sequence of steps through grouped copies leaves, after each step, what the oracle leaves."""
    world = World(declaration, capabilities, data.draw(st.none() | st.integers(0, 1 << 20)))
    for turn in data.draw(st.lists(rounds(declaration, world.capacity), min_size=1, max_size=6)):
        world.play(turn)


@given(data=st.data(), declaration=declarations(), capabilities=st.sampled_from(CAPABILITIES))
def test_exact_fill_gives_the_oracles_bytes(
    data: st.DataObject, declaration: type[Inputs], capabilities: Capabilities
) -> None:
    """An exact fill, as eager runners make it, shows what the oracle shows with no padding at all."""
    world = World(declaration, capabilities, None)
    slots = declaration.slotgraph
    exact = Bucket(slots, world.capacity, capabilities, world.mine, exact=True, feed=world.feed)
    for turn in data.draw(st.lists(rounds(declaration, world.capacity), min_size=1, max_size=4)):
        batch, side = batch_of(declaration, capabilities, turn)
        live = tuple(turn.live[axis] for axis in slots.varying)
        ready = exact.fill(batch, live, turn.absent, side)
        ready.compute_on_device()
        right = fill_slot_by_slot(slots, world.right, capabilities, Step(turn.live, turn.live), batch, side)
        assert_same(ready.views, right, declaration, turn.live)


@given(data=st.data(), declaration=declarations())
def test_handing_over_shows_the_batch_itself(data: st.DataObject, declaration: type[Inputs]) -> None:
    """Without copies the views are the batch's own tensors, and computed slots are what the oracle computes."""
    capabilities = Capabilities()
    world = World(declaration, capabilities, None)
    slots = declaration.slotgraph
    turn = data.draw(rounds(declaration, world.capacity))
    turn = Round(turn.live, turn.live, turn.absent, 0, turn.seed)  # sources of the slots' own dtypes
    batch, side = batch_of(declaration, capabilities, turn)
    live = tuple(turn.live[axis] for axis in slots.varying)
    exact = Bucket(slots, world.capacity, capabilities, world.mine, exact=True)
    ready = hand_over(exact, batch, live, turn.absent, side)
    ready.compute_on_device()
    right = fill_slot_by_slot(slots, world.right, capabilities, Step(turn.live, turn.live), batch, side)
    assert_same(ready.views, right, declaration, turn.live)
    for name, slot in slots.slots.items():
        source: Any = slot.reads(name)
        if source is not None:
            given = source.read(batch, side)
            own = given is not None and (slot.rewritten or slot.restored)  # the step writes what is the caller's
            assert (ready.views[name] is given) != own


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
    world = World(TABLES, Capabilities(), None)
    for turn in data.draw(st.lists(rounds(TABLES, world.capacity), min_size=3, max_size=8)):
        world.play(turn)


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
