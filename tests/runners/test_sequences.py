"""Sequences: good batches and bad ones of every kind, fills without replays, in any order, over one runner."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import DecodeRunner, SlotGraphError
from tests.runners.models import (
    PlainInputs,
    assert_right,
    expected,
    memory_of,
    plain_runner,
    plain_step,
    random_batch,
    same_batch,
    snapshot,
)
from tests.runners.test_refused_batches import KINDS


class NotedInputs(PlainInputs):
    note: str = "usual"


SLOTS = ["ids", "places", "weights", "pairs"]

runs = st.tuples(st.just("run"), st.integers(0, 12), st.integers(0, 10**6))
fills = st.tuples(st.just("fill"), st.integers(0, 12), st.integers(0, 10**6))
again = st.tuples(st.just("again"), st.just(0), st.just(0))
spoils = st.tuples(st.sampled_from(SLOTS), st.integers(2, 12), st.sampled_from(sorted({*KINDS, "missing"})))


@given(steps=st.lists(st.one_of(runs, fills, again, spoils), min_size=4, max_size=20))
def test_any_sequence(runner: DecodeRunner[PlainInputs], steps: list[tuple[str, int, int | str]]) -> None:
    """What came before never shows: a good batch is right, a bad one is refused and leaves every byte as it was."""
    last = None
    for what, requests, how in steps:
        if what == "again":
            if last is not None:
                assert_right(runner.replay(last[0]), last[1])
            continue
        batch = random_batch(requests, seed=how if isinstance(how, int) else requests)
        if isinstance(how, str):
            batch[what] = None if how == "missing" else KINDS[how][0](batch[what])
            if requests > 8:
                runner(random_batch(16, seed=1))  # so that the refused batch has nothing to grow
                last = None
            before, given_batch = memory_of(runner), snapshot(batch)
            with pytest.raises(SlotGraphError):
                runner(batch)
            assert memory_of(runner) == before
            assert same_batch(batch, given_batch)
            continue
        view = runner.fill(batch)
        last = (view, batch)
        if what == "run":
            assert_right(runner.replay(view), batch)


def test_many_live_sizes(cpu: str) -> None:
    """More live sizes than a fill keeps ready, twice over and backwards, are all right, tails included."""
    runner = plain_runner(cpu, buckets=[1, 64, 1100])
    sizes = [*range(1, 1100, 9), 2, 1100, 1, *range(1099, 1, -13)]
    for requests in sizes:
        batch = random_batch(requests, seed=requests)
        view = runner.fill(batch)
        padded = next(size for size in (1, 64, 1100) if size >= requests)
        assert view.weights[requests:].tolist() == [-7.5] * (padded - requests)
        assert view.ids[requests:].tolist() == [49] * (padded - requests)
        outputs = runner.replay(view)
        some = {name: value[-3:] for name, value in batch.items()}
        assert outputs.shape[0] == requests
        answer = expected(some) + requests - len(some["ids"])
        torch.testing.assert_close(outputs[-3:], answer, rtol=1e-4, atol=1e-3)


@given(sizes=st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=25))
def test_graphs_and_eager_runs_take_turns(wasteful: DecodeRunner[NotedInputs], sizes: list[tuple[int, bool]]) -> None:
    """Eager runs between graphs, for whatever reason, leave no row of theirs in a later bucket's tail."""
    for number, (requests, differs) in enumerate(sizes):
        batch = random_batch(requests, seed=number)
        view = wasteful.fill({**batch, "note": "differs"} if differs else batch)
        padded = view.weights.shape[0]
        assert torch.equal(view.weights[:requests], batch["weights"])
        assert view.weights[requests:].tolist() == [-7.5] * (padded - requests)
        assert view.ids[requests:].tolist() == [49] * (padded - requests)
        assert view.pairs[requests:].tolist() == [[9, 9]] * (padded - requests)
        assert_right(wasteful.replay(view), batch)


@pytest.fixture(scope="module")
def wasteful(cpu: str) -> DecodeRunner[NotedInputs]:
    """A runner that often has a reason to run eagerly in between."""
    runner = DecodeRunner(NotedInputs, plain_step, buckets=[2, 8], backend=cpu, max_waste=0.5)
    runner.capture()
    return runner
