"""Steps by their live sizes: known, never seen, growing, at random; and the ways of a fill that must cost the same.

Sizes are numbers of the call: nothing is bound to them. Each row's ratio is to the first of its table.

pytest tests/benchmarks/test_sizes.py -s
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, InputBuffers, copied
from slotgraph.backends import Backend
from slotgraph.extend import HOST
from slotgraph.runners.testing.bench import declare_decode, shuffled
from slotgraph.runners.testing.benchmarks import ORACLE
from slotgraph.runners.testing.by_hand import fill_by_hand
from slotgraph.runners.testing.timing import Run, measure
from tests.benchmarks.decoding import Batch, captured_runner, draw
from tests.benchmarks.shown import show
from tests.runners.models import ready
from tests.runners.prefilled import Model, Prefill, batch_of, runner_of

SLOTS, PADDED, LIVE, COLUMNS = 12, 512, 256, 64
PAGES: Final = Axis("PAGES")
LISTED: Final = ("lens", "more_lens", "most_lens")
_HOST_SLOTS: Final = {name: copied(BATCH, dtype=torch.int64, pad=1, placement=HOST) for name in LISTED}
_ROUNDS: Final = (50, 20, 9)
Way = tuple[Callable[[Any], Any], Sequence[Any]]
"""A call, and the batches that take turns in it."""


def with_arrays(runner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A caller that makes arrays of its lists."""

    def call(batch: Any) -> Any:
        made = Batch(**vars(batch))
        for name in LISTED:
            setattr(made, name, np.array(getattr(made, name)))
        return runner(made)

    return call


def groups(backend: Backend, lowering: Any, most: int) -> dict[str, dict[str, Way]]:
    """All rows of one lowering, each with a runner of its own; in each group the first is what the others are of.

    most: How many sizes a row has.
    """
    inputs, hosted = declare_decode(SLOTS), declare_decode(SLOTS, **_HOST_SLOTS)
    flat = declare_decode(SLOTS, table=copied(BATCH, COLUMNS, dtype=torch.int32, pad=0))
    paged = declare_decode(SLOTS, table=copied(BATCH, PAGES, dtype=torch.int32, pad=0))
    seen = [draw(inputs, backend, LIVE, number) for number in range(8)]

    def runner(kind: Any = inputs, **options: Any) -> Any:
        return captured_runner(kind, backend, PADDED, lowering, **options)

    def of_sizes(sizes: Sequence[int]) -> list[Any]:  # as many different batches, so that caches are as cold
        return [draw(inputs, backend, size, number) for number, size in enumerate(sizes[:most])]

    def listed(make: Callable[[torch.Tensor], Any]) -> list[Any]:
        batches = [draw(hosted, backend, LIVE, number) for number in range(8)]
        for batch in batches:
            for name in LISTED:
                setattr(batch, name, make(getattr(batch, name)))
        return batches

    def with_table() -> list[Any]:
        batches = [draw(inputs, backend, LIVE, number) for number in range(8)]
        for number, batch in enumerate(batches):
            batch.table = torch.full((LIVE, COLUMNS), number, dtype=torch.int32, device=backend.device)
        return batches

    buffers = InputBuffers(inputs, {BATCH: PADDED, TOKENS: PADDED}, backend=backend, lowering=lowering)
    split, filled = runner(), runner()
    return {
        "sizes": {
            "one size": (runner(), of_sizes([LIVE] * PADDED)),
            "never seen": (runner(), of_sizes(shuffled(PADDED))),
            "growing": (runner(), of_sizes(range(1, PADDED + 1))),
        },
        "beyond the largest bucket": {
            "one size": (runner(), of_sizes([PADDED + LIVE] * PADDED)),
            "never seen": (runner(), of_sizes([PADDED + size for size in shuffled(PADDED)])),
        },
        "ways": {
            "a call": (runner(), seen),
            "fill, then replay": (lambda batch: split.replay(split.fill(batch)), seen),
        },
        "fills": {
            "runner.fill": (filled.fill, seen),
            "buffers.at(...).fill": (buffers.at({BATCH: PADDED, TOKENS: PADDED}).fill, seen),
        },
        "host slots": {
            "lists, made arrays by the caller": (with_arrays(runner(hosted)), listed(torch.Tensor.tolist)),
            "lists": (runner(hosted), listed(torch.Tensor.tolist)),
            "arrays": (runner(hosted), listed(lambda one: one.numpy())),
        },
        "a table": {
            "over one axis": (runner(flat), with_table()),
            "over two axes": (runner(paged, sizes={PAGES: COLUMNS}), with_table()),
        },
    }


def prefills(backend: Backend, kind: str) -> dict[str, Way]:
    """Fills of prompts by a runner that captures a stack, of known sizes and of others, beside fills by hand."""
    tokens, requests = 255, 16
    model: Any = Model(named=kind == "piecewise").to(backend.device)
    runner: Any = ready(runner_of(kind, model, backend, buckets=[tokens], max_batch=requests))
    sizes = {BATCH: requests, TOKENS: tokens}
    buffers = InputBuffers(Prefill, sizes, backend=backend)
    fill = fill_by_hand(Prefill.slotgraph, backend, sizes, buffers._layer.buffers)
    place = Prefill.slotgraph.varying.index

    def by_hand(batch: Any) -> None:
        live = [0, 0]
        live[place(BATCH)] = len(batch["extend_seq_lens"])
        live[place(TOKENS)] = len(batch["input_ids"])
        fill(batch, tuple(live))

    known = [batch_of([16] * 8, seed, backend.device) for seed in range(256)]
    others = [batch_of([1 + (seed * 7) % 15] * (1 + seed % requests), seed, backend.device) for seed in range(256)]
    return {"by hand": (by_hand, known), "one size": (runner.fill, known), "never seen": (runner.fill, others)}


@pytest.mark.slotgraph_backends("cpu-capture", "cuda")
@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_prefills(backend: Backend, kind: str, pytestconfig: pytest.Config) -> None:
    """Prompts by one lowering, the one that the backend prefers."""
    shown = pytestconfig.getoption("capture") == "no"
    runs = {name: Run(way, batches) for name, (way, batches) in prefills(backend, kind).items()}
    measure([*runs.values()], backend, *(_ROUNDS if shown else (1, 2, 0)))
    show(f"{backend.name}, {kind} prefill's inputs: host", {name: run.host for name, run in runs.items()})


@pytest.mark.slotgraph_backends("cpu", "cpu-capture", "cuda")
def test_sizes(backend: Backend, pytestconfig: pytest.Config) -> None:
    """All rows of all lowerings but the oracle."""
    shown = pytestconfig.getoption("capture") == "no"
    for lowering in (one for one in backend.capabilities.lowerings if one != ORACLE):
        for group, ways in groups(backend, lowering, PADDED if shown else 4).items():
            runs = {name: Run(way, batches) for name, (way, batches) in ways.items()}
            measure([*runs.values()], backend, *(_ROUNDS if shown else (1, 2, 0)))
            show(f"{backend.name}, {lowering}, {group}: host", {name: run.host for name, run in runs.items()})
            devices = {name: run.device for name, run in runs.items() if run.device}
            show(f"{backend.name}, {lowering}, {group}: device", devices)
