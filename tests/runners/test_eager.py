"""The eager runner: unpadded views, buffers that grow, batches handed through, slots that are carried."""

import concurrent.futures
import threading
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, TOKENS, Axis, EagerRunner, Inputs, Step, computed, constant, copied
from slotgraph.dataflow.errors import BatchError, ConfigError, DeclarationError, MissingSourceError, ReplayError
from slotgraph.runners.eager import NO_COPY_VARIABLE
from tests.runners.models import PlainInputs, assert_right, plain_step, random_batch, snapshot

PAGES = Axis("PAGES")
WIDTH = Axis("WIDTH", fixed=True)


def total_tokens(step: Step) -> int:
    """Computed on the host; padded and live must be the same here."""
    assert step.live(TOKENS) == step.padded(TOKENS)
    return step.padded(TOKENS)


class PrefillInputs(Inputs):
    """Requests of several tokens each: both axes vary by themselves."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    tokens: torch.Tensor = computed(total_tokens, shape=1, dtype=torch.int32)
    squares: torch.Tensor = computed(lambda ids: ids * ids, shape=TOKENS, dtype=torch.int64)
    sevens: torch.Tensor = constant(7, shape=(BATCH, WIDTH), dtype=torch.int32)


def prefill(tokens: int, requests: int, pages: int) -> dict[str, Any]:
    """A random batch of any sizes."""
    return {
        "ids": torch.randint(1, 99, (tokens,)),
        "lens": torch.randint(1, 99, (requests,), dtype=torch.int32),
        "pages": torch.randint(1, 99, (requests, pages), dtype=torch.int32),
    }


def as_seen(view: PrefillInputs) -> dict[str, torch.Tensor]:
    """Copies of all that a step sees."""
    return {name: getattr(view, name).clone() for name in ("ids", "lens", "pages", "tokens", "squares", "sevens")}


@pytest.mark.parametrize("no_copy", [False, True])
def test_exact_views(cpu: str, *, no_copy: bool) -> None:
    """A step sees the live rows and nothing else, whatever sizes came before."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3}, no_copy=no_copy)
    for sizes in ((5, 2, 3), (9, 1, 1), (1, 4, 2), (5, 2, 3), (0, 0, 0), (64, 33, 17), (2, 1, 0)):
        batch = prefill(*sizes)
        seen = runner(batch)
        assert {name: torch.equal(seen[name], batch[name]) for name in batch} == dict.fromkeys(batch, True)
        assert seen["tokens"].tolist() == [sizes[0]]
        assert torch.equal(seen["squares"], batch["ids"] ** 2)
        assert seen["sevens"].tolist() == [[7] * 3] * sizes[1]


def test_growth_to_the_next_power_of_two(cpu: str) -> None:
    """Each axis grows by itself to the next power of two, never shrinks, and says so once for each growth."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3})
    grown = []
    with capture_logs() as events:
        for sizes in ((5, 2, 3), (8, 2, 4), (9, 1, 1), (1, 1, 1), (3, 3, 33), (17, 4, 64), (17, 4, 64)):
            events.clear()
            runner(prefill(*sizes))
            found = [event["sizes"] for event in events if event["event"] == "grown"]
            grown.append([(sizes["TOKENS"], sizes["BATCH"], sizes["PAGES"]) for sizes in found])
    assert grown == [[(8, 2, 4)], [], [(16, 2, 4)], [], [(16, 4, 64)], [(32, 4, 64)], []]


def test_bytes_follow_growth(cpu: str) -> None:
    """A runner holds nothing before its first batch, and then what its capacity asks for."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu)
    assert runner.parts.eager.buffers is None
    runner(random_batch(3, seed=1))
    small = runner.parts.eager.buffers
    assert small is not None
    runner(random_batch(4, seed=2))
    assert runner.parts.eager.buffers is small
    runner(random_batch(1000, seed=3))
    assert runner.parts.eager.buffers is not None
    assert runner.parts.eager.buffers.nbytes >= 1024 * (8 + 8 + 4 + 8 + 8) > small.nbytes


def test_capacity_that_is_given(cpu: str) -> None:
    """A capacity given for a varying axis is where growth begins, not where it ends."""
    runner = EagerRunner(PrefillInputs, as_seen, backend=cpu, sizes={WIDTH: 3, PAGES: 100})
    runner(prefill(2, 2, 70))
    assert runner.parts.eager.buffers is not None
    assert runner.parts.eager.buffers.capacity[PAGES] == 100
    batch = prefill(2, 2, 101)
    assert torch.equal(runner(batch)["pages"], batch["pages"])
    assert runner.parts.eager.buffers.capacity[PAGES] == 128


def test_batch_is_copied(cpu: str) -> None:
    """Unless it is told otherwise, a step sees copies: what it writes does not reach the batch."""

    def step(view: PlainInputs) -> int:
        view.ids.fill_(-9)
        return view.ids.data_ptr()

    runner = EagerRunner(PlainInputs, step, backend=cpu)
    batch = random_batch(5, seed=4)
    given = snapshot(batch)
    assert runner(batch) != batch["ids"].data_ptr()
    assert torch.equal(batch["ids"], given["ids"])


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_no_copy(cpu: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step sees the batch's own tensors, by argument or by environment, and is right."""
    if how == "environment":
        monkeypatch.setenv(NO_COPY_VARIABLE, "1")
    runner = EagerRunner(
        PlainInputs, lambda view: (view, plain_step(view)), backend=cpu, no_copy=True if how == "argument" else None
    )
    for requests in (5, 2, 17):
        batch = random_batch(requests, seed=requests)
        view, outputs = runner(batch)
        assert all(getattr(view, name) is batch[name] for name in batch)
        assert_right(outputs, batch)


def test_argument_counts_more_than_environment(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit argument wins over the environment, and only "1" there switches copies off."""
    batch = random_batch(3, seed=5)
    monkeypatch.setenv(NO_COPY_VARIABLE, "1")
    assert EagerRunner(PlainInputs, plain_step, backend=cpu, no_copy=False).fill(batch).ids is not batch["ids"]
    assert EagerRunner(PlainInputs, plain_step, backend=cpu).fill(batch).ids is batch["ids"]
    monkeypatch.setenv(NO_COPY_VARIABLE, "0")
    assert EagerRunner(PlainInputs, plain_step, backend=cpu).fill(batch).ids is not batch["ids"]


def test_no_copy_still_checks(cpu: str) -> None:
    """A batch that is handed through is checked as ever."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu, no_copy=True)
    for slot, bad in (("weights", torch.rand(4)), ("places", torch.rand(5)), ("pairs", None)):
        with pytest.raises(BatchError, match=f"'{slot}'"):
            runner({**random_batch(5, seed=6), slot: bad})


class HostInputs(Inputs):
    rates: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, placement="host")
    twice: torch.Tensor = computed(lambda rates: rates * 2, shape=BATCH, dtype=torch.float32, placement="host")


def test_no_copy_makes_no_gradients(cpu: str) -> None:
    """A source that requires grad leaves no gradient behind in a runner that hands batches through."""
    runner = EagerRunner(HostInputs, lambda view: view.twice, backend=cpu, no_copy=True)
    rates = torch.rand(5, requires_grad=True)
    twice = runner({"rates": rates})
    assert torch.equal(twice, rates.detach() * 2)
    assert not twice.requires_grad


class SummedInputs(PlainInputs):
    total: torch.Tensor = computed(lambda rows, places: rows + places, shape=TOKENS, dtype=torch.int64)


def summed_step(view: SummedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the step sees of three slots."""
    return view.rows.clone(), view.total.clone(), view.ids.clone()


@pytest.mark.parametrize("no_copy", [False, True])
def test_carried_computed_slot(cpu: str, *, no_copy: bool) -> None:
    """A slot that the batch already computed is the batch's own, and is not computed over."""
    runner = EagerRunner(PlainInputs, lambda view: view.rows, backend=cpu, carry=("rows",), no_copy=no_copy)
    for requests in (3, 9):
        rows = torch.randint(100, 200, (requests,))
        assert runner({**random_batch(requests, seed=7), "rows": rows}) is rows


def test_slot_computed_from_a_carried_one(cpu: str) -> None:
    """A slot that needs a carried one is computed from the batch's values."""
    runner = EagerRunner(SummedInputs, summed_step, backend=cpu, carry=("rows",))
    for requests in (3, 9):
        batch = {**random_batch(requests, seed=8), "rows": torch.randint(100, 200, (requests,))}
        rows, total, ids = runner(batch)
        assert torch.equal(rows, batch["rows"])
        assert torch.equal(total, batch["rows"] + batch["places"])
        assert torch.equal(ids, batch["ids"])


def test_carried_slot_that_is_missing(cpu: str) -> None:
    """A slot that is to be carried and that the batch lacks is refused by name, before anything is copied."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu, carry=("rows",))
    with pytest.raises(MissingSourceError, match="slot 'rows' is carried from the batch, which has none"):
        runner(random_batch(3, seed=9))
    assert runner.parts.eager.buffers is None


@pytest.mark.parametrize("rows", [[1, 2, 3], torch.tensor([1, 2]), torch.rand(3)], ids=["list", "length", "dtype"])
def test_carried_slot_that_does_not_fit(cpu: str, rows: Any) -> None:
    """A slot that is carried is checked like any other: the step relies on its shape and dtype."""
    runner = EagerRunner(PlainInputs, lambda view: view.rows, backend=cpu, carry=("rows",))
    with pytest.raises(BatchError, match="'rows'"):
        runner({**random_batch(3, seed=10), "rows": rows})


def test_carry_names_no_slot(cpu: str) -> None:
    """A name that is no slot cannot be carried."""
    with pytest.raises(DeclarationError, match="carry names 'rowz', which is no slot of PlainInputs"):
        EagerRunner(PlainInputs, plain_step, backend=cpu, carry=("rowz",))


def test_sizes_that_are_wrong(cpu: str) -> None:
    """A fixed axis needs its size, and a size needs its axis."""
    with pytest.raises(ConfigError, match="PrefillInputs needs sizes= for its fixed axes WIDTH"):
        EagerRunner(PrefillInputs, as_seen, backend=cpu)
    with pytest.raises(ConfigError, match="sizes names 'PAGES', an axis that no slot of PlainInputs has"):
        EagerRunner(PlainInputs, plain_step, backend=cpu, sizes={PAGES: 4})


def test_runs_are_counted(cpu: str) -> None:
    """Each run is counted, and a refused batch is none."""
    runner = EagerRunner(PlainInputs, plain_step, backend=cpu)
    for requests in (3, 1, 8):
        runner(random_batch(requests, seed=requests))
    with pytest.raises(BatchError):
        runner({**random_batch(3, seed=1), "places": [1.0, 2.0, 3.0]})
    counted = {"always_eager": {"steps": 3, "live": 12}}
    stats = runner.stats()
    assert (stats["steps"], stats["buckets"], stats["eager"]) == ({"graph": 0, "eager": 3}, {}, counted)
    assert runner.decide(random_batch(3, seed=1)).why == "always_eager"


def test_a_stale_view_is_not_run() -> None:
    """Of several views only the one filled last is run, by whatever name, and by one thread at a time."""
    entered, leave = threading.Event(), threading.Event()

    def step(view: PlainInputs) -> torch.Tensor:
        if view.ids[0] == 7:
            entered.set()
            leave.wait(60)
        return view.ids + 100

    runner = EagerRunner(PlainInputs, step, backend="cpu")
    first = runner.fill(random_batch(3, seed=1))
    second = runner.fill({**random_batch(3, seed=2), "ids": torch.tensor([1, 3, 5])})
    assert runner.replay(second).tolist() == [101, 103, 105]
    with pytest.raises(ReplayError, match="not filled last"):
        runner.replay(first)
    slow = runner.fill({**random_batch(3, seed=3), "ids": torch.tensor([7, 7, 7])})
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        answer = other.submit(runner.replay, slow)
        assert entered.wait(60)
        with pytest.raises(ReplayError, match="in the middle of a step"):
            runner.replay(slow)
        leave.set()
        assert answer.result().tolist() == [107, 107, 107]
