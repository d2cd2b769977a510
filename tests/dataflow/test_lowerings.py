"""Every lowering against the oracle: over one set of buffers, the same bytes, whichever lowering filled each step."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, EagerRunner, Inputs, Step, computed, copied, keep
from slotgraph.backends import Backend, load
from slotgraph.dataflow import packet
from slotgraph.dataflow import plan as plans
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import Capabilities, LoweringName, resolve_dtype
from slotgraph.dataflow.declaration import declare
from slotgraph.dataflow.errors import ComputeError, DeclarationError
from slotgraph.dataflow.fill.bucket import Bucket, hand_over
from slotgraph.dataflow.fill.kinds import KindTable
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.packet import MOST_OUTER, WORD
from slotgraph.dataflow.plan import LARGE_BYTES, LARGE_LANE_BYTES, plan_fill
from slotgraph.dataflow.slots import Copied, Slot
from slotgraph.dataflow.sources import look_up
from slotgraph.dataflow.views import Views
from slotgraph.runners.testing.ground import fill_faults, scribble, untouched
from tests.packing import NAME, Filled, Kernel, backend_of, feed_for, filled, kernel_of
from tests.sources import HOST_DATA, IN_BUFFERS, KINDS, Given, Maker
from tests.strategies import (
    AXES,
    CAPABILITIES,
    HIDDEN,
    PAGES,
    Round,
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

WAYS = ("fused", "fused", "fused", "in_graph", "alone", "direct", "foreach", "slot_by_slot", "exact")
WAYS_IN_FLIGHT = ("fused", "fused", "foreach", "foreach", "slot_by_slot")
KINDS_IN_FLIGHT = ("plain", "list", "array", "turned array", "host", "expanded", "askew")
BUSY = 20_000_000
"""Clock cycles, some 10 ms, that keep a device from beginning before the host has queued several steps."""
DEVICES = [
    pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "npu") if load(name).is_available()
]


@attrs.frozen
class Turn:
    """One step: its sizes, by which lowering, and of what kinds its sources are, slot by slot."""

    round: Round
    way: str
    kinds: Sequence[str]
    twice: bool = False
    produced: int | None = None


class World:
    """One declaration over two sets of buffers: one for all lowerings, one for the oracle.

    Buckets share one packet, as a runner's do. backend: whose memory that is, and whose kernel. out: producers were
    given the slots. settings: what functions may ask for.
    """

    def __init__(
        self,
        declaration: type[Inputs],
        capabilities: Capabilities,
        seed: int | None = None,
        *,
        out: bool = False,
        backend: Backend | None = None,
        settings: Any = None,
    ) -> None:
        self.declaration, self.capabilities = declaration, capabilities
        self.slots = declaration.slotgraph.under(settings)
        self.backend: Backend = load("cpu")() if backend is None else backend
        self.capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
        self.mine, self.right = self._buffers(seed), self._buffers(seed)
        self.feed, self.fusion = feed_for(self.mine, self.backend.upload), self.backend.fusion()
        self.buckets: dict[tuple[Any, ...], Bucket] = {}
        self.kernels: dict[tuple[Any, ...], tuple[Bucket, Kernel]] = {}
        self.table = KindTable(self.slots, self.capacity)
        self.mine.clean.handed_out = out

    def _buffers(self, seed: int | None) -> Buffers:
        if seed is None:
            return allocate(self.slots, self.capacity, self.capabilities, empty)
        return poisoned(self.declaration, self.capabilities, self.capacity, seed, self.backend.empty)

    def bucket(self, turn: Round, lowering: LoweringName, *, exact: bool = False) -> Bucket:
        """The bucket of a turn's padded sizes, planned once as a runner does."""
        sizes = self.capacity if exact else turn.padded
        key = lowering, exact, turn.absent, *(sizes[axis] for axis in AXES)
        if key not in self.buckets:
            self.buckets[key] = Bucket(
                self.slots,
                sizes,
                self.capabilities,
                self.mine,
                absent=turn.absent,
                lowering=lowering,
                feed=self.feed,
                table=self.table,
                exact=exact,
            )
        return self.buckets[key]

    def fused(self, turn: Round) -> tuple[Bucket, Kernel]:
        """A turn's bucket for one pattern, filled by a kernel, and its kernel."""
        key = (turn.absent, *(turn.padded[axis] for axis in AXES))
        if key not in self.kernels:
            fused = self.bucket(turn, "fused")
            self.kernels[key] = fused, kernel_of(fused, self.fusion)
        return self.kernels[key]

    def source(self, slot: Slot, turn: Round, choice: int) -> torch.Tensor:
        """Random data where the slot lies, of the layout that was drawn."""
        value = source_for(slot, self.capabilities, turn, choice)
        if slot.placement == "host" or self.backend.device.type == "cpu":
            return value
        there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.backend.device)
        return there.copy_(value)

    def given(self, turn: Turn) -> dict[str, Given]:
        """What the batch brings for each slot; what lies in buffers is read when producers are done."""
        found: dict[str, Given] = {}
        read = [(i, n, s) for i, (n, s) in enumerate(self.slots.slots.items()) if s.reads(n) is not None]
        for late in (False, True):
            for index, name, slot in read:
                kind = turn.kinds[index % len(turn.kinds)]
                if name not in turn.round.absent and late == (kind != "in place"):
                    value = self.source(slot, turn.round, turn.round.choices >> (2 * index))
                    dtype = resolve_dtype(slot.dtype, self.capabilities)
                    found[name] = Maker(self.mine[name], dtype, value, self.mine, turn.round.live).make(kind)
        return found

    def produce(self, seed: int) -> None:
        """Write over every row of every slot, as producers may who were given them."""
        for index, (name, slot) in enumerate(sorted(self.slots.slots.items())):
            if isinstance(slot, Copied):
                for buffers in (self.mine, self.right):
                    whole = buffers[name].tensor
                    whole.copy_(noise(tuple(whole.shape), whole.dtype, seed + index))

    def play(self, turn: Turn, *, in_flight: bool = False) -> tuple[Views, Views]:
        """The views of a lowering and of the oracle. in_flight: what the host brought is spoilt at once."""
        sizes, brought = turn.round, self.given(turn)
        batch, side = self._batch(turn, {name: one.value for name, one in brought.items()})
        plain, beside = self._batch(turn, {name: one.plain for name, one in brought.items()})
        ready = self.fill(turn, batch, tuple(sizes.live[axis] for axis in self.slots.varying), side)
        for one in brought.values() if in_flight else ():
            spoil(one.value)
        ready.compute_on_device(batch)
        step = Step(sizes.live, sizes.padded)
        right = fill_slot_by_slot(self.slots, self.right, self.capabilities, step, plain, beside)
        if not in_flight:
            return ready.views, right
        mine, right = ({n: one if one is None else one.clone() for n, one in v.items()} for v in (ready.views, right))
        return mine, right

    def step(self, turn: Turn) -> None:
        if turn.produced is not None and self.mine.clean.handed_out:
            self.produce(turn.produced)
        mine, right = self.play(turn)
        assert set(mine) == set(right)
        assert list(fill_faults(mine, right, self.slots.slots, turn.round.live)) == []
        assert list(untouched(self.mine, self.right)) == []
        for buffers in (self.mine, self.right):
            scribble(buffers, turn.round.padded, torch.Generator().manual_seed(turn.round.seed))

    def _batch(self, turn: Turn, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return batch_of(self.declaration, self.capabilities, turn.round, values)

    def fill(self, turn: Turn, batch: Any, live: tuple[int, ...], side: Mapping[str, Any]) -> Filled:
        """Fill mine by the turn's lowering. A packet that is disarmed says nothing to a kernel."""
        if turn.way == "slot_by_slot":
            self.feed.disarm()
            bucket = self.bucket(turn.round, "slot_by_slot")
            bucket.fill_slot_by_slot(batch, live, side, bucket.tensors(batch, live, side))
            return Filled(bucket.at(live).shown())
        by_copies: LoweringName = "direct" if turn.way == "direct" else "foreach"
        if self.fusion is None:
            return filled(self.bucket(turn.round, by_copies), batch, live, side)
        fused, kernel = self.fused(turn.round)
        if turn.way in ("direct", "foreach", "exact"):
            ready = filled(self.bucket(turn.round, by_copies, exact=turn.way == "exact"), batch, live, side)
            self.feed.disarm()
            kernel()
            return ready
        ready = filled(fused, batch, live, side)
        for _ in range(1 + turn.twice):
            kernel()
        if turn.way == "alone":
            self.feed.upload.packet[:WORD].zero_()
            self.feed.was_disarmed()
            kernel()
        return ready


@st.composite
def turns(draw: st.DrawFn, world: World) -> list[Turn]:
    """Random steps over few buckets, so that each of them is filled in several ways."""
    made = []
    paddings = [one.padded for one in draw(st.lists(rounds(world.declaration, world.capacity), min_size=1, max_size=3))]
    for _ in range(draw(st.integers(1, 7))):
        way, turn = draw(st.sampled_from(WAYS)), draw(rounds(world.declaration, world.capacity))
        padded = draw(st.sampled_from(paddings))
        live = {axis: min(rows, padded[axis]) for axis, rows in turn.live.items()}
        turn = attrs.evolve(turn, live=live, padded=live if way == "exact" else padded)
        of = draw(st.sampled_from([KINDS, KINDS, HOST_DATA, IN_BUFFERS]))
        kinds = draw(st.lists(st.sampled_from(of), min_size=1, max_size=5))
        made.append(Turn(turn, way, kinds, draw(st.booleans()), draw(st.none() | st.integers(0, 99))))
    return made


@settings(max_examples=2 * settings().max_examples)  # there is much to draw
@given(data=st.data(), declaration=declarations(), capabilities=st.sampled_from(CAPABILITIES), out=st.booleans())
def test_lowerings_in_turns_leave_what_the_oracle_leaves(
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


def spoil(value: Any) -> None:
    """Change what lies in the host's memory, as an engine's next batch would."""
    if isinstance(value, list):
        value[:] = [0] * len(value)
    elif isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, torch.Tensor) and value.is_cpu and value.is_contiguous() and not value.is_neg():
        value.fill_(1)


@pytest.mark.parametrize("name", ["cpu", NAME, *DEVICES])
@settings(max_examples=min(300, settings().max_examples))  # several steps each, and on a device hundreds are queued
@given(data=st.data(), declaration=declarations(), seed=st.integers(0, 1 << 20))
def test_steps_in_flight_leave_what_the_oracle_leaves(
    name: str, data: st.DataObject, declaration: type[Inputs], seed: int
) -> None:
    """Steps on each device, queued behind a busy one and compared when all are, leave the oracle's bytes."""
    backend = backend_of(name)
    world = World(declaration, backend.capabilities, seed, backend=backend)
    kinds = st.lists(st.sampled_from(KINDS_IN_FLIGHT), min_size=1, max_size=4)
    made = st.builds(Turn, rounds(declaration, world.capacity), st.sampled_from(WAYS_IN_FLIGHT), kinds)
    drawn = data.draw(st.lists(made, min_size=1))
    if backend.device.type == "cuda":
        torch.cuda._sleep(BUSY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LARGE_BYTES", data.draw(st.sampled_from([LARGE_BYTES, LARGE_BYTES, 1, 64])))
        found = [(turn, world.play(turn, in_flight=True)) for turn in drawn]
    backend.synchronize()
    for turn, (mine, right) in found:
        assert set(mine) == set(right)
        for slot, expected in right.items():
            got = mine[slot]
            same = got is expected if got is None or expected is None else same_bytes(got.cpu(), expected.cpu())
            assert same, f"{slot} in {turn}: {got} is not {expected}"


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
def test_tails_along_two_dims_keep_no_stale_corner(data: st.DataObject) -> None:
    """Slots whose live rows are a box within a box keep no stale corner, whatever the sizes before."""
    world = World(TABLES, Capabilities())
    for turn in data.draw(turns(world)):
        world.step(turn)


@given(data=st.data(), declaration=declarations())
def test_handing_over_shows_the_batch_itself(data: st.DataObject, declaration: type[Inputs]) -> None:
    """Without copies the views are the batch's own tensors, and computed slots are what the oracle computes."""
    world = World(declaration, Capabilities())
    turn = data.draw(rounds(declaration, world.capacity))
    turn = Round(turn.live, turn.live, turn.absent, 0, turn.seed)  # sources of the slots' own dtypes
    batch, side = batch_of(declaration, world.capabilities, turn)
    live, step = tuple(turn.live[axis] for axis in world.slots.varying), Step(turn.live, turn.live)
    views = hand_over(world.bucket(turn, "direct", exact=True), batch, live, side)
    right = fill_slot_by_slot(world.slots, world.right, world.capabilities, step, batch, side)
    assert list(fill_faults(views, right, world.slots.slots, turn.live)) == []
    for name, slot in world.slots.slots.items():
        source: Any = slot.reads(name)
        if source is not None:
            given = source.read(batch, side)
            own = given is not None and (slot.rewritten or slot.restored)  # the step writes what is the caller's
            assert (views[name] is given) != own


@given(data=st.data(), declaration=declarations())
def test_the_order_of_declaration_changes_nothing(data: st.DataObject, declaration: type[Inputs]) -> None:
    """The same slots in another order make the same plan and the same bytes."""
    slots = declaration.slotgraph.slots
    names = data.draw(st.permutations(sorted(slots)))
    other = declare("Drawn", {name: slots[name] for name in names}, declaration.slotgraph.fields)
    sizes = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
    one, two = (plan_fill(each, sizes, Capabilities()) for each in (other, declaration.slotgraph))
    assert repr(one) == repr(two)  # as text, in which NaN equals itself


def test_the_oracle_leaves_bytes_worked_out_by_hand() -> None:
    """The oracle itself against bytes worked out by hand: a copy, a tail, a kept tail, a host count, a device slot."""
    fields = {
        "seq_lens": copied(BATCH, dtype=torch.int32, pad=1),
        "kept": copied(BATCH, dtype=torch.int64, pad=keep("shown here")),
        "count": computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32),
        "ends": computed(lambda seq_lens: torch.cumsum(seq_lens, 0), shape=BATCH, dtype=torch.int64),
    }
    slots = declaration_of(fields).slotgraph
    buffers, shown = allocate(slots, {BATCH: 4}, Capabilities(), empty), dict[str, Any]()
    for batch in ([5, 6, 7], [8]):
        values = {"seq_lens": torch.tensor(batch, dtype=torch.int32), "kept": torch.tensor(batch)}
        views = fill_slot_by_slot(slots, buffers, Capabilities(), Step({BATCH: len(batch)}, {BATCH: 4}), values)
        shown = {name: tensor.tolist() for name, tensor in views.items() if tensor is not None}
    assert shown == {"seq_lens": [8, 1, 1, 1], "kept": [8, 6, 7, 0], "count": [1], "ends": [8, 9, 10, 11]}


class Ranked(Inputs):
    """Settings wherever a function may ask for them, and a slot that follows from such slots."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-5)
    after: torch.Tensor = computed(lambda moved, of_rank: moved + of_rank, shape=TOKENS, dtype=torch.int64)
    moved: torch.Tensor = computed(
        lambda ids, settings: ids * 3 + look_up(settings, "rank"), shape=TOKENS, dtype=torch.int64
    )
    wide: torch.Tensor = computed(
        lambda settings, ids, out: torch.mul(ids, look_up(settings, "scale"), out=out), shape=TOKENS, dtype=torch.int64
    )
    of_rank: torch.Tensor = computed(
        lambda step, settings: step.live(TOKENS) * 100 + step.padded(TOKENS) * 10 + look_up(settings, "rank"),
        shape=1,
        dtype=torch.int64,
    )
    here: torch.Tensor = computed(
        lambda settings: [look_up(settings, "scale")], shape=1, dtype=torch.int32, placement="host"
    )


@given(data=st.data(), kind=st.sampled_from([dict, SimpleNamespace]))
def test_every_way_to_fill_knows_settings(data: st.DataObject, kind: Any) -> None:
    """Functions get the runner's settings in every lowering and by the oracle, on either side."""
    world = World(Ranked, Capabilities(), settings=kind(rank=3, scale=-7))
    for turn in data.draw(turns(world)):
        world.step(turn)


def test_settings_are_given_or_refused_when_a_runner_is_made() -> None:
    """A slot that asks for settings where none are given is named; one that is off asks for none."""
    with pytest.raises(DeclarationError, match=r"slot '\w+': its function asks for `settings`: give the runner"):
        EagerRunner(Ranked, lambda view: view, backend="cpu")
    ranked: Any = EagerRunner(Ranked, lambda view: view.ids, backend="cpu", settings={"rank": 3, "scale": 5})
    view = ranked.fill({"ids": [1, 2]})
    assert (view.after.tolist(), view.wide.tolist()) == ([229, 232], [5, 10])
    assert (view.of_rank.tolist(), view.here.tolist()) == ([223], [5])
    count = computed(lambda settings: settings.count, dtype=torch.int64, when=lambda _: False)
    switched = declaration_of({"ids": copied(TOKENS, dtype=torch.int64, pad=0), "count": count})
    runner: Any = EagerRunner(switched, lambda view: vars(view)["count"], backend="cpu")
    assert runner({"ids": torch.tensor([4, 5])}) is None


class Small(Inputs):
    """What the tests below fill."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=7)
    weights: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=-1.5, converts=(torch.float32,))
    count: torch.Tensor = computed(lambda step, limit: step.live(BATCH) + limit, shape=1, dtype=torch.int8)
    limit: int = 100


def small() -> tuple[Bucket, Kernel, dict[str, torch.Tensor]]:
    """A bucket of four rows with its kernel, and a batch of three."""
    buffers = poisoned(Small, Capabilities(), {BATCH: 4}, 5)
    feed = feed_for(buffers)
    bucket = Bucket(Small.slotgraph, {BATCH: 4}, Capabilities(), buffers, lowering="in_graph", feed=feed)
    batch = {"rows": noise((3,), torch.int64, 1), "weights": noise((3, 2), torch.float32, 2)}
    return bucket, kernel_of(bucket), batch


def test_the_same_sources_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with the same tensors uploads nothing, and reads what they hold by then."""
    fused, kernel, batch = small()
    sent: list[bytes] = []
    send = fused.feed.upload.send

    def counted(data: bytes, kept: object) -> None:
        sent.append(data)
        send(data, kept)

    monkeypatch.setattr(fused.feed.upload, "send", counted)
    for seed in range(4):
        batch["rows"].copy_(noise((3,), torch.int64, seed))
        filled(fused, batch, (3,))
        kernel()
        assert fused.buffers["rows"].tensor.tolist() == [*batch["rows"].tolist(), 7]
    assert len(sent) == 1


def test_what_does_not_fit_is_said_before_anything_is_sent() -> None:
    """A host function whose result its slot cannot hold raises; packet and buffers stay, and the next step is right."""
    fused, kernel, batch = small()
    filled(fused, batch, (3,))
    kernel()
    before, packet = [one.tensor.tolist() for one in fused.buffers], fused.feed.upload.packet.clone()
    for limit in (126, 1e9, "many", [1, 2]):
        with pytest.raises((ComputeError, TypeError)):
            filled(fused, {**batch, "rows": batch["rows"] + 1, "limit": limit}, (3,))
        assert torch.equal(fused.feed.upload.packet, packet)
        assert [one.tensor.tolist() for one in fused.buffers] == before
    filled(fused, {**batch, "limit": 124}, (3,))
    kernel()
    assert fused.buffers["count"].tensor.tolist() == [127]
