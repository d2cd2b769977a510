"""Steps that need no host: rules, edits, reading ahead, and what is refused."""

import weakref
from pathlib import Path

import pytest
import torch

from slotgraph import BATCH, Axis, DecodeRunner, EagerRunner, Inputs, computed, copied, record
from slotgraph.backends.base import Event
from slotgraph.backends.cpu import HostBackend, HostEvent
from slotgraph.errors import BatchError, ConfigError, CycleError, DeclarationErrors, ReplayError, StaleOutputError
from slotgraph.pool import InputPool
from slotgraph.runners.engine.capture import FORKS
from tests.runners.models import decoder
from tests.runners.steps.counting import LOWERINGS, Counting, batch, count, counting, made


@pytest.fixture(params=LOWERINGS)
def runner(cpu: str, request: pytest.FixtureRequest) -> DecodeRunner[Counting]:
    """A runner by each lowering."""
    return counting(cpu, lowering=request.param)


def test_without_news_nothing_is_sent(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leave of no one is no news."""
    sent = list[object]()
    monkeypatch.setattr("slotgraph.dataflow.edits.RowBucket.send", lambda *packet: sent.append(packet))
    for step in counting(cpu, lowering="in_graph").steps(batch(1, 2)):
        step.leave(())
        if step.number == 5:
            break
    assert sent == []


def test_the_host_foretells_the_next_launch(cpu: str) -> None:
    """Lengths of the step that is launched next: of requests of the first batch, of new ones, of changed ones."""
    lens = torch.ones(2, dtype=torch.int32)
    for step in counting(cpu).steps({**batch(1, 2), "lens": lens}, keys=[*"ab"], ahead=2, needs=["lens"]):
        if step.number == 0:
            lens.zero_()  # it was read
            assert step.needs("lens") == {"a": 4, "b": 4}
            step.join({**batch(3), "lens": torch.tensor([7], dtype=torch.int32)}, ["c"])
            step.edit(["b"], lens=[20])
            assert step.needs("lens") == {"a": 4, "b": 20, "c": 7}
        if step.number == 2:
            assert step.needs("lens") == {"a": 6, "b": 22, "c": 9}
            with pytest.raises(ConfigError, match="name it when steps\\(\\) begins, needs=\\['tag'\\]"):
                step.needs("tag")
            break


def test_a_held_step_waits_for_the_host(cpu: str) -> None:
    """It is launched once all others were handed out, and the statistics say why."""
    runner, lands = counting(cpu), list[int]()
    for step in runner.steps(batch(1), ahead=2):
        lands.append(step.lands)
        if step.number in {1, 2, 3, 4}:
            step.hold("grammar")
        if step.number == 6:
            break
    assert lands == [3, 4, 4, 4, 5, 6, 9]
    assert runner.stats()["ahead"] == {"ahead": 7, "held: grammar": 2}


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_one_hold_lasts_until_all_launched_steps_were_handed_out(cpu: str, ahead: int) -> None:
    """Then one step is launched alone, and the loop goes on."""
    lands = list[int]()
    for step in counting(cpu).steps(batch(1), ahead=ahead):
        lands.append(step.lands)
        if step.number == 2:
            step.hold("grammar")
        if step.number == 2 + ahead + 2:
            break
    launched = 2 + ahead + 1
    assert lands[2:] == [launched] * (ahead + 1) + [launched + 1, launched + 2 + ahead]


def test_outputs_last_until_the_ring_is_round(cpu: str) -> None:
    """A step's host memory is used again `ahead` + 2 steps later."""
    steps = counting(cpu).steps(batch(1, 2), ahead=1)
    first = next(steps)
    kept = first.outputs
    next(steps)
    assert kept.tolist() == [made(1, 0), made(2, 0)] == first.outputs.tolist()
    next(steps)
    with pytest.raises(StaleOutputError, match="outputs of step 0 were overwritten"):
        _ = first.outputs


def test_read_chooses_what_is_copied(cpu: str) -> None:
    """`read` chooses what is copied, and makes nothing of its own; tokens need one tensor."""
    chosen = counting(cpu, lambda view: {"made": count(view), "twice": view.made * 2})
    step = next(chosen.steps(batch(3, 4)))
    assert {name: one.tolist() for name, one in step.outputs.items()} == {"made": [4, 5], "twice": [8, 10]}
    with pytest.raises(ConfigError, match="one tensor, got dict: use outputs"):
        step.tokens()
    assert next(chosen.steps(batch(3, 4), read=lambda outputs: outputs["twice"])).tokens() == [(0, 8), (1, 10)]
    with pytest.raises(ConfigError, match="read= makes a tensor of its own"):
        next(chosen.steps(batch(3, 4), read=lambda outputs: outputs["twice"] + 1))
    whole = decoder(Counting, count, backend=cpu, buckets=(4,), output_rows=None)
    with pytest.raises(ConfigError, match="outputs are whole: set output_rows="):
        next(whole.steps(batch(3, 4))).tokens()


def test_a_step_waits_for_its_own_outputs_alone(cpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for its own outputs alone; memory that the device may still write lives on when the loop ends."""
    events, waited, runner = weakref.WeakSet[HostEvent](), list[int](), counting(cpu)

    def event(_: HostBackend, again: Event | None = None) -> HostEvent:
        del again
        events.add(one := HostEvent())
        return one

    monkeypatch.setattr(HostBackend, "event", event)
    monkeypatch.setattr(HostEvent, "query", lambda _: False)
    monkeypatch.setattr(HostEvent, "synchronize", lambda _: waited.append(1))
    steps = runner.steps(batch(1), ahead=2)
    next(steps)
    assert next(steps).tokens() == [(0, made(1, 1))]
    assert waited == [1]
    del steps
    assert len(events) == 3  # of four


def test_buckets_are_captured_when_an_edit_needs_them(cpu: str) -> None:
    """A late capture in the middle of steps leaves slots as they were."""
    runner = counting(cpu, lazy=True, lowering="in_graph")
    for step in runner.steps(batch(1), keys=["a"], ahead=1):
        if step.number == 1:
            step.join(batch(2, 3, 4, 5), [*"bcde"])
        if step.number == 4:
            assert dict(step.tokens()) == {"a": made(1, 4), **{key: made(2 + at, 1) for at, key in enumerate("bcde")}}
            break
    assert sorted(runner.graphs.captured) == [(2, frozenset(), ()), (8, frozenset(), ())]


def test_a_call_of_the_runner_ends_the_loop(runner: DecodeRunner[Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the runner takes the slots; steps may begin again. A forked process has no graphs."""
    steps = runner.steps(batch(1, 2))
    next(steps)
    assert runner(batch(5)).tolist() == [made(5, 0)]
    with pytest.raises(ReplayError, match="another batch was filled in the middle of steps"):
        next(steps)
    steps = runner.steps(batch(6))
    step = next(steps)
    assert step.tokens() == [(0, made(6, 0))]
    step.join(batch(7), ["b"])
    next(steps)
    with monkeypatch.context() as patch:
        patch.setattr(FORKS, "count", FORKS.count + 1)
        with pytest.raises(ReplayError, match="forked in the middle of steps"):
            next(steps)
    with pytest.raises(BatchError, match="have ended: begin again"):
        step.join(batch(8), ["c"])
    assert runner(batch(5)).tolist() == [made(5, 0)]
    assert runner.graphs.buffers["tag"].tensor[1] == 0  # no row of the request that joined
    assert runner(batch(5, 6, 7)).tolist() == [made(tag, 0) for tag in (5, 6, 7)]


def test_calls_between_loops_fill_as_ever(cpu: str) -> None:
    """A runner whose slots advance fills each batch that it is called with, also the very same one twice."""
    runner, same = counting(cpu, lowering="in_graph"), batch(3, 4)
    for _ in range(3):
        assert runner(same).tolist() == [made(3, 0), made(4, 0)]


class Masked(Counting):
    mask: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)


def test_all_requests_bring_the_same_slots(cpu: str) -> None:
    """An optional slot comes with each request of a loop, or with none."""
    runner = decoder(Masked, count, backend=cpu, buckets=(2,), output_rows=BATCH, absent=[{"mask"}])
    for mask, other in (({}, {"mask": [7]}), ({"mask": [7]}, {})):
        steps = runner.steps(batch(1) | mask, keys=["a"])
        step = next(steps)
        with pytest.raises(BatchError, match="have the same optional slots, and these differ in 'mask'"):
            step.join(batch(2) | other, ["b"])
        step.join(batch(2) | mask, ["b"])
        assert next(steps).tokens() == [("a", made(1, 1)), ("b", made(2, 0))]


def test_a_watched_runner_steps_by_whole_calls(cpu: str, tmp_path: Path) -> None:
    """A recording has each step as an ordinary one."""
    runner = counting(cpu)
    with record(runner, tmp_path / "steps.safetensors"):
        for step in runner.steps(batch(1, 2), keys=[*"ab"], ahead=2):
            if step.number == 1:
                step.join(batch(3), ["c"])
            assert dict(step.tokens())["a"] == made(1, step.number)
            if step.number == 3:
                step.leave([*"abc"])
    assert (tmp_path / "steps.safetensors").is_file()
    assert runner.stats()["ahead"] == {"held: each step is watched": 4}


def test_plans_say_how_slots_advance() -> None:
    """Sums go together, in the kernel where there is one; other functions are operators before them."""

    class Chained(Counting):
        seen: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=0, then=lambda lens, seen: seen.maximum(lens))
        mean: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=0, then=lambda mean: mean + 1)  # no whole number
        most: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda lens: lens)  # of another dtype

    runner = DecodeRunner(Chained, lambda view: view.seen, backend="cpu", buckets=(2,), lowering="in_graph")
    told = [str(one) for one in runner.plan(2).advances]
    assert told[0].startswith("advance lens = ")  # another rule reads it
    assert ["operators" in one for one in told] == [True] * 4 + [False]
    assert told[4] == "advance ids = made"
    assert "advance ids = made" in str(runner.plan(2))


def test_wrong_rules_are_refused_with_the_class() -> None:
    """All at once, each with what to do."""
    with pytest.raises(DeclarationErrors) as caught:

        class _Wrong(Inputs):
            a: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda nothing: nothing)
            b: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda c: c)
            c: torch.Tensor = computed(lambda a: a + 1, shape=BATCH, dtype=torch.int64)
            d: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", then=lambda a: a)
            e: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)
            f: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda e: e)
            g: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda h: h + 1)
            h: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda g: g + 1)
            i: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda out: out)

    told = str([str(one) for one in caught.value.exceptions])
    for part in (
        "needs 'nothing': name slots of the declaration",
        "needs 'c', which is computed from the new values",
        "needs 'a', which is on the device",
        "needs 'e', which may be absent",
        "g -> h -> g",
    ):
        assert part in told
    assert any(isinstance(one, CycleError) for one in caught.value.exceptions)


PAGES = Axis("PAGES")


def test_steps_refuse_what_cannot_run() -> None:
    """Before anything is run, with the way out."""

    class Still(Inputs):
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    class Tables(Counting):
        tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)

    still = DecodeRunner(Still, lambda view: view.ids, backend="cpu", buckets=(2,), output_rows=BATCH)
    with pytest.raises(ReplayError, match="call capture"):
        still.steps({"ids": [1]})
    still.capture()
    with pytest.raises(ConfigError, match="no slot of Still advances"):
        still.steps({"ids": [1]})
    tables = decoder(Tables, lambda view: view.lens, buckets=(2,), sizes={PAGES: 3}, output_rows=BATCH)
    with pytest.raises(ConfigError, match=r"slot 'tables' varies on PAGES: .*make it a fixed axis"):
        tables.steps({**batch(1), "tables": torch.ones(1, 2, dtype=torch.int32)})
    for shape, sizes in (((BATCH, BATCH), [2, 2]), ((BATCH * BATCH,), [4]), ((BATCH + 2,), [4])):

        class Odd(Counting):
            odd: torch.Tensor = copied(*shape, dtype=torch.int64, pad=0)

        squares = decoder(Odd, lambda view: view.lens, buckets=(2,), output_rows=BATCH)
        with pytest.raises(ConfigError, match="'odd' has no whole number of rows for each request"):
            squares.steps({**batch(1, 2), "odd": torch.ones(sizes, dtype=torch.int64)})
    runner = counting("cpu")
    with pytest.raises(ConfigError, match="ahead"):
        runner.steps(batch(1), ahead=-1)
    with pytest.raises(BatchError, match="needs a graph, and this batch has none"):
        runner.steps(batch(*range(9)))
    with pytest.raises(BatchError, match="1 keys for a batch of 2"):
        runner.steps(batch(1, 2), keys=["a"])
    with pytest.raises(BatchError, match="two requests have one key"):
        runner.steps(batch(1, 2), keys=["a", "a"])
    with pytest.raises(ConfigError, match="needs names 'tag'"):
        runner.steps(batch(1), needs=["tag"])
    pool = InputPool("decode", "other")
    pooled = DecodeRunner(Counting, count, backend="cpu", buckets=(2,), output_rows=BATCH, phase=pool["decode"])
    others = EagerRunner(Counting, count, backend="cpu")
    assert others(batch(1)).tolist() == [2]
    pooled.capture()
    with pytest.raises(ConfigError, match="which other runners overwrite"):
        pooled.steps(batch(1))


class Laneless(Counting):  # a slot that the kernel does not take, and one of all requests
    waves: torch.Tensor = copied(BATCH, dtype=torch.complex128, pad=0)
    turn: torch.Tensor = copied(1, dtype=torch.int64, then=lambda turn: turn + 1)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_edits_that_bring_the_kernel_nothing_leave_slots_alone(cpu: str, lowering: str) -> None:
    """They leave all other slots alone, whatever became of the tensors of the batch before."""

    def step(view: Laneless) -> torch.Tensor:
        return torch.stack([view.turn.expand(len(view.tag)), view.waves.real.to(torch.int64)], 1)

    runner = decoder(Laneless, step, backend=cpu, buckets=(4,), output_rows=BATCH, lowering=lowering)
    turn = torch.tensor([5])
    for one in runner.steps(
        {**batch(1, 2), "waves": torch.zeros(2, dtype=torch.complex128), "turn": turn}, keys=[*"ab"]
    ):
        turn.fill_(99)
        assert one.tokens() == [("a", [5 + one.number, 0]), ("b", [5 + one.number, 7 * (one.number > 1)])]
        if one.number == 1:
            one.edit(["b"], waves=torch.tensor([7], dtype=torch.complex128))
        if one.number == 3:
            one.edit()
        if one.number == 5:
            break
