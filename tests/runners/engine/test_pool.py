"""Runners that share input memory give what they give alone, whatever the order of their phases."""

import functools
import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any, Final

import pytest
import structlog.testing
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, Step, computed, constant, copied, keep, output, staged
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import ComputeError, ReplayError, StaleOutputError
from slotgraph.extend import HOST, once
from slotgraph.pool import InputPool
from slotgraph.runners.engine.pool import Phase
from slotgraph.speculative import WIDTH
from tests.runners.models import ready

VOCABULARY: Final = Axis("VOCABULARY", fixed=True)
HIDDEN: Final = Axis("HIDDEN", fixed=True)
SIZES: Final = {VOCABULARY: 24, HIDDEN: 6}
BUCKETS: Final = [2, 5]
PHASES: Final = ("draft", "verify", "extend")


@functools.cache
def head(device: torch.device) -> torch.Tensor:
    """[HIDDEN, VOCABULARY] floats, where a captured step may read them."""
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(device)


class DraftInputs(Inputs):  # small, of many kinds, with a nested source
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=3)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float64, pad=once(1.5), source="ngram.weights")
    hidden: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0.25, source="proxy.hidden")
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("its tail is not read"))
    requests: torch.Tensor = computed(lambda step: step.live(BATCH) + 100, shape=1, dtype=torch.int64)
    rows: torch.Tensor = computed(lambda ids: ids * 2, shape=TOKENS, dtype=torch.int64)
    widths: torch.Tensor = constant(WIDTH, shape=(BATCH,), dtype=torch.int64)
    logits: torch.Tensor = output(TOKENS, VOCABULARY, dtype=torch.float64)


class VerifyInputs(DraftInputs):  # larger; its mask is written by a producer, its hidden states by the step
    mask: torch.Tensor = staged(BATCH, 40, dtype=torch.bool, pad=True)
    next_hidden: torch.Tensor = output(TOKENS, HIDDEN, dtype=torch.float64)
    positions: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=11, default=None)


class ExtendInputs(DraftInputs, drop=("lens",)):  # other slots at other places
    accepted: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=-1)
    on_host: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=2, placement=HOST)


DECLARATIONS: Final = {"draft": DraftInputs, "verify": VerifyInputs, "extend": ExtendInputs}


def step(view: DraftInputs) -> torch.Tensor:
    """Every live row depends on every slot that its own row of the view has, and on nothing else."""
    slots = view.__dict__
    several = (slots.get(name) for name in ("rows", "widths", "lens", "accepted", "positions"))
    summed = torch.stack([one for one in several if one is not None]).sum(0)
    rows = (slots["hidden"] + slots["requests"] + summed[:, None]) * slots["weights"][:, None]
    if "mask" in slots:
        rows = rows + slots["mask"].sum(1, keepdim=True)
        slots["next_hidden"].copy_(rows)
    logits: torch.Tensor = slots["logits"].copy_(rows @ head(rows.device))
    return logits


Runners = dict[str, DecodeRunner[Any]]


def runner_of(
    backend: Backend | str, pool: InputPool | None, phase: str, keeping: tuple[str, ...] = (), **options: Any
) -> DecodeRunner[Any]:
    """A runner of one phase, of a pool or by itself."""
    absent = [{"positions"}] if phase == "verify" else []
    given = {"buckets": BUCKETS, "sizes": SIZES, "absent": absent, "backend": backend, **options}
    if pool is not None:
        seat = functools.reduce(Phase.keeping, keeping, pool[phase])
        given = {"phase": seat, "sharing": True, **given}
    return DecodeRunner(DECLARATIONS[phase], step, **given)


def runners_of(backend: Backend | str, pool: InputPool | None, **options: Any) -> Runners:
    """A runner for each phase, captured, of one pool or each by itself."""
    made = {phase: runner_of(backend, pool, phase, **options) for phase in PHASES}
    for runner in made.values():
        runner.capture()
    return made


def batch_of(runners: Runners, phase: str, requests: int, seed: int) -> Any:
    """A batch of one token a request; for verify its mask is produced, which has room for the largest bucket."""
    draw = torch.Generator().manual_seed(seed)
    requests = min(requests, max(BUCKETS)) if phase == "verify" else requests
    ids, lens, accepted, on_host, positions = torch.randint(1, 50, (5, requests), generator=draw)
    weights, hidden = (torch.rand(shape, generator=draw, dtype=torch.float64) for shape in ((requests,), (requests, 6)))
    batch = {"ids": ids, "lens": lens, "accepted": accepted.int(), "on_host": on_host}
    if phase == "verify":
        runners[phase].graphs.buffers["mask"].tensor[:requests].copy_(torch.rand((requests, 40), generator=draw) < 0.5)
        batch |= {"positions": positions} if seed % 2 else {}
    return SimpleNamespace(ngram={"weights": weights}, proxy=SimpleNamespace(hidden=hidden), **batch)


def run(runners: Runners, *step_of: Any) -> torch.Tensor:
    """One step of one phase."""
    outputs: torch.Tensor = runners[step_of[0]](batch_of(runners, *step_of)).clone()
    return outputs


def filled(runners: Runners, *step_of: Any) -> dict[str, list[Any]]:
    """The slots after a fill, tails and all, of those that have a rule for them."""
    view = runners[step_of[0]].fill(batch_of(runners, *step_of)).__dict__
    named = ("ids", "hidden", "requests", "widths", "mask", "positions", "accepted", "on_host")
    return {name: view[name].tolist() for name in named if isinstance(view.get(name), torch.Tensor)}


Turn = tuple[str, int, int]
turns = st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 7), st.integers(0, 2**31)), min_size=8, max_size=24)


@given(turns=turns, data=st.data())
@settings(max_examples=10)
def test_shared_memory_changes_no_output(backend: Backend, turns: list[Turn], data: st.DataObject) -> None:
    """Phases in any order, any sizes and either mode of inference give what runners with memory of their own give."""
    lowering, pool = data.draw(st.sampled_from(backend.capabilities.lowerings)), InputPool(*PHASES)
    with torch.inference_mode(data.draw(st.booleans())):
        shared = runners_of(backend, pool, lowering=lowering)
    alone = runners_of(backend, None, lowering=lowering)
    assert pool.seal().saved > 0
    with torch.inference_mode(data.draw(st.booleans())):
        for turn in turns:
            if turn[-1] % 2:
                assert torch.equal(run(shared, *turn), run(alone, *turn))
            else:
                assert filled(shared, *turn) == filled(alone, *turn)


def test_constants_and_set_once_are_established_for_each(backend: Backend) -> None:
    """Constants and what is set once are nobody else's, and hold after steps of all. Their bytes are the pool's."""
    shared = runners_of(backend, InputPool(*PHASES))
    for seed, phase in enumerate((*PHASES, *PHASES)):
        run(shared, phase, 1 + seed % 4, seed)
    buffers = {phase: runner.graphs.buffers for phase, runner in shared.items()}
    for name, held in (("widths", 1), ("weights", 1.5)):
        assert len({one[name].tensor.data_ptr() for one in buffers.values()}) == len(PHASES)
        assert all(one[name].tensor[4].item() == held for one in buffers.values())
    memory = shared["verify"].graphs.memory()
    assert (memory.inputs, memory.shared) == (0, sum(buffer.nbytes for buffer in buffers["verify"]))


def test_a_runner_that_joins_late_has_its_own(backend: Backend) -> None:
    """Nothing is moved for it: the pool's memory stays as it was, and an event says so."""
    pool = InputPool(*PHASES)
    shared = runners_of(backend, pool)
    with structlog.testing.capture_logs() as events:
        late = ready(runner_of(backend, pool, "draft"))
    assert [event["phase"] for event in events if event["event"] == "joined_late"] == ["draft"]
    assert not any(buffer.pooled for buffer in late.graphs.buffers)
    assert [name for phase in PHASES for name in shared[phase].graphs.buffers.moved()] == []


def test_runners_have_names_of_their_own_in_a_pool() -> None:
    """Also where a second runner's name would be that of another phase."""
    pool = InputPool("draft", "draft 2")
    runners: list[Any] = [
        DecodeRunner(DraftInputs, step, buckets=BUCKETS, sizes=SIZES, backend="cpu", phase=pool[phase])
        for phase in ("draft", "draft", "draft 2")
    ]
    assert [runner.phase.member for runner in runners] == ["draft", "draft 2", "draft 2 2"]
    places = {phase: [one for one in pool.seal().places if one.phase == phase] for phase in ("draft", "draft 2")}
    assert not any(one.touches(other) for one, other in itertools.combinations(places["draft"], 2))
    assert any(one.touches(other) for one, other in itertools.product(*places.values()))


def test_the_record_of_the_backend_decides_what_is_shared(backend: Backend) -> None:
    """Where a backend pools no inputs nothing is shared unless one is told to; where it does, one may decline."""
    for sharing in (None, False):
        pool = InputPool(*PHASES)
        shared = runners_of(backend, pool, sharing=sharing)
        pools = backend.capabilities.pools_inputs and sharing is None
        assert any(buffer.pooled for buffer in shared["draft"].graphs.buffers) is pools
        assert (pool.layout is not None) is pools


def test_an_output_is_stale_when_another_phase_has_begun(backend: Backend) -> None:
    """In debug mode an output in shared memory is caught that is read after another phase's fill."""
    shared = runners_of(backend, InputPool(*PHASES), debug=True)
    outputs = shared["verify"](batch_of(shared, "verify", 3, 1))
    run(shared, "extend", 3, 2)
    with pytest.raises(StaleOutputError, match="overwritten"):
        outputs.sum()


@pytest.mark.usefixtures("_quick_collections")
def test_memory_goes_with_the_last_runner(backend: Backend) -> None:
    """A pool keeps no runner alive, nor a runner the others."""
    shared = runners_of(backend, InputPool(*PHASES))
    gone = weakref.ref(shared.pop("draft"))
    gc.collect()
    assert gone() is None
    alone = runners_of(backend, None)
    assert torch.equal(run(shared, "verify", 2, 3), run(alone, "verify", 2, 3))


def test_a_late_capture_leaves_others_alone(backend: Backend) -> None:
    """A runner that is captured, or asked about, between another's fill and its replay changes neither of them."""
    pool, alone = InputPool(*PHASES), runners_of(backend, None, lowering="foreach")
    first, second = (runner_of(backend, pool, phase, lowering="foreach") for phase in ("verify", "extend"))
    third = runner_of(backend, pool, "draft", lowering="foreach")
    first.capture()
    runners = {"verify": first}
    for seed, late in enumerate((lambda: second.graphs, second.capture, third.capture)):
        view = first.fill(batch_of(runners, "verify", 3, seed))
        late()
        assert torch.equal(first.replay(view), run(alone, "verify", 3, seed))
        assert filled(runners, "verify", 3, seed) == filled(alone, "verify", 3, seed)


def test_producers_of_another_are_known(backend: Backend) -> None:
    """Rows that a producer wrote for a step that never came are no row of anyone's tail."""
    pool, alone = InputPool(*PHASES), runners_of(backend, None, lowering="foreach")
    shared = runners_of(backend, pool, lowering="foreach")
    for _ in range(2):
        run(shared, "draft", 1, 4)
    produced = shared["extend"].inputs(5)
    for value in (-3, -5):
        for slot in (produced.ids, produced.hidden, produced.logits):
            slot.fill_(value)
        assert filled(shared, "draft", 1, 4) == filled(alone, "draft", 1, 4)


def test_kept_slots_share_with_nobody(backend: Backend) -> None:
    """A producer that writes only what changed finds the rest as it was, whatever steps came between."""
    pool = InputPool(*PHASES)
    verify = runner_of(backend, pool, "verify", ("mask", "ids"))
    extend = runner_of(backend, pool, "extend")
    verify.capture()
    mask = verify.graphs.buffers["mask"].tensor
    before = torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(3)).bool()
    mask.copy_(before)
    extend.capture()
    for seed in range(3):
        run({"extend": extend}, "extend", 5, seed)
    assert torch.equal(mask.cpu(), before)


PAGES: Final = Axis("PAGES")
FAILS: Final = [False]


def counted(step: Step) -> int:
    """Computed on the host, or not at all."""
    if FAILS[0]:
        raise ValueError("nothing to count")
    return step.live(BATCH)


class PagedInputs(Inputs):  # a table that no kernel writes, as two of its dims vary, and a number from the host
    table: torch.Tensor = copied(BATCH, PAGES, dtype=torch.float64, pad=0.25)
    count: torch.Tensor = computed(counted, shape=1, dtype=torch.int64)


class WideInputs(Inputs):  # as large as the table
    rows: torch.Tensor = copied(BATCH, 40, dtype=torch.float64, pad=0.5)


def test_a_step_that_broke_off_ends_the_view_of_another(backend: Backend) -> None:
    """What a step has written before it raises may be another's slot, whose view is refused then, by whatever way."""
    for lowering in backend.capabilities.lowerings:
        pool, sum_of = InputPool("wide", "paged"), lambda view: view.table.sum(1) + view.count
        options: dict[str, Any] = {"buckets": [4], "backend": backend, "lowering": lowering, "sharing": True}
        wide: Any = DecodeRunner(WideInputs, lambda view: view.rows.sum(1), phase=pool["wide"], **options)
        paged: Any = DecodeRunner(PagedInputs, sum_of, sizes={PAGES: 40}, phase=pool["paged"], **options)
        for runner in (wide, paged):
            runner.capture()
        assert pool.seal().place("wide", "rows").touches(pool.seal().place("paged", "table"))
        table = torch.rand(3, 30, dtype=torch.float64)
        for _ in range(4):
            paged({"table": table})
        view = wide.fill({"rows": torch.rand(3, 40, dtype=torch.float64)})
        FAILS[0] = True
        with pytest.raises(ComputeError, match="nothing to count"):
            paged({"table": table})
        FAILS[0] = False
        with pytest.raises(ReplayError, match="another runner of the same pool was filled since"):
            wide.replay(view)


def test_a_capture_waits_for_steps_on_other_streams(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture writes to shared memory comes after another runner's step there, on whatever stream that is."""
    pool = InputPool("draft", "extend")
    draft, extend = runner_of(backend, pool, "draft"), runner_of(backend, pool, "extend")
    draft.capture()
    run({"draft": draft}, "draft", 3, 1)
    waits: list[tuple[int, int]] = []
    monkeypatch.setattr(type(backend), "order", lambda _, first, then: waits.append((first, then)))
    draft.graphs.buffers.use.stream = 77
    extend.capture()
    assert waits[0] == (77, extend.graphs.filler.stream())
