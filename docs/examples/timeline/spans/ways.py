"""Three ways to run one decode step: its slots copied by hand, and a runner under two of its lowerings."""

import types
from collections.abc import Callable
from typing import Any, Final

import attrs
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import resolve_dtype
from slotgraph.dataflow.tails import Pad, resolve_value
from slotgraph.runners.engine.sampling import sample_batch
from slotgraph.runners.testing.bench import declare_decode

SLOTS: Final = 12
BUCKET: Final = 256
LIVE: Final = (200, 203, 198)
"""Live rows of the steps that are recorded: they differ, so that no step finds its inputs where the last left them."""
COUNT: Final = "num_token_non_padded"
_WORDS: Final = 128

Step = Callable[[Any], torch.Tensor]


class Batch(types.SimpleNamespace):
    """One batch: its sources as attributes, and how many rows it has."""

    rows: int


def drawn(inputs: type[Inputs], backend: Backend, rows: int) -> Batch:
    """A batch of so many rows."""
    live, seeded = {BATCH: rows, TOKENS: rows}, torch.Generator().manual_seed(rows)
    sample = sample_batch(inputs.slotgraph, backend.capabilities, live, seeded, device=backend.device)
    return Batch(rows=rows, **sample.batch)


@attrs.frozen
class Way:
    """One way to run a step: its name in the drawing, and the call that an engine would make for a batch."""

    name: str
    call: Callable[[Batch], object]


def make_ways(backend: Backend, hidden: int, layers: int) -> tuple[type[Inputs], list[Way]]:
    """The declaration that all ways share, and the ways, captured."""
    inputs = declare_decode(SLOTS)
    step = make_step(backend.device, hidden, layers)
    by_hand = ByHand(inputs, step, backend)
    ways = [Way("by hand: one copy a slot, then the replay", by_hand)]
    for lowering in ("foreach", "in_graph"):
        runner = DecodeRunner(inputs, step, buckets=[BUCKET], backend=backend, lowering=lowering, progress=False)
        runner.capture()
        ways.append(Way(f"slotgraph, {lowering}", runner))
    return inputs, ways


def make_step(device: torch.device, hidden: int, layers: int) -> Step:
    """A small model: a look-up and so many dense layers."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    seeded = torch.Generator().manual_seed(0)

    def weights(rows: int) -> torch.Tensor:
        return torch.randn(rows, hidden, generator=seeded).mul_(hidden**-0.5).to(device, dtype)

    table, dense = weights(_WORDS), [weights(hidden) for _ in range(layers)]

    def step(view: Any) -> torch.Tensor:
        rows: torch.Tensor = table[view.input_ids] * view.positions.unsqueeze(1)
        for weight in dense:
            rows = torch.relu(rows @ weight)
        return rows

    return step


class ByHand:
    """What engines write: buffers, one tail reset and one copy for each, and a graph over them."""

    def __init__(self, inputs: type[Inputs], step: Step, backend: Backend) -> None:
        self._slots = [
            (name, torch.full((BUCKET,), pad, dtype=dtype, device=backend.device), pad)
            for name, slot in inputs.slotgraph.slots.items()
            if isinstance(rule := slot.rule(), Pad)
            for pad in (resolve_value(rule.value, backend.capabilities, {}),)
            for dtype in (resolve_dtype(slot.dtype, backend.capabilities),)
        ]
        self._count = torch.zeros(1, dtype=torch.int32, device=backend.device)
        view = types.SimpleNamespace(**{name: buffer for name, buffer, _ in self._slots}, **{COUNT: self._count})
        with torch.no_grad(), backend.stream():
            step(view)
            backend.synchronize()
            self._graph = backend.capture(lambda: step(view), pool=backend.pool())

    def __call__(self, batch: Batch) -> object:
        """Fill slot by slot, and replay."""
        live = batch.rows
        for name, buffer, pad in self._slots:
            if live < BUCKET:
                buffer[live:].fill_(pad)
            buffer[:live].copy_(getattr(batch, name))
        self._count.fill_(live)
        self._graph.replay()
        return self._graph.outputs[:live]
