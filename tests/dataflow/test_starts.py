"""`starts`: what a buffer holds before its first fill, where that is not what its tail holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import BATCH, SEQ_LEN_FILL, Axis, Inputs, copied, keep
from slotgraph.dataflow.bucket import Bucket
from slotgraph.dataflow.buffers import allocate, at_rest
from slotgraph.dataflow.capabilities import Capabilities
from tests.strategies import empty, noise

WIDTH = Axis("WIDTH", fixed=True)
CAPACITY = {BATCH: 8, WIDTH: 3}


class Started(Inputs):
    """A tail that is reset, one that is kept, one that starts as a fixed axis' size; and a plain one."""

    counts: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1, starts=1)
    kept: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=keep("shown here"), starts=1)
    wide: torch.Tensor = copied(BATCH, 2, dtype=torch.int64, pad=SEQ_LEN_FILL, starts=WIDTH * 2)
    plain: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-2)


STARTS = {"counts": 1, "kept": 1, "wide": 6, "plain": -2}
TAILS = {"counts": -1, "wide": 1, "plain": -2}


@given(turns=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_tail_is_right_from_the_first_fill_on(turns: list[tuple[int, int]], seed: int) -> None:
    """Whatever buckets and sizes come, no padded row holds what its buffer started as."""
    slots = Started.slotgraph
    buffers = allocate(slots, CAPACITY, Capabilities(), empty)
    assert {b.name: set(b.tensor.flatten().tolist()) for b in buffers} == {n: {v} for n, v in STARTS.items()}
    kept, buckets = [1] * 8, {}
    for turn, (one, other) in enumerate(turns):
        rows, padded = min(one, other), max(one, other)
        if padded not in buckets:
            buckets[padded] = Bucket(slots, {**CAPACITY, BATCH: padded}, Capabilities(), buffers)
        shapes = {name: (rows, 2) if name == "wide" else (rows,) for name in STARTS}
        batch = {n: noise(shape, buffers[n].tensor.dtype, seed + turn) for n, shape in shapes.items()}
        views = buckets[padded].fill(batch, (rows,)).views
        kept[:rows] = batch["kept"].tolist()
        for name, tail in TAILS.items():
            view = views[name]
            assert view is not None
            assert torch.equal(view[:rows], batch[name])
            assert (view[rows:] == tail).all()
        assert views["kept"] is not None
        assert views["kept"].tolist() == kept[:padded]


def test_at_rest() -> None:
    """A late capture finds what an early one would."""
    buffers = allocate(Started.slotgraph, CAPACITY, Capabilities(), empty)
    buffers["counts"].tensor.fill_(33)
    with at_rest(buffers, Capabilities()):
        assert buffers["counts"].tensor.tolist() == [1] * 8
    assert buffers["counts"].tensor.tolist() == [33] * 8
