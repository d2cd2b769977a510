"""Every lowering against the oracle on each device, with many steps in flight: compared only when all are queued."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slotgraph import Inputs, Step
from slotgraph.backends import Backend
from slotgraph.backends.cpu import CpuBackend
from slotgraph.backends.registry import load
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import Buffers, allocate
from slotgraph.dataflow.feed import Feed
from slotgraph.dataflow.fill import compute_on_device
from slotgraph.dataflow.fused import FusedFill
from slotgraph.dataflow.kinds import Misfit
from slotgraph.dataflow.lanes import WORD, head_bytes, table_of
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.dataflow.ready import Views
from slotgraph.dataflow.slots import Constant, Slot
from slotgraph.dataflow.tails import Once
from tests.strategies import AXES, HIDDEN, Round, batch_of, declarations, noise, rounds, same_bytes, source_for

WAYS = ("fused", "fused", "fused", "foreach", "slot_by_slot")
BUSY = 20_000_000
"""Clock cycles, some 10 ms, that keep a device from beginning before the host has queued several steps."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> Backend:
    """A device; skipped, with the reason, where there is none."""
    kind = load(request.param)
    available = kind.is_available()
    if not available:
        pytest.skip(f"{request.param}: {available.reason}")
    return kind()


class World:
    """One declaration on a device, over two sets of poisoned buffers: one for lowerings, one for the oracle."""

    def __init__(self, declaration: type[Inputs], backend: Backend, seed: int) -> None:
        self.declaration, self.backend, self.slots = declaration, backend, declaration.slotgraph
        self.capacity = dict.fromkeys(AXES, 9) | {HIDDEN: 3}
        self.mine, self.right = self._buffers(seed), self._buffers(seed)
        fusion = backend.fusion()
        assert fusion is not None, "this device has a fused fill"
        self.fusion = fusion
        room = head_bytes(len(self.mine)) + sum(WORD * buffer.tensor.numel() + WORD for buffer in self.mine)
        self.feed = Feed(fusion.upload(room))
        self.kernels: dict[tuple[Any, ...], tuple[Bucket, FusedFill, Any]] = {}

    def _buffers(self, seed: int) -> Buffers:
        made = allocate(self.slots, self.capacity, self.backend.capabilities, self.backend.empty)
        for index, buffer in enumerate(sorted(made, key=lambda one: one.name)):
            if not isinstance(buffer.slot, Constant) and not isinstance(buffer.slot.rule(), Once):
                buffer.tensor.copy_(noise(tuple(buffer.tensor.shape), buffer.tensor.dtype, seed + index))
        made.distrust()
        return made

    def bucket(self, turn: Round) -> tuple[Bucket, FusedFill, Any]:
        """A turn's bucket, its fused fill and what launches the kernel, made once as a runner does."""
        key = (turn.absent, *(turn.padded[axis] for axis in AXES))
        if key not in self.kernels:
            bucket = Bucket(self.slots, turn.padded, self.backend.capabilities, self.mine)
            fused = bucket.fused("fused", self.feed, turn.absent)
            rows = table_of(fused.packer.lanes, self.fusion.block, fused.packer.owner)
            table = torch.from_numpy(rows).to(self.backend.device)
            targets = [lane.target for lane in fused.packer.lanes]
            self.kernels[key] = bucket, fused, self.fusion.kernel(table, self.feed.upload.packet, targets)
        return self.kernels[key]

    def source(self, slot: Slot, turn: Round, choice: int) -> torch.Tensor:
        """Random data where the slot lies, of the layout that was drawn."""
        value = source_for(slot, self.backend.capabilities, turn, choice)
        if slot.placement == "host":
            return value
        there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=self.backend.device)
        return there.copy_(value)

    def play(self, turn: Round, way: str) -> tuple[Views, Views]:
        """One step by a lowering and by the oracle; what each left, copied in the order of the device's work."""
        brought = {
            name: self.source(slot, turn, turn.choices >> (2 * index))
            for index, (name, slot) in enumerate(self.slots.slots.items())
            if slot.reads(name) is not None and name not in turn.absent
        }
        batch, side = batch_of(self.declaration, self.backend.capabilities, turn, brought)
        live = tuple(turn.live[axis] for axis in self.slots.varying)
        bucket, fused, kernel = self.bucket(turn)
        ready = fused.send(batch, side, live) if way == "fused" else Misfit("layout")
        if not isinstance(ready, Misfit):
            kernel()
        elif way == "slot_by_slot":
            ready = bucket.fill_slot_by_slot(batch, live, turn.absent, side)
        else:
            ready = bucket.fill(batch, live, turn.absent, side)
        compute_on_device(ready)
        step = Step(turn.live, turn.padded)
        right = fill_slot_by_slot(self.slots, self.right, self.backend.capabilities, step, batch, side)
        return _copied(ready.views), _copied(right)


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
    turns = data.draw(st.lists(st.tuples(rounds(declaration, world.capacity), st.sampled_from(WAYS)), min_size=1))
    if not isinstance(backend, CpuBackend):
        torch.cuda._sleep(BUSY)  # type: ignore[no-untyped-call]
    found = [(turn, way, *world.play(turn, way)) for turn, way in turns]
    backend.synchronize()
    for turn, way, mine, right in found:
        assert set(mine) == set(right)
        for name, expected in right.items():
            got = mine[name]
            same = got is expected if got is None or expected is None else same_bytes(got, expected)
            assert same, f"{name} by {way}, {turn}: {got} is not {expected}"
