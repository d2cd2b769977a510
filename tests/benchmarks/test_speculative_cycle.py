"""A speculative cycle's inputs, draft, verify and extend: this library's against one reset and one copy a slot."""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, standard
from slotgraph.backends import Backend, load
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.planner import NONE
from slotgraph.dataflow.roles import resolve_dtype
from slotgraph.dataflow.tails import Number, Pad, resolve_value

pytestmark = pytest.mark.slotgraph_backends("cpu", "cuda")

Batch = Mapping[str, torch.Tensor]
TOPK, STEPS, NODES = 4, 5, 16
LIVE, PADDED = 37, 48
SETS = 4
SIZES = {standard.TOPK: TOPK, standard.STEPS: STEPS, standard.HIDDEN: 256, standard.VOCAB: 512, standard.FILL: 1}
KINDS: tuple[tuple[type[Inputs], int], ...] = (
    (standard.DraftInputs, TOPK),
    (standard.TargetVerifyInputs, NODES),
    (standard.DraftExtendInputs, NODES),
)
"""The standard's three declarations, and the tokens that a request has in each."""
ROUNDS = 400


def smallest_step(view: Any) -> Any:
    """As small as a step can be, so that its graph hides nothing of what inputs take."""
    return view.seq_lens + 1


@attrs.frozen(eq=False)
class Kind:
    """One of a cycle's three runners, and the same by hand: slots with their tails, and a graph without a fill.

    slots: name, buffer, the tail's value or None where it is kept, and the first dim's padded size.
    """

    runner: DecodeRunner[Any]
    by_hand: DecodeRunner[Any]
    slots: Sequence[tuple[str, torch.Tensor, Number | None, int]]
    batches: Sequence[Batch]

    @classmethod
    def of(cls, inputs: type[Inputs], width: int, backend: Backend) -> "Kind":
        sizes = {axis: size for axis, size in SIZES.items() if axis in inputs.slotgraph.axes}
        given: dict[str, Any] = {"sizes": sizes, "width": width, "backend": backend, "output_rows": BATCH}
        runner, by_hand = (
            DecodeRunner(inputs, smallest_step, buckets=[PADDED], progress=False, lowering=lowering, **given)
            for lowering in ("auto", "foreach")
        )
        runner.capture()
        by_hand.capture()
        stage, buffers = by_hand.stage, by_hand.graphs.buffers
        slots = []
        for name, slot in stage.declaration.slots.items():
            rule = slot.rule()
            pad = resolve_value(rule.value, backend.capabilities, stage.sizes) if isinstance(rule, Pad) else None
            if slot.reads(name) is not None or rule is not None:
                slots.append((name, buffers[name].tensor, pad, extent(slot.shape, buffers.capacity)[0]))
        return cls(runner, by_hand, slots, [_batch(by_hand, width, number) for number in range(SETS)])

    def whole(self, batch: Batch) -> None:
        """A step by the library."""
        self.runner(batch)

    def filled(self, batch: Batch) -> None:
        """A fill and its view by the library."""
        self.runner.fill(batch)

    def copied(self, batch: Batch) -> None:
        """A fill by hand: one tail reset and one copy a slot."""
        for name, buffer, pad, padded in self.slots:
            source = batch.get(name)
            live = LIVE * (padded // PADDED) if source is None else source.shape[0]
            if pad is not None and live < padded:
                buffer[live:padded].fill_(pad)
            if source is not None:
                buffer[:live].copy_(source, non_blocking=True)

    def bare(self, batch: Batch) -> None:
        """A replay alone, of a graph that fills nothing."""
        del batch
        captured = self.by_hand.graphs.get(PADDED, NONE)
        if captured is not None:
            captured.graph.replay()

    def whole_by_hand(self, batch: Batch) -> None:
        """A step by hand."""
        self.copied(batch)
        self.bare(batch)


def _batch(runner: DecodeRunner[Any], width: int, number: int) -> Batch:
    """A batch of other values and addresses for each number, of which none is a tail's."""
    seeded, backend = torch.Generator().manual_seed(number), runner.stage.backend
    sizes = {**runner.graphs.buffers.capacity, BATCH: LIVE, TOKENS: LIVE * width}
    found = {}
    for name, slot in runner.stage.declaration.slots.items():
        if slot.reads(name) is not None:
            dtype = resolve_dtype(slot.dtype, backend.capabilities)
            values = torch.randint(2, 100, extent(slot.shape, sizes), generator=seeded).to(dtype)
            found[name] = values if slot.placement == "host" else values.to(backend.device)
    return found


@functools.cache
def kinds(backend: str) -> tuple[Kind, ...]:
    """The three of a cycle."""
    made = load(backend)()
    return tuple(Kind.of(inputs, width, made) for inputs, width in KINDS)


def cycle(backend: str, way: str) -> Callable[[], None]:
    """A call that runs a whole cycle one way, on the next set of batches."""
    turns = itertools.cycle(range(SETS))
    calls = [(getattr(kind, way), kind.batches) for kind in kinds(backend)]

    def run() -> None:
        number = next(turns)
        for call, batches in calls:
            call(batches[number])

    return run


def medians(backend: str, ways: Sequence[str], rounds: int) -> dict[str, float]:
    """Host microseconds of a cycle each way, the ways taking turns."""
    calls = {way: cycle(backend, way) for way in ways}
    found: dict[str, list[float]] = {way: [] for way in ways}
    synchronize = kinds(backend)[0].runner.stage.backend.synchronize
    with torch.no_grad():
        for number in range(rounds + SETS):
            for way, call in calls.items():
                begin = time.perf_counter()
                call()
                took = time.perf_counter() - begin
                if number >= SETS:
                    found[way].append(1e6 * took)
            synchronize()
    return {way: statistics.median(times) for way, times in found.items()}


def test_by_hand_fills_the_same(backend_name: str) -> None:
    """Both ways leave the same bytes in every slot that a step reads: the race is a fair one."""
    for kind in kinds(backend_name):
        for batch in kind.batches:
            kind.runner.fill(batch)
            kind.copied(batch)
            kind.runner.stage.backend.synchronize()
            for name, buffer, pad, _ in kind.slots:
                mine = kind.runner.graphs.buffers[name].tensor
                rows = buffer.shape[0] if pad is not None or name not in batch else batch[name].shape[0]
                if name in batch or pad is not None:
                    assert torch.equal(mine[:rows], buffer[:rows]), name


@pytest.mark.parametrize("way", ["copied", "filled", "whole_by_hand", "whole", "bare"])
def test_cycle(benchmark: BenchmarkFixture, backend_name: str, way: str) -> None:
    """A cycle each way: fills alone, and whole steps of graphs with one small operator."""
    benchmark.group = f"{backend_name}: a speculative cycle, {LIVE}/{PADDED} requests"
    with torch.no_grad():
        benchmark(cycle(backend_name, way))


def test_ratio(benchmark: BenchmarkFixture, backend_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How many times less the inputs of a cycle take than by hand, all ways taking turns in one run."""
    ways = ("copied", "filled", "whole_by_hand", "whole", "bare")
    rounds = 2 if benchmark.disabled else ROUNDS
    found = benchmark.pedantic(medians, args=(backend_name, ways, rounds))  # type: ignore[no-untyped-call]
    fills = found["copied"] / found["filled"]
    steps = (found["whole_by_hand"] - found["bare"]) / max(found["whole"] - found["bare"], 1e-3)
    times = ", ".join(f"{way} {found[way]:.1f}" for way in ways)
    benchmark.extra_info.update({**found, "fills": fills, "steps": steps})
    said = f"{backend_name}: a cycle's inputs, {LIVE}/{PADDED} requests: {times} us; by hand / ours: "
    with contextlib.nullcontext() if benchmark.disabled else capsys.disabled():  # for all to see where it was measured
        print(f"{said}fills {fills:.1f}, whole steps beyond the replays {steps:.1f}")  # noqa: T201 - what is measured
