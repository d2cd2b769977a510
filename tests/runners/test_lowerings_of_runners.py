"""Runners of every lowering, on every backend that is here, against a runner that fills slot by slot."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import Inputs
from slotgraph.backends import load
from slotgraph.dataflow.errors import BatchError, ComputeError
from tests.packing import NAME, backend_of
from tests.runners.lowered import (
    ABSENT,
    BUCKETS,
    Batch,
    Pair,
    Quick,
    Rich,
    arguments,
    assert_same_outputs,
    assert_same_views,
)
from tests.runners.models import memory_of
from tests.sources import HOST_DATA, IN_BUFFERS, KINDS

LOWERINGS: Final = ("in_graph", "fused", "foreach")
PLAIN: Final = ("plain",)
FUSED: Final = ("in_graph", "fused")


@pytest.fixture(scope="module", params=["cpu", "cpu-capture", NAME, pytest.param("cuda", marks=pytest.mark.cuda)])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend."""
    available = request.param == NAME or load(request.param).is_available()
    if not available:
        pytest.skip(f"{request.param}: {available.reason}")
    return str(request.param)


@pytest.fixture(scope="module", params=LOWERINGS)
def lowering(backend: str, request: pytest.FixtureRequest) -> str:
    """A lowering that the backend has."""
    if request.param not in backend_of(backend).capabilities.lowerings:
        pytest.skip(f"{backend} has no lowering {request.param!r} here")
    return str(request.param)


@pytest.fixture(scope="module", params=[Quick, Rich], ids=["quick", "rich"])
def pair(backend: str, lowering: str, request: pytest.FixtureRequest) -> Pair:
    """A runner of each lowering, and the oracle."""
    return Pair.of(request.param, backend, lowering)


rows = st.sampled_from([3, 3, 3, 3, 8, 8, 0, 1, 2, 4, 5, 7, 9, 10])  # the same ones often, with other batches
kinds = st.one_of(st.just(PLAIN), *(st.lists(st.sampled_from(of), min_size=1) for of in (KINDS, HOST_DATA, IN_BUFFERS)))
absents = st.sampled_from([ABSENT, ABSENT, frozenset[str](), frozenset({"extra"})])
ops = st.sampled_from(["run", "run", "again", "again", "fill", "fill", "replay", "produce", "refuse"])
steps = st.tuples(ops, rows, st.integers(0, 9999), kinds, absents)
Op = tuple[str, int, int, Sequence[str], frozenset[str]]


class Game:
    """Steps of two runners, compared after each."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.views: tuple[Inputs, Inputs] | None = None
        self.last: tuple[Batch, Batch] | None = None

    def play(self, op: Op) -> None:
        """One step of both."""
        what, size, seed, of, absent = op
        if what == "replay":
            self.replay()
        elif what == "again" and self.last is not None:
            self.again(seed, *self.last)
            return
        elif what == "fill":
            self.fill(*self.pair.batches(size, seed, of, absent))
        elif what == "refuse":
            self.refuse(size, seed, absent)
        elif what == "produce":
            self.produce(size, seed, absent)
        else:
            self.run(*self.pair.batches(size, seed, of, absent))
        if what == "produce" or not set(of).isdisjoint(IN_BUFFERS):
            self.last = None  # by now those sources hold something else

    def again(self, seed: int, batch: Batch, plain: Batch) -> None:
        """The same batch, with other numbers where the last had its own."""
        ids = batch["ids"]
        if isinstance(ids, torch.Tensor) and not ids.is_inference():
            for same in (ids, plain["ids"]):
                same.add_(seed)
        (self.fill if seed % 3 == 0 else self.run)(batch, plain)

    def run(self, batch: Batch, plain: Batch) -> None:
        """Whole steps."""
        self.views = None
        given = arguments(batch)
        outputs = self.pair.mine(batch, **given)
        assert_same_outputs(outputs, self.pair.right(plain, **arguments(plain)))
        self.last = (batch, plain)

    def fill(self, batch: Batch, plain: Batch) -> None:
        """Fills, whose views are compared."""
        mine, right = self.pair.mine.fill(batch, **arguments(batch)), self.pair.right.fill(plain, **arguments(plain))
        assert_same_views(mine, right)
        self.views, self.last = (mine, right), (batch, plain)

    def replay(self) -> None:
        """Replays of the views filled last."""
        if self.views is not None:
            mine, right = self.views
            assert_same_outputs(self.pair.mine.replay(mine), self.pair.right.replay(right))

    def produce(self, size: int, seed: int, absent: frozenset[str]) -> None:
        """A producer writes every row of some slots, and the batch's own into them, then runs a step."""
        bucket = next((one for one in BUCKETS if one >= size), None)
        runner = self.pair.mine
        if bucket is not None and absent in (ABSENT, frozenset()) and runner.graphs.has(bucket, absent & ABSENT):
            view = runner.inputs(bucket, absent if runner.stage.optional else ())
            for name in ("ids", "places", "pairs"):
                getattr(view, name).fill_(5)
        self.run(*self.pair.batches(size, seed, ("in place", "in place", "in place", "plain"), absent))

    def refuse(self, size: int, seed: int, absent: frozenset[str]) -> None:
        """A batch that does not fit leaves every byte, the view and later steps as they were."""
        batch, _ = self.pair.batches(size, seed, PLAIN, absent)
        slot = ("ids", "places", "pairs")[seed % 3]
        batch[slot] = SPOILS[seed % len(SPOILS)](batch[slot])
        before = memory_of(self.pair.mine)
        with pytest.raises(BatchError):
            self.pair.mine(batch, **arguments(batch))
        assert memory_of(self.pair.mine) == before


SPOILS: Final = (
    lambda tensor: None,  # noqa: ARG005 - as the others
    lambda tensor: torch.cat([tensor, tensor[:1] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])]),
    lambda tensor: tensor.to(torch.complex64),
    lambda tensor: tensor.unsqueeze(0),
    lambda tensor: ["word"] * (1 + len(tensor)),
    lambda tensor: "word",  # noqa: ARG005 - likewise
)


@given(played=st.lists(steps, min_size=2, max_size=12))
@settings(max_examples=min(200, settings().max_examples))  # for each declaration, backend and lowering
def test_any_sequence(pair: Pair, played: list[Op]) -> None:
    """Whatever came before, each step gives what the oracle gives, and a refused batch changes nothing."""
    game = Game(pair)
    for op in played:
        game.play(op)


def test_counts_add_up(backend: str, lowering: str) -> None:
    """Each fill for a graph is counted once, under the runner's lowering, whatever the kinds of its sources."""
    pair = Pair.of(Rich, backend, lowering)
    done = Counter[str]()
    for seed, kind in enumerate((*KINDS, "plain", "plain")):
        batch, _ = pair.batches(1 + seed % 8, 5 * seed + 1, (kind,))
        if seed % 2:
            pair.mine(batch, **arguments(batch))
        else:
            pair.mine.replay(pair.mine.fill(batch, **arguments(batch)))
        done["run" if seed % 2 else "fill"] += 1
    stats = pair.mine.stats()
    assert stats["steps"] == {"graph": done.total(), "eager": 0}
    assert sum(stats["lowerings"].values()) == done.total()
    assert stats["detours"] == {}
    assert stats["lowerings"].get("in_graph", 0) == (done["run"] if lowering == "in_graph" else 0)
    assert set(stats["lowerings"]) == ({lowering} if lowering != "in_graph" else {"in_graph", "fused"})


def test_compute_error(backend: str, lowering: str) -> None:
    """A host function whose number its slot cannot hold raises from calls and fills; the next steps are right."""
    pair = Pair.of(Quick, backend, lowering)
    for seed, size in enumerate((3, 3, 4, 9, 1, 8)):
        batch, plain = pair.batches(size, seed, PLAIN)
        for method in (pair.mine, pair.mine.fill):
            with pytest.raises(ComputeError, match="slot 'count'"):
                method({**batch, "bias": 127})
        with pytest.raises(BatchError):
            pair.mine({**batch, "ids": None})
        assert_same_outputs(pair.mine(batch), pair.right(plain))
        assert_same_outputs(pair.mine(batch), pair.right(plain))
