"""Functions of computed slots in a graph: as written, and compiled as one. Run with -s to see the tables."""

import time
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied, staged
from slotgraph.backends import Backend
from tests.benchmarks.shown import race, show

ROWS: Final = 256
POOL: Final = 4096
BUCKETS: Final = 36
"""Buckets of a capture, as many as SGLang captures by default."""


class Plain(Inputs):
    req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class Pooled(Plain):  # three functions over tables of a request pool
    lengths: torch.Tensor = staged(POOL, dtype=torch.int64)
    last_ids: torch.Tensor = staged(POOL, dtype=torch.int64)
    input_ids: torch.Tensor = computed(
        lambda last_ids, req_pool_indices: last_ids[req_pool_indices], shape=TOKENS, dtype=torch.int64
    )
    seq_lens: torch.Tensor = computed(
        lambda lengths, req_pool_indices: (lengths[req_pool_indices] + 1).int(), shape=BATCH, dtype=torch.int32
    )
    positions: torch.Tensor = computed(
        lambda lengths, req_pool_indices: lengths[req_pool_indices], shape=TOKENS, dtype=torch.int64
    )


def smallest(view: Any) -> torch.Tensor:
    """One kernel."""
    out: torch.Tensor = view.req_pool_indices + 1
    return out


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu", "cuda")
def test_functions_compiled_as_one(backend: Backend) -> None:
    """A replay with them, beside one of the same step without functions, and the seconds of captures."""
    tables = {name: torch.randint(1, 1000, (POOL,), device=backend.device) for name in ("lengths", "last_ids")}
    runners, seconds = dict[str, DecodeRunner[Any]](), dict[str, list[float]]()
    buckets = [ROWS * (number + 1) // BUCKETS for number in range(BUCKETS)]
    given = {
        "no functions": (Plain, False, {}),
        "as written": (Pooled, False, tables),
        "compiled, first": (Pooled, True, tables),
        "compiled": (Pooled, True, tables),
    }
    for name, (inputs, is_compiled, bind) in given.items():
        made: DecodeRunner[Any] = DecodeRunner(
            inputs,
            smallest,
            buckets=buckets,
            backend=backend,
            compile_computed=is_compiled,
            output_rows=BATCH,
            bind=bind,
        )
        start = time.perf_counter()
        made.capture()
        runners[name], seconds[name] = made, [1e6 * (time.perf_counter() - start)]
    show(f"captures of {BUCKETS} buckets", seconds)
    graphs = {name: made.graphs.captured[ROWS, frozenset(), ()].graph for name, made in runners.items()}
    ways = {name: lambda _, graph=graph: graph.replay() for name, graph in graphs.items()}
    race("replays", ways, [None], backend)
    batches = [{"req_pool_indices": torch.randint(0, POOL, (200,), device=backend.device)} for _ in range(4)]
    race("calls", dict(runners), batches, backend)
    assert {*runners["compiled"].stats()["capture"]["functions"].values()} == {"compiled as one"}
    views = [runners[name].fill(batches[0]) for name in ("as written", "compiled")]
    for name, made in zip(("as written", "compiled"), views, strict=True):
        runners[name].replay(made)
    for slot in ("input_ids", "seq_lens", "positions"):
        first, second = (getattr(one, slot) for one in views)
        assert torch.equal(first, second)
