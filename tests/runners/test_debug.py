"""Debug modes: each finds its planted bug by itself, and names it; no sound runner is accused; off is nothing."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import attrs
import pytest
import structlog
import torch

from slotgraph import BATCH, CACHE_LOC, DecodeRunner, EagerRunner, Inputs, copied, keep, output
from slotgraph.dataflow import environment
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CheckError, ConfigError, ReplayError
from slotgraph.dataflow.sources import look_up
from slotgraph.extend import side
from slotgraph.pool import InputPool
from slotgraph.runners.check.trial import named
from slotgraph.runners.debug import debugged
from slotgraph.runners.engine.config import CHEAP, MODES, modes_of
from slotgraph.runners.engine.hooks import Watcher
from tests.life import test_ahead as advancing
from tests.runners import prefilled, test_draft, test_draft_extend
from tests.runners.check.test_sound import KINDS, Found
from tests.runners.models import (
    TABLE,
    PlainInputs,
    assert_right,
    decoder,
    expected,
    plain_runner,
    plain_step,
    random_batch,
)

if TYPE_CHECKING:
    from slotgraph.backends import Backend

CAPTURES = "cpu-capture"
KEEPING: Any = (prefilled.captured, test_draft.captured, test_draft_extend.captured, test_draft_extend.chained)
"""What makes runners and keeps them."""


def runner_of(step: Callable[[Any], Any], inputs: type[Inputs] = PlainInputs, **options: Any) -> Any:
    """A captured runner, by default on the CPU with a device's semantics."""
    return decoder(inputs, step, **{"backend": CAPTURES, "buckets": [4, 8], **options})


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize("mode", [*MODES, True, ",".join(MODES), MODES])
def test_sound_steps(cpu: str, mode: Any, lowering: str) -> None:
    """Every mode by itself, and all together: steps of all kinds are right, and stay so; late captures, too."""
    runner = plain_runner(cpu, debug=mode, lowering=lowering, lazy=lowering == "fused")
    for seed, rows in enumerate((1, 3, 4, 6, 8, 9, 0, 2)):
        batch = random_batch(rows, seed)
        assert_right(runner(batch).clone(), batch)
        batch = random_batch(rows, 50 + seed)
        view = runner.fill(batch)
        assert_right(runner.replay(view).clone(), batch)
        assert_right(runner.replay(view).clone(), batch)


@pytest.mark.parametrize("lowering", LADDER)
@pytest.mark.parametrize("mode", MODES)
def test_steps_that_follow_one_another(cpu: str, mode: str, lowering: str) -> None:
    """Each is a call that the mode looks at, and they give what they give without it."""
    batch, joins = (
        advancing.batch_of([{**advancing.ROW, "ids": one} for one in ids], torch.device("cpu"), lists=True)
        for ids in ((3, 5, 9), [7])
    )
    found = list[list[Any]]()
    for debug in (mode, None):
        runner = decoder(
            advancing.AheadInputs,
            advancing.step,
            sizes={advancing.PAGES: advancing.WIDE},
            buckets=[2, 4],
            output_rows=BATCH,
            backend=cpu,
            lowering=lowering,
            debug=debug,
        )
        found.append([])
        for step in runner.steps(batch, keys=[*"abc"], ahead=0):
            found[-1].append(step.tokens())
            if step.number == 1:
                step.leave(["b"])
            if step.number == 2:
                step.join(joins, ["d"])
            if step.number == 4:
                step.leave([*"acd"])
        ((why, steps),) = runner.stats()["ahead"].items()
        assert steps == 5
        assert debug is None or why in {"held: each step is watched", f"held: the lowering is {lowering}"}
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_runner(
    backend: "Backend", kind: "Callable[[Backend], Found]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made under the environment's word, each looks at its steps and accuses none, and gives what it gives without."""
    made = []
    for modes in (",".join(MODES), ""):
        monkeypatch.setenv(environment.DEBUG, modes)
        for keeps in KEEPING:
            keeps.cache_clear()
        made.append(kind(backend))
    (careful, make), (plain, _) = made
    assert len(careful.watch.watchers) == 4
    assert plain.watch.watchers == ()
    for seed, rows in enumerate((1, 3, 4)):
        batch = make(rows, torch.Generator().manual_seed(seed))
        one, other = (  # on a device, runners' outputs share memory
            {place: torch.as_tensor(tensor.clone()) for place, tensor in named(runner(batch))}
            for runner in (careful, plain)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


class Kept(PlainInputs):  # indices that nobody may read in padded rows, and an output
    kept: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("nobody reads it"))
    logits: torch.Tensor = output(BATCH, 4, dtype=torch.float32)


def kept_batch(rows: int) -> Any:
    """One of so many rows."""
    return {**random_batch(rows, 1), "kept": torch.arange(rows)}


def test_poison_names_the_slot_that_makes_a_step_raise() -> None:
    """A tail holds an index that no table has. A view that was filled before the mode was on cannot be filled anew."""
    runner = runner_of(lambda view: plain_step(view) + TABLE[view.kept], Kept)
    with debugged(runner, "poison"):
        with pytest.raises(CheckError, match=r"the step raised IndexError: .* when the tail of slot 'kept' held"):
            runner(kept_batch(3))
        full = kept_batch(4)
        torch.testing.assert_close(runner(full), expected(full) + TABLE[full["kept"]])
    view = runner.fill(kept_batch(3))
    with debugged(runner, "poison"), pytest.raises(CheckError, match=r"held poison; nothing could be replayed after"):
        runner.replay(view)


Bug = tuple[str, str, Callable[[Any, Any], Any], Any, Any, str]
BUGS: dict[str, Bug] = {
    "a frozen number": (
        *("parity", CAPTURES, lambda view, read: plain_step(view) * read, 2.0, 3.0),
        r"outputs row 0, at \[0, 0\]: graph .* \(bucket 4\); all slots agree",
    ),
    "a step that raises": (
        *("parity", "cpu", lambda view, read: plain_step(view) * read, 1, "nothing"),
        "the step raised TypeError: .* where its graph is replayed",
    ),
    "a sum over the tail": (
        *("poison", "cpu", lambda view, read: plain_step(view) + (view.weights.sum() if read else 0), False, True),
        "live row 0 .* when the tail of slot 'weights' held nan",
    ),
    "an exchanged table": (
        *("addresses", CAPTURES, lambda view, read: read[view.rows], TABLE.clone(), TABLE.clone()),
        r"aten::index reads now\['read'\], and it is other memory",
    ),
}
"""By name the mode, the backend, the step, what it reads at first, what it reads later, and what is said of that."""


@pytest.mark.parametrize("bug", BUGS)
def test_findings(bug: str) -> None:
    """A bug is named, and the steps before it and after it go well."""
    mode, backend, step, before, after, words = BUGS[bug]
    now = {"read": before}
    runner, batch = runner_of(lambda view: step(view, now["read"]), debug=mode, backend=backend), random_batch(3, 1)
    expect = runner(batch).clone()
    now["read"] = after
    with pytest.raises(CheckError, match=f"debug mode {mode}: {words}"):
        runner(batch)
    now["read"] = before
    torch.testing.assert_close(torch.as_tensor(runner(batch).clone()), torch.as_tensor(expect))


def test_poison_names_an_output() -> None:
    """One that is added to what lay there before, in a full bucket, too. Others are told of no replay."""
    other = mock.Mock(spec=Watcher)
    runner = runner_of(lambda view: torch.add(view.logits, plain_step(view), out=view.logits), Kept, debug="poison")
    runner.watch.add(other)
    with pytest.raises(CheckError, match=r"live row 0 .* when output slot 'logits' held .* before the step: it must"):
        runner(kept_batch(4))
    assert [call[0] for call in other.method_calls] == ["before_fill", "filled", "failed"]


def test_addresses_are_checked_at_each_replay() -> None:
    """A slot's buffer that moves after the first replay is found by this mode, and not without it."""
    for mode in ("addresses", "generations"):
        runner = plain_runner(CAPTURES, debug=mode)
        runner(random_batch(3, 1))
        buffer = runner.graphs.buffers["pairs"]
        buffer.tensor = buffer.tensor.clone()
        said = "the buffers of 'pairs' moved since capture"
        with pytest.raises(ReplayError, match=said) if mode == "addresses" else nullcontext():
            runner(random_batch(3, 1))


class Moved(Inputs):  # a slot that is filled, and that the step moves on
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, rewritten=True)


class Flagged(Inputs):  # a slot that the step should not write
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False, poison=())


class Cached(Inputs):  # places of a cache, and what is written there
    places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
    values: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0)


def counting(cache: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """A step that adds to a cache, and would do so twice where it is run twice."""
    return lambda view: cache.index_add_(0, view.places, view.values)[view.places]


@pytest.mark.parametrize("mode", ["poison", "parity", "poison,parity,addresses"])
def test_state_is_kept(mode: str) -> None:
    """A step that adds to a cache, or moves its slots, does so once, however often it is run to be looked at."""
    cache, once = torch.zeros(16), torch.zeros(16)
    moved = runner_of(lambda view: view.ids.add_(1) * 10, Moved, debug=mode)
    for rows in (3, 3, 7):
        assert moved({"ids": torch.arange(rows)}).tolist() == [10 * row + 10 for row in range(rows)]
    runner = runner_of(counting(cache), Cached, debug=mode)
    cache.zero_()
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        places, values = 1 + torch.randperm(15, generator=draw)[: 1 + seed], torch.rand(1 + seed, generator=draw)
        once.index_add_(0, places, values)
        torch.testing.assert_close(runner({"places": places, "values": values}), once[places])
    torch.testing.assert_close(cache, once)


def test_a_slot_that_a_step_writes_without_a_word() -> None:
    """It is named in the first step that writes it, which no warm-up did, and others are as before."""
    runner = runner_of(lambda view: view.ids.add_(view.flags.any().long()) * 10, Flagged, debug="poison")
    for flag in (False, True, False):
        batch = {"ids": torch.arange(3), "flags": torch.tensor([False, flag, False])}
        if flag:
            with pytest.raises(
                CheckError, match="the step writes slot 'ids': row 0 held 0, and holds 1 after the step"
            ):
                runner(batch)
        else:
            assert runner(batch).tolist() == [0, 10, 20]


def test_mode_is_off_where_the_state_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event says why, steps go on as they are, and a state that is given is kept instead."""
    cache = torch.zeros(64)
    runner = runner_of(counting(cache), Cached, debug="parity,poison")
    monkeypatch.setattr("slotgraph.runners.engine.state._free_on", lambda *_: 100)
    batch = {"places": torch.tensor([3, 5]), "values": torch.tensor([1.0, 2.0])}
    with structlog.testing.capture_logs() as events:
        for _ in range(3):
            runner(batch)
    told = [(event["event"], event["mode"], event["runner"]) for event in events]
    assert told == [("debug_off", "poison", "DecodeRunner"), ("debug_off", "parity", "DecodeRunner")]
    assert "the step changes 256 B on cpu besides its slots" in events[0]["reason"]
    with structlog.testing.capture_logs() as events, debugged(runner, "parity", [cache[3:6]]):
        runner(batch)
    assert events == []


def test_for_a_while() -> None:
    """A runner that was made without looks at the steps of a block, and at none after it."""
    host = {"scale": 2.0}
    runner = runner_of(lambda view: plain_step(view) * host["scale"], lowering="in_graph")
    batch = random_batch(3, 1)
    runner(batch)
    assert runner.watch.watchers == ()
    host["scale"] = 3.0
    runner(batch)
    with debugged(runner, "parity,poison,addresses"), pytest.raises(CheckError, match="parity"):
        runner(batch)
    assert runner.watch.watchers == ()
    runner(batch)
    with pytest.raises(ConfigError, match="'generations' is part of how a runner is made: give it debug='generations'"):
        debugged(runner, "parity,generations").__enter__()
    assert runner.watch.watchers == ()


def test_step_that_cannot_be_watched() -> None:
    """A step that cannot be looked at is passed over, one event says why, and the graph goes on."""
    factors = [1]
    runner = runner_of(lambda view: plain_step(view) * factors[0], debug="parity")
    factors.clear()
    with structlog.testing.capture_logs() as events:
        for rows in (3, 8):
            batch = random_batch(rows, rows)
            assert_right(runner(batch), batch)
    told = [(event["event"], event["reason"]) for event in events]
    assert told == [("debug_skipped", "IndexError: list index out of range")]


def test_what_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bool, names in one text or several, or else the environment; the nearest name where one is unknown."""
    monkeypatch.delenv(environment.DEBUG, raising=False)
    assert modes_of(None) == modes_of(wanted=False) == modes_of("") == modes_of(()) == frozenset()
    assert modes_of(wanted=True) == CHEAP == {"generations", "addresses", "keys"}
    assert modes_of("poison, parity") == modes_of(["parity", "poison"]) == {"parity", "poison"}
    for said, modes in {"1": CHEAP, "True": CHEAP, "0": set(), "": set(), "poison": {"poison"}}.items():
        monkeypatch.setenv(environment.DEBUG, said)
        assert modes_of(None) == modes
        assert modes_of(wanted=False) == frozenset()
    monkeypatch.setenv(environment.DEBUG, "poisen")
    with pytest.raises(ConfigError, match=r"SLOTGRAPH_DEBUG: unknown debug mode 'poisen': did you mean 'poison'\?"):
        plain_runner("cpu")
    assert_right(plain_runner("cpu", debug=False)(random_batch(2, 1)), random_batch(2, 1))
    with pytest.raises(ConfigError, match=r"option 'debug': unknown debug mode 'paritty': did you mean 'parity'\?"):
        plain_runner("cpu", debug="paritty")
    monkeypatch.setenv(environment.DEBUG, ",".join(MODES))
    eager = EagerRunner(PlainInputs, plain_step, backend="cpu")  # which has neither graphs nor tails
    assert eager.watch.watchers == ()
    with pytest.raises(ConfigError, match="debug mode parity checks graphs, and this EagerRunner has none"):
        debugged(eager, "parity").__enter__()


class Sparse(Moved):  # slots that a batch may lack, two of which are read elsewhere, and a field
    positions: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
    mask: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None, source="spec.mask")
    scale: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None, source=side("scale"))
    mode: int = 0


class Called(Sparse):  # a function may read any key
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=lambda batch: [*look_up(batch, "position")])


GIVEN: Final[dict[str, Any]] = {"ids": [5], "position": [2], "spec": None, "mode": 0, "temperature": 0.5}
Slotted: Any = attrs.make_class("Slotted", [*GIVEN], class_body={"reorder": attrs.asdict}, slots=True)


@pytest.mark.parametrize("kind", [dict, SimpleNamespace, Slotted])
@pytest.mark.parametrize(("inputs", "row", "names"), [(Sparse, 5, 2), (Called, 2, 0)])
def test_keys_that_no_slot_reads(kind: type, inputs: type[Inputs], row: int, names: int) -> None:
    """Each is named once, with the slot that it is near to, and the step goes on. A side argument is refused."""
    runner = runner_of(lambda view: view.ids + 0, inputs, debug=True, absent=[{"positions", "mask"}])
    with structlog.testing.capture_logs() as events:
        for _ in range(2):
            assert runner(kind(**GIVEN), scale=[3]).tolist() == [row]
        with pytest.raises(BatchError, match=r"side argument 'scales': did you mean 'scale'\?"):
            runner(kind(**GIVEN), scales=[3])
    near, far = "'position', which no slot reads; did you mean 'positions'?", "'temperature', which no slot reads"
    wanted = {"misspelt_key": f"the batch has {near}", "unread_key": f"the batch has {far}"}
    assert [(one["event"], one["reason"]) for one in events if "_key" in one["event"]] == [*wanted.items()][:names]


def test_parity_where_the_step_moves_its_slots() -> None:
    """A write to the wrong place is found, though the step run again on moved slots would write other bytes, too."""
    cache, host = torch.zeros(4, dtype=torch.int64), {"row": 1}

    def step(view: Moved) -> torch.Tensor:
        view.ids.add_(1)
        cache[host["row"]] = view.ids.sum()
        return torch.ones_like(view.ids)

    runner = runner_of(step, Moved, debug="parity")
    runner({"ids": torch.arange(3)})
    host["row"] = 2
    with pytest.raises(CheckError, match="a replay leaves other bytes than the step"):
        runner({"ids": torch.arange(3)})


def test_addresses_that_one_bucket_alone_reads() -> None:
    """What one bucket's graph does not read is looked at again when another bucket's turn comes."""
    held, runs = {4: torch.arange(9), 8: torch.arange(9)}, list[int]()

    def step(view: Any) -> torch.Tensor:
        runs.append(len(view.ids))
        return plain_step(view) + held[len(view.ids)][0]

    runner, batch = runner_of(step, debug="addresses"), random_batch(3, 1)
    held[8] = torch.arange(9) + 1
    runs.clear()
    for _ in range(2):
        assert_right(runner(batch), batch)
        assert runs == [4, 4]  # for its state, and for what it reads, once a bucket
    with pytest.raises(CheckError, match=r"reads held\[8\], and it is other memory than at capture"):
        runner(random_batch(7, 2))


def test_eager_steps_of_a_buckets_size() -> None:
    """A step that no graph takes reads what the step now holds, and is not accused of what graphs read."""

    class Fielded(PlainInputs):
        mode: int = 0

    held = {"bias": torch.zeros(1)}
    runner = runner_of(lambda view: plain_step(view) + held["bias"] + view.mode, Fielded, debug="addresses,parity")
    held["bias"] = torch.ones(1)
    batch = random_batch(4, 1)
    torch.testing.assert_close(runner({**batch, "mode": 1}), expected(batch) + 2)


def test_views_that_another_runner_has_overwritten() -> None:
    """In a pool, too, what lies there now is nothing to look at."""
    pool = InputPool("one", "two")
    given: dict[str, Any] = {"buckets": [4], "backend": CAPTURES, "sharing": True, "debug": "poison,parity"}
    one, two = (DecodeRunner(PlainInputs, plain_step, phase=pool[phase], **given) for phase in ("one", "two"))
    one.capture()
    two.capture()
    view, batch = one.fill(random_batch(3, 1)), random_batch(3, 2)
    two.fill({**batch, "ids": batch["ids"] + 1000})  # of which no table has a row
    said = "another runner of the same pool"
    with structlog.testing.capture_logs() as logs, pytest.raises(ReplayError, match=said):
        one.replay(view)
    assert logs == []
