"""Every lowering against the oracle on each device, with many steps in flight: compared only when all are queued.

What the host brought is spoilt as soon as a fill returns, as an engine's next batch would.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotgraph import Inputs, Step
from slotgraph.backends import Backend, load
from slotgraph.dataflow import plan as plans
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.capabilities import resolve_dtype
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.packet import UNIT, WORD, Feed, head_bytes, table_of
from slotgraph.dataflow.plan import LARGE_BYTES
from slotgraph.dataflow.slots import Constant, Slot
from slotgraph.dataflow.tails import Once
from slotgraph.dataflow.views import Views
from tests.packing import NAME, backend_of
from tests.sources import Given, Maker
from tests.strategies import (
    AXES,
    HIDDEN,
    Round,
    batch_of,
    declarations,
    noise,
    rounds,
    same_bytes,
    source_for,
)

WAYS = ("fused", "fused", "foreach", "foreach", "slot_by_slot")
KINDS = ("plain", "list", "array", "turned array", "host", "expanded", "askew")
BUSY = 20_000_000
"""Clock cycles, some 10 ms, that keep a device from beginning before the host has queued several steps."""
DEVICES = [
    pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("cuda", "npu") if load(name).is_available()
]


@pytest.fixture(params=["cpu", NAME, *DEVICES])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each device that there is."""
    return backend_of(request.param)


class World:
    """One declaration on a device, over two sets of poisoned buffers: one for lowerings, one for the oracle."""

    def __init__(self, declaration: type[Inputs], backend: Backend, seed: int) -> None:
        self.declaration, self.backend, self.slots = declaration, backend, declaration.slotgraph
        self.capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
        self.mine, self.right = self._buffers(seed), self._buffers(seed)
        self.fusion = backend.fusion()
        room = head_bytes(len(self.mine)) + UNIT + sum(WORD * buffer.tensor.numel() + UNIT for buffer in self.mine)
        self.feed = Feed(backend.upload, room)
        self.kernels: dict[tuple[Any, ...], tuple[Bucket, Bucket | None, Any]] = {}

    def _buffers(self, seed: int) -> Buffers:
        made = allocate(self.slots, self.capacity, self.backend.capabilities, self.backend.empty)
        for index, buffer in enumerate(sorted(made, key=lambda one: one.name)):
            if not isinstance(buffer.slot, Constant) and not isinstance(buffer.slot.rule(), Once):
                buffer.tensor.copy_(noise(tuple(buffer.tensor.shape), buffer.tensor.dtype, seed + index))
        made.distrust()
        return made

    def bucket(self, turn: Round) -> tuple[Bucket, Bucket | None, Any]:
        """A turn's bucket, one for its kernel and what launches that, made once as a runner does."""
        key = (turn.absent, *(turn.padded[axis] for axis in AXES))
        if key not in self.kernels:
            bucket = Bucket(self.slots, turn.padded, self.backend.capabilities, self.mine, feed=self.feed)
            if self.fusion is None:
                return self.kernels.setdefault(key, (bucket, None, None))
            capabilities = self.backend.capabilities
            fused = Bucket(self.slots, turn.padded, capabilities, self.mine, lowering="fused", feed=self.feed)
            planned = fused.planned(turn.absent)
            rows = table_of(planned.lanes, self.fusion.block, planned.owner)
            table, targets = torch.from_numpy(rows).to(self.backend.device), [lane.target for lane in planned.lanes]
            self.kernels[key] = bucket, fused, self.fusion.kernel(table, self.feed.upload.packet, targets)
        return self.kernels[key]

    def source(self, slot: Slot, turn: Round, choice: int) -> torch.Tensor:
        """Random data where the slot lies, of the layout that was drawn."""
        value = source_for(slot, self.backend.capabilities, turn, choice)
        if slot.placement == "host":
            return value
        there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.backend.device)
        return there.copy_(value)

    def given(self, turn: Round, kinds: Sequence[str]) -> dict[str, Given]:
        """What a batch brings for each slot, of some kinds in turn."""
        found = {}
        for index, (name, slot) in enumerate(self.slots.slots.items()):
            if slot.reads(name) is not None and name not in turn.absent:
                value = self.source(slot, turn, turn.choices >> (2 * index))
                dtype = resolve_dtype(slot.dtype, self.backend.capabilities)
                maker = Maker(self.mine[name], dtype, value, self.mine, turn.live)
                found[name] = maker.make(kinds[index % len(kinds)])
        return found

    def play(self, turn: Round, way: str, kinds: Sequence[str]) -> tuple[Views, Views]:
        """One step by a lowering and by the oracle; what each left, copied in the order of the device's work."""
        capabilities, brought = self.backend.capabilities, self.given(turn, kinds)
        batch, side = batch_of(self.declaration, capabilities, turn, {n: one.value for n, one in brought.items()})
        live = tuple(turn.live[axis] for axis in self.slots.varying)
        bucket, fused, kernel = self.bucket(turn)
        if fused is not None and way == "fused":
            ready = fused.fill(batch, live, turn.absent, side)
            kernel()
        elif way == "slot_by_slot":
            ready = bucket.fill_slot_by_slot(batch, live, turn.absent, side)
        else:
            ready = bucket.fill(batch, live, turn.absent, side)
        for one in brought.values():
            spoil(one.value)
        ready.compute_on_device(batch)
        step = Step(turn.live, turn.padded)
        batch, side = batch_of(self.declaration, capabilities, turn, {n: one.plain for n, one in brought.items()})
        right = fill_slot_by_slot(self.slots, self.right, capabilities, step, batch, side)
        return _copied(ready.views), _copied(right)


def spoil(value: Any) -> None:
    """Change what lies in the host's memory."""
    if isinstance(value, list):
        value[:] = [0] * len(value)
    elif isinstance(value, np.ndarray):
        value[...] = 1
    elif isinstance(value, torch.Tensor) and value.is_cpu and value.is_contiguous() and not value.is_neg():
        value.fill_(1)


def _copied(views: Views) -> Views:
    return {name: None if tensor is None else tensor.clone() for name, tensor in views.items()}


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    max_examples=min(300, settings().max_examples),  # several steps each, and on a device hundreds are queued
)
@given(data=st.data(), declaration=declarations(), seed=st.integers(0, 1 << 20))
def test_every_step_in_flight(backend: Backend, data: st.DataObject, declaration: type[Inputs], seed: int) -> None:
    """Steps by random lowerings, queued behind a busy device, leave the oracle's bytes, tails included."""
    world = World(declaration, backend, seed)
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=4)
    turns = data.draw(
        st.lists(st.tuples(rounds(declaration, world.capacity), st.sampled_from(WAYS), kinds), min_size=1)
    )
    if backend.device.type == "cuda":
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "LARGE_BYTES", data.draw(st.sampled_from([LARGE_BYTES, LARGE_BYTES, 1, 64])))
        found = [(turn, way, *world.play(turn, way, kinds)) for turn, way, kinds in turns]
    backend.synchronize()
    for turn, way, mine, right in found:
        assert set(mine) == set(right)
        for name, expected in right.items():
            got = mine[name]
            same = got is expected if got is None or expected is None else same_bytes(got.cpu(), expected.cpu())
            assert same, f"{name} by {way}, {turn}: {got} is not {expected}"
