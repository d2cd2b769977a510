"""Runners of every lowering, on every backend that is here, against a runner that fills slot by slot."""

import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, final

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output, staged
from slotgraph.backends import Backend, Graph, load
from slotgraph.backends.cpu import CpuBackend, HostBackend
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, ComputeError, ConfigError
from slotgraph.dataflow.explain import explain_declaration
from tests.packing import NAME, backend_of
from tests.runners.lowered import (
    ABSENT,
    BUCKETS,
    HIDDEN,
    PAGES,
    WIDTH,
    Batch,
    Pair,
    Quick,
    Rich,
    arguments,
    assert_same_outputs,
    assert_same_views,
    digest_step,
    runner_of,
)
from tests.runners.models import PlainInputs, assert_right, memory_of, plain_step, random_batch, same_batch, snapshot
from tests.sources import HOST_DATA, IN_BUFFERS, KINDS

LOWERINGS: Final = ("in_graph", "fused", "foreach")
PLAIN: Final = ("plain",)
MODES: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "plain": nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}
each_lowering = pytest.mark.parametrize("lowering", LADDER)


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
steps = st.tuples(ops, rows, st.integers(0, 9999), kinds, absents, st.sampled_from([*MODES, "plain"]))
Op = tuple[str, int, int, Sequence[str], frozenset[str], str]


class Game:
    """Steps of two runners, compared after each."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.views: tuple[Inputs, Inputs] | None = None
        self.last: tuple[Batch, Batch] | None = None

    def play(self, op: Op) -> None:
        """One step of both; only the first is in the mode."""
        what, size, seed, of, absent, mode = op
        if what == "replay":
            self.replay(mode)
            return
        if what == "again" and self.last is not None:
            self.again(seed, *self.last, mode)
            return
        if what == "refuse":
            self.refuse(size, seed, absent)
            return
        if what == "produce":
            of = self.produce(size, absent)
        batch, plain = self.pair.batches(size, seed, of, absent)
        is_apart = set(of).isdisjoint(IN_BUFFERS)
        given = snapshot(batch)
        (self.fill if what == "fill" else self.run)(batch, plain, mode)
        assert not is_apart or same_batch(batch, given)
        self.last = (batch, plain) if is_apart else None  # else those sources hold something else by now

    def again(self, seed: int, batch: Batch, plain: Batch, mode: str) -> None:
        """The same batch, with other numbers where the last had its own."""
        ids = batch["ids"]
        if isinstance(ids, torch.Tensor) and not ids.is_inference():
            for same in (ids, plain["ids"]):
                same.add_(seed)
        (self.fill if seed % 3 == 0 else self.run)(batch, plain, mode)

    def run(self, batch: Batch, plain: Batch, mode: str) -> None:
        """Whole steps."""
        self.views = None
        brought = types.SimpleNamespace(**batch) if len(batch["ids"]) % 2 else batch
        with MODES[mode]():
            outputs = self.pair.mine(brought, **arguments(batch))
        assert_same_outputs(outputs, self.pair.right(plain, **arguments(plain)))
        assert not any(one.requires_grad for one in outputs.values())

    def fill(self, batch: Batch, plain: Batch, mode: str) -> None:
        """Fills, whose views are compared."""
        with MODES[mode]():
            mine = self.pair.mine.fill(batch, **arguments(batch))
        right = self.pair.right.fill(plain, **arguments(plain))
        assert_same_views(mine, right)
        self.views = (mine, right)

    def replay(self, mode: str) -> None:
        """Replays of the views filled last."""
        if self.views is not None:
            mine, right = self.views
            with MODES[mode]():
                outputs = self.pair.mine.replay(mine)
            assert_same_outputs(outputs, self.pair.right.replay(right))

    def produce(self, size: int, absent: frozenset[str]) -> Sequence[str]:
        """A producer writes every row of some slots; the batch's own rows are then written there, too."""
        bucket = next((one for one in BUCKETS if one >= size), None)
        runner = self.pair.mine
        if bucket is not None and absent in (ABSENT, frozenset()) and runner.graphs.has(bucket, absent & ABSENT):
            view = runner.inputs(bucket, absent if runner.stage.optional else ())
            for name in ("ids", "places", "pairs"):
                getattr(view, name).fill_(5)
        return ("in place", "in place", "in place", "plain")

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
@settings(max_examples=min(200, settings().max_examples * 3 // 5))  # for each declaration, backend and lowering
def test_any_sequence(pair: Pair, played: list[Op]) -> None:
    """Whatever came before, each step gives what the oracle gives, by its own lowering; a refusal changes nothing."""
    game, mine = Game(pair), pair.mine
    for op in played:
        game.play(op)
    assert mine.stats()["detours"] == {}
    assert set(mine.stats()["lowerings"]) <= {mine.lowering, *(["fused"] if mine.lowering == "in_graph" else [])}
    assert not any(one.tensor.is_inference() or one.tensor.requires_grad for one in mine.graphs.buffers)


class Converting(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, converts=(torch.int32,))


def test_a_list_after_an_array_in_pieces(cpu: str) -> None:
    """What a slot's source was in the step before says nothing of a list's numbers."""
    for lowering in LADDER:
        runner = DecodeRunner(Converting, lambda view: view.ids + 0, buckets=[4], backend=cpu, lowering=lowering)
        runner.capture()
        for source in (np.arange(3, dtype=np.int32)[::-1], [1 << 40, 2, 3]):
            assert runner({"ids": source}).tolist() == list(source), lowering


def test_compute_error(backend: str, lowering: str) -> None:
    """A host function whose number its slot cannot hold raises from calls and fills; the next steps are right."""
    pair = Pair.of(Quick, backend, lowering)
    for seed, size in enumerate((3, 4, 9, 8)):
        batch, plain = pair.batches(size, seed, PLAIN)
        for method in (pair.mine, pair.mine.fill):
            with pytest.raises(ComputeError, match="slot 'count'"):
                method({**batch, "bias": 127})
        with pytest.raises(BatchError):
            pair.mine({**batch, "ids": None})
        for _ in range(2):
            assert_same_outputs(pair.mine(batch), pair.right(plain))


class Stateful(Inputs):
    """Slots that the step itself writes."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, rewritten=True)
    made: torch.Tensor = staged(BATCH, dtype=torch.float32, pad=5)
    logits: torch.Tensor = output(BATCH, dtype=torch.float32)


def stateful_step(view: Stateful) -> torch.Tensor:
    """Write into every kind of slot that may be written."""
    view.made.copy_(view.ids + 1)
    view.logits.copy_(view.ids * 2 + view.made)
    view.ids.add_(100)
    return view.logits


@each_lowering
def test_every_mix_of_inference_mode(cpu: str, lowering: str) -> None:
    """A runner made, captured, filled and replayed inside or outside of it is right, through growth, and in place."""
    options: dict[str, Any] = {"backend": cpu, "lowering": lowering, "progress": False}
    for made, captured, filled, replayed in itertools.product((False, True), repeat=4):
        with torch.inference_mode(made):
            runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], **options)
            stateful = DecodeRunner(Stateful, stateful_step, buckets=[8], **options)
        with torch.inference_mode(captured):
            runner.capture()
            stateful.capture()
        for requests in (3, 9, 8, 40, 5):
            batch = random_batch(requests, seed=requests)
            with torch.inference_mode(filled):
                view = runner.fill(batch)
            with torch.inference_mode(replayed):
                outputs = runner.replay(view)
            assert_right(outputs, batch)
        for requests in (8, 3, 5):
            ids = torch.rand(requests) + 1
            with torch.inference_mode(filled):
                seen = stateful.fill({"ids": ids})
            assert seen.ids[requests:].tolist() == [0] * (8 - requests)
            assert seen.made[requests:].tolist() == [5] * (8 - requests)
            with torch.inference_mode(replayed):
                torch.testing.assert_close(stateful.replay(seen).clone(), ids * 3 + 1)


def test_no_grad_is_left_as_it_was(cpu: str) -> None:
    """A step runs without gradients, and the caller's gradient mode is what it was."""
    modes: list[bool] = []

    def step(view: PlainInputs) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return plain_step(view)

    runner = DecodeRunner(PlainInputs, step, buckets=[4], backend=cpu)
    runner.capture()
    for requests in (3, 9):
        runner(random_batch(requests, seed=3))
        assert torch.is_grad_enabled()
    assert not any(modes)


class Adopting(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-3, rewritten=True)  # by whoever owns the memory
    others: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=-5)


def adopting_step(view: Adopting) -> torch.Tensor:
    """A row for each request, of all of both slots."""
    return view.ids * 3 + view.others + view.ids.sum() * 5 + view.others.sum() * 7


def answer(ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """What it must give in a bucket of four."""
    tail = 4 - len(ids)
    return ids * 3 + others + (ids.sum() - 3 * tail) * 5 + (others.sum() - 5 * tail) * 7


def adopting(backend: Backend | str, lowering: str, **options: Any) -> DecodeRunner[Adopting]:
    """A captured runner over them."""
    runner = DecodeRunner(Adopting, adopting_step, buckets=[4], backend=backend, lowering=lowering, **options)
    runner.capture()
    return runner


@each_lowering
def test_sources_in_the_memory_around_an_adopted_slot(cpu: str, lowering: str) -> None:
    """A source before, behind, across the edges of or inside memory that a slot adopted is read as it was."""
    memory = torch.arange(100, 124)
    runner = adopting(cpu, lowering, bind={"ids": memory[8:12]})
    for rows in (1, 3, 4):
        for start in range(24 - rows):
            memory.copy_(torch.randint(1, 999, (24,)))
            source, own = memory[start : start + rows], torch.randint(1, 999, (rows,))
            for name in ("ids", "others"):
                batch = {"ids": own, "others": own + 1, name: source}
                right = answer(batch["ids"].clone(), batch["others"].clone())
                assert torch.equal(runner(batch), right), (start, name)
    assert runner.stats()["detours"] == {}


@each_lowering
def test_wherever_a_source_begins(cpu: str, lowering: str) -> None:
    """A source may begin anywhere in the allocation of slots, in gaps behind slots of no bytes, too."""

    class Gaps(Inputs):
        a: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        b: torch.Tensor = copied(BATCH, 0, dtype=torch.int64, pad=0)
        c: torch.Tensor = copied(BATCH, 0, dtype=torch.int64, pad=0)
        d: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        e: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    count = 30
    step: Any = lambda view: torch.stack([view.a, view.d, view.e])  # noqa: E731 - as small as one can be
    runner: Any = DecodeRunner(Gaps, step, buckets=[count], output_rows=None, backend=cpu, lowering=lowering)
    runner.capture()
    none = torch.empty(count, 0, dtype=torch.int64)
    first = {name: torch.arange(count) + 100 * place for place, name in enumerate("ade", start=1)}
    storage = runner.fill({**first, "b": none, "c": none}).a.untyped_storage()
    for begin in range(storage.nbytes() // 8 - count + 1):
        for name in "ade":
            runner.fill({**first, "b": none, "c": none})
            source = torch.empty(0, dtype=torch.int64).set_(storage, begin, (count,))  # type: ignore[call-overload]
            wanted = torch.stack([source.clone() if one == name else first[one] for one in "ade"])
            assert torch.equal(runner({**first, name: source, "b": none, "c": none}), wanted), (begin, name)


@pytest.mark.parametrize("device", ["cpu", "cpu-capture", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_one_tensor_for_two_slots(device: str) -> None:
    """It is copied to both as two would be, by the lowering that was asked for."""
    if not load(device).is_available():
        pytest.skip(f"{device} is not here")
    for lowering in load(device)().capabilities.lowerings:
        runner = adopting(device, lowering)
        for seed in range(24):
            draw, rows = torch.Generator().manual_seed(seed), 1 + seed % 4
            first, second = (torch.randint(1, 999, (rows,), generator=draw).to(device[:4].strip("-")) for _ in range(2))
            ids, others = ((first, first), (first, second), (second, second))[seed // 3 % 3]
            assert torch.equal(runner({"ids": ids, "others": others}).cpu(), answer(ids.cpu(), others.cpu())), seed
        assert set(runner.stats()["lowerings"]) == {runner.lowering}


@each_lowering
def test_a_fill_and_then_the_same_sources_changed(cpu: str, lowering: str) -> None:
    """Whatever a fill has left in the packet, a whole step after it reads its sources anew, and the other way round."""
    pair = Pair.of(Quick, cpu, lowering)
    batch, plain = pair.batches(3, 1, PLAIN)
    for seed in range(6):
        for name in ("ids", "places"):
            batch[name].add_(seed)
            plain[name].add_(seed)
        if seed % 2:
            outputs = pair.mine(batch)
        else:
            view = pair.mine.fill(batch)
            batch["ids"].add_(7)  # the fill has read them
            outputs = pair.mine.replay(view)
            batch["ids"].sub_(7)
        assert_same_outputs(outputs, pair.right(plain))
        pair.mine.fill(batch)


@each_lowering
def test_outputs_as_sources(cpu: str, lowering: str) -> None:
    """A step's outputs are the next one's sources, as tokens are in a decode loop, with and without a copy."""
    runner = adopting(cpu, lowering)
    outputs, others = torch.randint(1, 99, (2, 3))
    for turn in range(12):
        right = answer(outputs.clone() % 1000, others)
        outputs = runner({"ids": outputs % 1000 if turn % 2 else outputs.remainder_(1000), "others": others})
        assert torch.equal(outputs, right)


def test_a_view_as_the_next_batch(cpu: str) -> None:
    """A view that is handed back is in place: the step sees what it saw, and then nothing is left of it."""
    for lowering in LADDER:
        runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, lowering=lowering)
        runner.capture()
        for requests in (8, 3, 20):
            batch = random_batch(requests, seed=10)
            view = runner.fill(batch)
            given = snapshot({name: getattr(view, name) for name in batch})  # padded rows are live in it
            assert_right(runner(view), given)
            small = random_batch(2, seed=12)
            assert_right(runner(small), small)


def test_slots_that_a_producer_writes(cpu: str) -> None:
    """Rows written where a bucket reads them need no copy; tails are reset, whatever the producer wrote there since."""
    for lowering, asks in itertools.product(LADDER, (True, False)):
        runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, lowering=lowering)
        runner.capture()
        view = runner.inputs(8) if asks else runner.fill(random_batch(8, seed=1))
        for number, requests in enumerate((8, 5, 3, 7, 2, 5)):
            batch = random_batch(requests, seed=60 + number)
            given = snapshot(batch)
            for name in ("ids", "weights", "pairs"):
                place = getattr(view, name)
                place.fill_(3)  # beyond the live rows, too
                place[:requests] = batch[name]
                batch[name] = place[:requests]
            others = [random_batch(rows, seed=80 + number) for rows in (requests, 7)]
            for brought, right in ((batch, given), *((other, other) for other in others)):
                filled, rows = runner.fill(brought), len(right["ids"])
                assert filled.ids[rows:].tolist() == [49] * (len(filled.ids) - rows)
                assert filled.pairs[rows:].tolist() == [[9, 9]] * (len(filled.ids) - rows)
                assert_right(runner.replay(filled), right)


class Turned(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(3, BATCH, dtype=torch.int64, pad=-1)


@each_lowering
def test_producer_of_a_slot_whose_rows_come_second(cpu: str, lowering: str) -> None:
    """Live columns that a producer wrote are in place, strided as they are; what lies so elsewhere is refused."""
    step: Any = lambda view: view.places.t() + view.ids[:, None]  # noqa: E731 - as small as one can be
    runner: Any = DecodeRunner(Turned, step, buckets=[4, 8], backend=cpu, lowering=lowering)
    runner.capture()
    places = runner.inputs(4).places
    for rows in (3, 2, 4, 1):
        values, ids = torch.randint(1, 99, (3, rows)), torch.randint(1, 99, (rows,))
        places[:, :rows] = values
        batch = {"ids": ids, "places": places[:, :rows]}
        assert runner(batch).tolist() == (values.t() + ids[:, None]).tolist()
        assert runner.fill(batch).places[:, rows:].eq(-1).all()
        elsewhere = torch.randint(1, 99, (3, 5))[:, :rows]
        if rows > 1:
            with pytest.raises(BatchError, match=r"slot 'places': expected .* contiguous"):
                runner({"ids": ids, "places": elsewhere})
        places[:, rows:] = 77
    assert runner.stats()["detours"] == {}


@pytest.mark.parametrize("kind", [CpuBackend, CpuCaptureBackend])
def test_backend_without_the_lowering(kind: type[Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that lacks a lowering refuses it; one that names it but has no fusion is told so."""
    few = attrs.evolve(kind().capabilities, lowerings=("foreach", "slot_by_slot"))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "capabilities", few)
        with pytest.raises(ConfigError, match="'in_graph': this backend has foreach, slot_by_slot; or say 'auto'"):
            DecodeRunner(Quick, digest_step, backend=kind(), lowering="in_graph")
    monkeypatch.setattr(kind, "fusion", lambda _: None)
    with pytest.raises(ConfigError, match=r"fusion\(\) gives none"):
        DecodeRunner(Quick, digest_step, backend=kind(), lowering="fused")


@each_lowering
def test_lazy(cpu: str, lowering: str) -> None:
    """A bucket is captured, with all its patterns, when the first batch comes or a producer asks for it."""
    pair = Pair.of(Rich, cpu, lowering, lazy=True)
    captured = set[int]()
    for seed, (size, absent) in enumerate(
        [(3, ABSENT), (1, frozenset[str]()), (3, frozenset()), (8, ABSENT), (7, ABSENT)]
    ):
        bucket = next(one for one in BUCKETS if one >= size)
        assert pair.mine.report is not None
        assert set(pair.mine.report.captured) == captured
        if seed == 1:
            pair.mine.inputs(bucket).ids.fill_(7)
        batch, plain = pair.batches(size, 5 * seed + 1, ("in place", "plain") if seed == 1 else PLAIN, absent)
        decision = pair.mine.decide(batch, **arguments(batch))
        assert (decision.path, decision.bucket) == ("graph", bucket)
        outputs, right = pair.mine(batch, **arguments(batch)), pair.right(plain, **arguments(plain))
        for stale in ("scratch", "heat"):  # the other's warm-ups have written them
            del outputs[stale], right[stale]
        assert_same_outputs(outputs, right)
        captured.add(bucket)
    assert pair.mine.stats()["steps"] == {"graph": 5, "eager": 0}
    with pytest.raises(ConfigError, match="no graph of bucket 3"):
        pair.mine.inputs(3)


class Large(Inputs):
    """Nothing for a kernel: one slot that is large, and one on the host."""

    rows: torch.Tensor = copied(BATCH, 1 << 18, dtype=torch.float32, pad=0.5)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, placement="host")


@each_lowering
def test_nothing_for_the_kernel(cpu: str, lowering: str) -> None:
    """Where every slot is large or on the host, the kernel has nothing to do, and steps are right."""
    runner = DecodeRunner(Large, lambda v: v.rows.sum(1) * v.here, buckets=[1, 4], backend=cpu, lowering=lowering)
    runner.capture()
    for seed in (1, 3, 4):
        rows = torch.randint(0, 9, (seed, 1 << 18)).float()
        here = torch.arange(seed) + seed
        assert torch.equal(runner({"rows": rows, "here": here}), rows.sum(1) * here)
        with pytest.raises(BatchError):
            runner({"rows": rows, "here": here.double()})
    assert not runner.plan(4).fused


def test_uploads_are_accounted_for(cpu: str) -> None:
    """Tables and packet are more with more buckets and patterns; the total is the sum; other lowerings have none."""
    for lowering in ("in_graph", "fused"):
        accounts = []
        for kind, buckets in ((Quick, (2,)), (Quick, BUCKETS), (Rich, BUCKETS)):
            report = runner_of(kind, cpu, lowering=lowering, buckets=buckets).report
            assert report is not None
            memory = report.memory
            assert memory.total == memory.inputs + memory.graphs + memory.outputs + memory.uploads
            accounts.append(memory.uploads)
        assert 0 < accounts[0] < accounts[1] < accounts[2]


def test_a_refused_batch_leaves_the_view(cpu: str) -> None:
    """After a refused batch the view filled before it is still good for a replay, by every lowering."""
    for lowering in LADDER:
        pair = Pair.of(Quick, cpu, lowering)
        for seed, size in enumerate((3, 8, 1)):
            batch, plain = pair.batches(size, seed, PLAIN)
            pair.mine(pair.batches(8, 50 + seed, PLAIN)[0])  # a step whose packet may still be armed
            view = pair.mine.fill(batch)
            before = memory_of(pair.mine)
            for spoilt in ({**batch, "ids": batch["ids"].double()}, {**batch, "pairs": None}):
                for use in (pair.mine, pair.mine.fill):
                    with pytest.raises(BatchError):
                        use(spoilt)
            assert memory_of(pair.mine) == before
            assert_same_outputs(pair.mine.replay(view), pair.right(plain))


TEXTS: Final[dict[str, list[str]]] = {
    "in_graph": ["1 copy call, ", "upload  one packet, then one kernel for 4 slots, the graph's first node", "fused)"],
    "fused": ["1 copy call, ", "upload  one packet, then one kernel for 4 slots, before the graph", "fused)"],
    "foreach": ["foreach)"],
    "slot_by_slot": ["3 copy calls, ", "single: slot by slot)"],
}


@each_lowering
def test_plan_says_how(cpu: str, lowering: str) -> None:
    """The plan's text tells the lowering, the upload, and what goes which way; `explain` makes the same plan."""
    runner, rich = (runner_of(kind, cpu, lowering=lowering) for kind in (Quick, Rich))
    plan = runner.plan(4)
    assert plan.lowering == lowering
    assert [part for part in TEXTS[lowering] if part not in str(plan)] == []
    written = runner.plan(4, in_place=["ids"])
    assert "copy    ids  (int64, device, in place)" in str(written)
    assert "reset   ids[live:] = -3 in each step" in str(written)
    assert written.nbytes == plan.nbytes - 4 * WIDTH * 8
    assert set(written.fused) <= set(plan.fused)
    declaration, capabilities = rich.stage.declaration, rich.stage.backend.capabilities
    sizes = {BATCH: (4, 4), TOKENS: (8, 8), PAGES: (5, 5), HIDDEN: (3, 3)}
    for absent, at in (((), ()), (("extra", "beside"), ("ids", "tables", "here"))):
        made = explain_declaration(declaration, capabilities, cpu, sizes, absent, at, lowering=rich.lowering)
        assert made.plan == rich.plan(4, absent, at)
    with pytest.raises(ConfigError, match="cannot write 'scratch' in place"):
        explain_declaration(declaration, capabilities, cpu, sizes, in_place=["scratch"])


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_bad_batch_among_habits(lowering: str) -> None:
    """A source that does not fit is refused by name whatever came before, and the next step is right."""
    pair = Pair.of(Rich, "cpu", lowering)
    bad: Mapping[str, Any] = {
        "ids": torch.ones(6),
        "heats": torch.ones(2),
        "here": ["a", "b", "c"],
        "wide": torch.ones(3, 2, dtype=torch.float64).T,
        "flags": [1, 2.5, "x"],
        "halves": [[1e9] * 3] * 6,
    }
    for number, (name, source) in enumerate(bad.items()):
        for seed in range(2):
            batch, plain = pair.batches(3, number + seed, KINDS)
            assert_same_outputs(pair.mine(batch, **arguments(batch)), pair.right(plain, **arguments(plain)))
            with pytest.raises(BatchError, match=f"slot '{name}'"):
                pair.mine({**batch, name: source}, **arguments(batch))
            with pytest.raises(BatchError, match="side argument 'proxies'"):
                pair.mine(batch, proxies=plain["ids"])
    assert pair.mine.stats()["detours"] == {}


@final
class TwoStreams(HostBackend):
    """cpu-capture with streams by number. current: the one that work goes to. ordered: who waited for whom."""

    name: ClassVar[str] = "two-streams"

    def __init__(self) -> None:
        self._inner = CpuCaptureBackend()
        self.current = 0
        self.ordered: list[tuple[int, int]] = []

    @property
    def capabilities(self) -> Any:
        """As cpu-capture."""
        return self._inner.capabilities

    def capture(self, step: Callable[[], Any], **options: Any) -> Graph:
        """With true capture semantics."""
        return self._inner.capture(step, **options)

    def stream_key(self) -> Callable[[], int]:
        """The current one."""
        return lambda: self.current

    def order(self, first: int, then: int) -> None:
        """Note it."""
        self.ordered.append((first, then))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_two_streams_in_turn(lowering: str) -> None:
    """A step on another stream waits for the one before it, and one on the same stream waits for none."""
    backend = TwoStreams()
    pair = Pair.of(Rich, backend, lowering)
    draw = torch.Generator().manual_seed(3)
    for number in range(40):
        before, backend.current = backend.current, int(torch.randint(0, 3, (1,), generator=draw))
        backend.ordered.clear()
        batch, plain = pair.batches(3, number % 5, KINDS)
        assert_same_outputs(pair.mine(batch, **arguments(batch)), pair.right(plain, **arguments(plain)))
        assert set(backend.ordered) == ({(before, backend.current)} if before != backend.current else set())
    assert pair.mine.stats()["detours"] == {}
    assert pair.mine.stats()["lowerings"] == {lowering: 40}


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operator, and run it."""
        del types
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts torch's functions that are called, as a default device is told of them."""

    called = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one, and call it."""
        del types
        self.called += 1
        return func(*args, **(kwargs or {}))


class Rows(Inputs):
    """Slots of which rows may lie apart in the batch's memory."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    mrope: torch.Tensor = copied(3, TOKENS, dtype=torch.int64, pad=7, strided=True, converts=(torch.int32,))
    spans: torch.Tensor = copied(2, 2, BATCH, 3, dtype=torch.float32, pad=0.5, strided=True)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_rows_that_lie_apart_are_read_as_they_lie(kind: torch.dtype) -> None:
    """The kernel reads the first columns of something wider: no copy of them is made before it."""
    mine, right = (
        DecodeRunner(Rows, digest_step, buckets=[4, 8], backend="cpu-capture", lowering=lowering)
        for lowering in ("in_graph", "slot_by_slot")
    )
    for runner in (mine, right):
        runner.capture()
    seen = Seen()
    for seed in range(4):
        draw, rows = torch.Generator().manual_seed(seed), 3 + seed % 2
        wide = torch.randint(-99, 99, (3, rows + 5), generator=draw).to(kind)
        spans = torch.rand(2, 2, rows + 4, 3, generator=draw)[:, :, :rows]
        batch = {"ids": torch.arange(rows), "mrope": wide[:, :rows], "spans": spans}
        seen.operators.clear()
        with seen:
            outputs = mine(batch)
        assert_same_outputs(outputs, right(batch))
    assert not [one for one in seen.operators if "clone" in one or "contiguous" in one]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_modes_are_not_told_of_each_source(lowering: str) -> None:
    """A mode that watches torch's functions, such as a default device, is told of no more with more slots."""
    told = []
    for slots in (3, 24):
        body = {f"slot_{number}": copied(TOKENS, dtype=torch.int64, pad=0) for number in range(slots)}
        space = {"__annotations__": dict.fromkeys(body, torch.Tensor), **body}
        inputs = types.new_class("Many", (Inputs,), {}, lambda one: one.update(space))  # noqa: B023 - called here
        runner: Any = DecodeRunner(
            inputs, lambda view: view.slot_0 + 1, buckets=[4], backend="cpu-capture", lowering=lowering
        )
        runner.capture()
        batch = {name: torch.arange(3) for name in body}
        runner(batch)
        with Functions() as counted:
            assert runner(batch) is not None
        told.append(counted.called)
    assert told[0] == told[1]


class LargeTails(Inputs):
    """Slots with small tails and with large ones, of one dim that varies and of two."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=3)
    hidden: torch.Tensor = copied(TOKENS, 1024, dtype=torch.float32, pad=0.0)
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    heats: torch.Tensor = copied(BATCH, PAGES, 700, dtype=torch.float32, pad=0.0)


def test_sizes_in_any_order() -> None:
    """Whatever live size comes after whatever other, over several buckets, tails are as the reference leaves them."""
    mine, right = (
        DecodeRunner(LargeTails, digest_step, buckets=[2, 16, 32], sizes={PAGES: 4}, backend="cpu", lowering=lowering)
        for lowering in ("foreach", "slot_by_slot")
    )
    mine.capture()
    right.capture()
    draw = torch.Generator().manual_seed(1)
    for _ in range(120):
        rows, pages = (int(torch.randint(0, most, (1,), generator=draw)) for most in (33, 5))
        batch = {
            "ids": torch.randint(1, 99, (rows,), generator=draw),
            "lengths": torch.randint(1, 99, (rows,), generator=draw).int(),
            "hidden": torch.rand(rows, 1024, generator=draw),
            "tables": torch.randint(1, 99, (rows, pages), generator=draw).int(),
            "heats": torch.rand(rows, pages, 700, generator=draw),
        }
        assert_same_outputs(mine(batch), right(batch))


class SmallTails(LargeTails, drop=("hidden", "tables", "heats")):
    """Slots with small tails alone."""


def test_sizes_that_were_seen_once_cut_no_more_views() -> None:
    """Once each live size came, a fill of any of them after any other cuts nothing anew."""
    options: dict[str, Any] = {"buckets": [48], "backend": "cpu", "lowering": "foreach", "output_rows": None}
    runner = DecodeRunner(SmallTails, lambda view: view.ids + 1, **options)
    runner.capture()
    sizes = list(range(1, 49))
    batches = {rows: {"ids": torch.arange(rows), "lengths": torch.arange(rows).int()} for rows in sizes}
    with Seen() as seen:  # a mode that watches operators is part of what a guard looks at
        for rows in (*sizes, *reversed(sizes)):
            runner(batches[rows])
        seen.operators.clear()
        for rows in torch.randint(1, 49, (200,), generator=torch.Generator().manual_seed(2)).tolist():
            runner(batches[rows])
    assert not [one for one in seen.operators if "slice" in one]
