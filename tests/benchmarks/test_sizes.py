"""Steps by their live sizes: known, never seen, growing, at random; and the ways of a fill that must cost the same.

Sizes are numbers of the call: nothing is bound to them. Each row's ratio is to the first, steps of one size.

pytest tests/benchmarks/test_sizes.py -s
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, InputBuffers, copied
from slotgraph.backends import Backend
from slotgraph.extend import HOST
from slotgraph.runners.commands.bench import ORACLE, captured_runner, declare_decode, draw
from slotgraph.runners.testing.timing import Run, measure
from tests.benchmarks.shown import show

SLOTS, PADDED, LIVE, COLUMNS = 12, 512, 256, 64
PAGES: Final = Axis("PAGES")
LISTED: Final = ("lens", "more_lens", "most_lens")
_HOST_SLOTS: Final = {name: copied(BATCH, dtype=torch.int64, pad=1, placement=HOST) for name in LISTED}
_ROUNDS: Final = (50, 20, 9)
Way = tuple[Callable[[Any], Any], Sequence[Any]]
"""A call, and the batches that take turns in it."""


def shuffled(most: int) -> list[int]:
    """All sizes up to one, in an order of their own."""
    sizes = [*range(1, most + 1)]
    random.Random(3).shuffle(sizes)  # noqa: S311 - a seeded walk, no secret
    return sizes


def ways(backend: Backend, lowering: Any) -> dict[str, Way]:
    """All rows of one lowering, each with a runner of its own."""
    inputs, hosted = declare_decode(SLOTS), declare_decode(SLOTS, **_HOST_SLOTS)
    flat = declare_decode(SLOTS, table=copied(BATCH, COLUMNS, dtype=torch.int32, pad=0))
    paged = declare_decode(SLOTS, table=copied(BATCH, PAGES, dtype=torch.int32, pad=0))
    seen = [draw(inputs, backend, LIVE, number) for number in range(8)]

    def runner(kind: Any = inputs, **options: Any) -> Any:
        return captured_runner(kind, backend, PADDED, lowering, **options)

    def of_sizes(sizes: Sequence[int]) -> list[Any]:
        return [draw(inputs, backend, size, number) for number, size in enumerate(sizes)]

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
        "one size": (runner(), seen),
        "sizes never seen": (runner(), of_sizes(shuffled(PADDED))),
        "an axis that grows": (runner(), of_sizes(range(1, PADDED + 1))),
        "beyond the largest bucket, one size": (runner(), of_sizes([PADDED + 8] * 8)),
        "beyond the largest bucket, never seen": (runner(), of_sizes([PADDED + size for size in shuffled(PADDED)])),
        "runner.fill": (filled.fill, seen),
        "buffers.at(...).fill": (buffers.at({BATCH: PADDED, TOKENS: PADDED}).fill, seen),
        "fill, then replay": (lambda batch: split.replay(split.fill(batch)), seen),
        "host slots, arrays": (runner(hosted), listed(lambda one: one.numpy())),
        "host slots, lists": (runner(hosted), listed(torch.Tensor.tolist)),
        "a table over one axis": (runner(flat), with_table()),
        "a table over two axes": (runner(paged, sizes={PAGES: COLUMNS}), with_table()),
    }


@pytest.mark.slotgraph_backends("cpu", "cpu-capture", "cuda")
def test_sizes(backend: Backend, pytestconfig: pytest.Config) -> None:
    """All rows of all lowerings but the oracle."""
    shown = pytestconfig.getoption("capture") == "no"
    for lowering in (one for one in backend.capabilities.lowerings if one != ORACLE):
        runs = {name: Run(way, batches) for name, (way, batches) in ways(backend, lowering).items()}
        measure([*runs.values()], backend, *(_ROUNDS if shown else (1, 2, 0)))
        show(f"{backend.name}, {lowering}: host", {name: run.host for name, run in runs.items()})
        show(f"{backend.name}, {lowering}: device", {name: run.device for name, run in runs.items() if run.device})
