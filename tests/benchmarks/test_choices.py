"""The choice of a graph on two axes with variants, beside that on one axis: microseconds on the host.

pytest tests/benchmarks/test_choices.py -s
"""

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from slotgraph import BATCH, Axis, DecodeRunner, Inputs, copied
from slotgraph.graphs import GraphRunner, variant
from tests.benchmarks.shown import show
from tests.runners.models import ready

KV: Final = Axis("KV")
ROUNDS, CALLS = 40, 400


class Plain(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class Wide(Plain):
    table: torch.Tensor = copied(BATCH, KV, dtype=torch.int64, pad=0)
    max_seqlen: int = 512


def step(view: Any) -> torch.Tensor:
    """The smallest step."""
    made: torch.Tensor = view.ids
    return made


def timed(runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of each run, all alternating."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter_ns()
            for _ in range(CALLS):
                run()
            found[name].append((time.perf_counter_ns() - start) / CALLS / 1000)
    return found


def test_what_the_choice_of_a_graph_costs() -> None:
    """To find the bucket and the variant of a batch whose kind is known, whatever its sizes."""
    options: Any = {"backend": "cpu", "progress": False}
    one = ready(DecodeRunner(Plain, step, buckets=[1, 2, 4, 8], output_rows=BATCH, **options))
    grid = ready(
        GraphRunner(
            Wide,
            step,
            buckets={BATCH: [1, 2, 4, 8], KV: [16, 32, 64]},
            variants=[variant("max_seqlen", at_least=[512, 4096])],
            **options,
        )
    )
    assert len(grid.graphs.captured) == 24
    small: Any = {"ids": torch.arange(3)}
    large: Any = {**small, "table": torch.ones(3, 20, dtype=torch.int64), "max_seqlen": 600}
    runs: dict[str, Callable[[], object]] = {}
    for name, runner, batch in (("one axis", one, small), ("4 x 3, 2 variants", grid, large)):
        for _ in range(3):
            runner(batch)
        call = runner._reader.read(batch, {})
        runs[name] = lambda runner=runner, call=call: runner._route(call)  # type: ignore[misc]
    show("the choice of a graph, microseconds", timed(runs))
