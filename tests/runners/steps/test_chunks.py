"""Several steps in one launch: what is launched, what is handed out until when, what is reserved, what is refused."""

from collections.abc import Mapping
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    Axis,
    DecodeRunner,
    Inputs,
    check,
    computed,
    constant,
    copied,
    output,
    staged,
)
from slotgraph.backends import Backend, load
from slotgraph.errors import BatchError, ConfigError, SlotGraphError, StaleOutputError
from slotgraph.extend import Group, fills
from slotgraph.ranks import Ranks
from slotgraph.runners.steps import loop as loop_of_steps
from tests.packing import backend_of

END: Final = 40


class Counting(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda made: made)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, then=lambda lens: lens + 2)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


class Ending(Counting):
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda made: made == END)
    places: torch.Tensor = computed(lambda lens, out: out.copy_(lens), shape=TOKENS, dtype=CACHE_LOC)


def count(view: Counting) -> torch.Tensor:
    """One kernel: the next number."""
    return view.made.copy_(view.ids + 1)


def runner_of(backend: Any, inputs: type[Inputs] = Counting, step: Any = count, **options: Any) -> DecodeRunner[Any]:
    """A captured runner, with graphs of four steps."""
    given = {"buckets": [2, 4], "output_rows": BATCH, "chunks": (1, 4), "progress": False, **options}
    made: DecodeRunner[Any] = DecodeRunner(inputs, step, backend=backend, **given)
    made.capture()
    return made


def two(**more: Any) -> dict[str, Any]:
    """A batch of two requests."""
    return {"ids": [10, 20], "lens": [1, 5], **more}


def test_one_replay_runs_all_steps_of_a_chunk(backend: Backend) -> None:
    """The first step is a call; then each launch is one replay of one graph, and its steps are handed out in order."""
    runner = runner_of(backend)
    clock = runner.graphs.clock
    loop = runner.steps(two(), chunk=4)
    seen = [next(loop).tokens()]
    before = clock.replays
    steps = [next(loop) for _ in range(4)]
    assert clock.replays == before + 1
    seen += [step.tokens() for step in steps]
    assert seen == [[(0, 11 + number), (1, 21 + number)] for number in range(5)]
    assert [step.number for step in steps] == [1, 2, 3, 4]
    assert {step.lands for step in steps} == {5}
    assert runner.stats()["ahead"] == {"ahead": 5}
    assert runner.stats()["buckets"][2]["steps"] == 5


@pytest.mark.parametrize(("most", "copies"), [(1 << 16, 6), (0, 12)])
def test_outputs_of_a_chunk_are_kept_apart(
    backend: Backend, most: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs in a slot, in memory of their own and as parts: each is right until a launch uses the memory again.

    One copy takes those of all steps that lie in a slot to the host, if they are not large.
    """
    monkeypatch.setattr(loop_of_steps, "MOST_AT_ONCE", most)

    def step(view: Counting) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        view.made.copy_(view.ids + 1)
        return view.made, {"twice": view.made * 2, "ids": view.ids}

    loop = runner_of(backend, step=step).steps(
        two(), chunk=4, ahead=1, read=lambda outputs: outputs[1] | {"a": outputs[0]}
    )
    first, *steps = [next(loop) for _ in range(5)]
    copied = [one for one in tree_leaves(steps[0]._launch.copies.outputs) if isinstance(one, torch.Tensor)]
    assert len({one.untyped_storage().data_ptr() for one in copied}) == copies
    for step_of in (first, *steps):
        number, outputs = step_of.number, step_of.outputs
        assert outputs["a"].tolist() == [11 + number, 21 + number]
        assert outputs["twice"].tolist() == [22 + 2 * number, 42 + 2 * number]
        assert outputs["ids"].tolist() == [10 + number, 20 + number]
    for _ in range(4):
        next(loop)
    assert steps[0].outputs["a"].tolist() == [12, 22]
    with pytest.raises(StaleOutputError, match="the outputs of step 0 were overwritten"):
        _ = first.outputs
    for _ in range(4):
        next(loop)
    with pytest.raises(StaleOutputError, match="the outputs of step 4 were overwritten"):
        _ = steps[-1].outputs


def test_needs_cover_a_chunk(backend: Backend) -> None:
    """They are the most until the chunk's end, also of requests that join or change."""
    loop = runner_of(backend).steps(two(), keys=[*"ab"], chunk=4, needs=["lens"])
    step = next(loop)
    assert step.needs("lens") == {"a": 3 + 3 * 2, "b": 7 + 3 * 2}
    step.join({"ids": [1], "lens": [100]}, ["c"])
    step.edit(["a"], lens=[50])
    assert step.needs("lens") == {"a": 56, "b": 13, "c": 106}
    assert next(loop).needs("lens") == {"a": 64, "b": 21, "c": 114}


def test_whoever_is_done_is_handed_out_once(backend: Backend) -> None:
    """The token that ends a request is its last, in chunks already launched, too; its slots hold their tails."""
    runner = runner_of(backend, Ending, done="done")
    for chunk in (1, 4):
        loop = runner.steps({**two(ids=[36, 10]), "done": [False, False]}, keys=[*"ab"], chunk=chunk, ahead=2)
        step = next(loop)
        said = [dict(step.tokens())]
        for _ in range(12):
            step = next(loop)
            said.append(dict(step.tokens()))
        assert [row["a"] for row in said if "a" in row] == [37, 38, 39, 40]
        assert [row["b"] for row in said] == [*range(11, 24)]
        buffers = runner.graphs.buffers
        assert [buffers[name].tensor[0].item() for name in ("ids", "lens", "places", "done")] == [0, 1, 1, True]
        step.leave(["a"])
        step.join({"ids": [36], "lens": [9], "done": [False]}, ["c"])  # in the row of a
        later = [dict(next(loop).tokens()) for _ in range(30)]
        assert [row["c"] for row in later if "c" in row] == [37, 38, 39, 40]


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("chunk", [4, "auto"])
def test_nothing_is_launched_for_requests_that_are_all_done(chunk: Any, ahead: int) -> None:
    """At most the rest of a launch, and `ahead` further ones, run after the last request is done."""
    runner = runner_of("cpu-capture", Ending, done="done")
    for steps in range(1, 11):  # of the longer request, the last of which ends it
        batch = {**two(ids=[END - steps, END - 1]), "done": [False, False]}
        live, launches, surplus, handed_out = {"a", "b"}, set[int](), set[int](), 0
        for step in runner.steps(batch, keys=[*"ab"], chunk=chunk, ahead=ahead):
            handed_out += 1
            (launches if live else surplus).add(step.launch)
            ended = [key for key, token in step.tokens() if token == END]
            step.leave(ended)
            live -= {*ended}
        assert len(surplus - launches) == ahead
        assert handed_out - steps <= 4 * (ahead + 1) - 1


def test_a_request_that_begins_done_is_as_a_padded_row(backend: Backend) -> None:
    """A slot of the batch says so, in calls as in steps, with a graph and without."""
    for options in ({}, {"graphs": False}):
        runner = runner_of(backend, Ending, done="done", **options)
        view = runner.fill({**two(), "done": torch.tensor([True, False], device=backend.device)})
        assert runner.replay(view)[1].item() == 21
        assert (view.ids[:2].tolist(), view.lens[:2].tolist()) == ([0, 20], [1, 5])


@fills("less", "more")
def around(lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two slots by one call."""
    return lens - 1, lens + 1


KINDS: Final = Group("full", "sliding")
PAGES: Final = Axis("PAGES", fixed=True)
Tables = Mapping[str, torch.Tensor]


class Grouped(Ending):
    tables: Tables = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, ragged=True, group=KINDS)
    window: Tables = constant({"full": 1 << 20, "sliding": 4}, dtype=torch.int32, group=KINDS)
    starts: Tables = computed(
        lambda lens, window: (lens - window).clamp(min=0), shape=BATCH, dtype=torch.int32, pad=7, group=KINDS
    )
    less: torch.Tensor = computed(around, shape=BATCH, dtype=torch.int32, pad=5)
    more: torch.Tensor = computed(around, shape=BATCH, dtype=torch.int32, pad=6)


def total(view: Grouped) -> torch.Tensor:
    """A number of all slots, padded rows included."""
    pages = view.tables["full"].sum(1) + 2 * view.tables["sliding"].sum(1)
    filled = view.starts["sliding"] + 3 * view.less + 5 * view.more
    return view.made.copy_((view.ids + pages + filled + filled.sum()) % 50)


@pytest.mark.parametrize("done", [None, "done"])
def test_groups_and_functions_of_several_slots_are_in_chunks(backend: Backend, done: str | None) -> None:
    """With their tails, and with rows to which values are appended, as in single steps."""
    runner = runner_of(backend, Grouped, total, done=done, chunks=[3], sizes={PAGES: 4})
    first = two(tables={"full": [[7, 7], [9]], "sliding": [[5, 6], [8]]}, done=[False, False])
    found = []
    for chunk in (1, 3):
        tokens = []
        for step in runner.steps(first, keys=[*"ab"], chunk=chunk):
            tokens.append(dict(step.tokens()))
            if step.number == 3:
                one: Any = {"full": [[1]], "sliding": [[2]]}
                step.join({"ids": [1], "lens": [2], "tables": one, "done": [False]}, ["c"])
                step.append(["a"], tables={"full": [[4]], "sliding": [[]]})
            elif step.number == 6:
                step.edit(["b"], tables={"full": [[3, 3]], "sliding": [[]]})
                step.append(["b"], tables={"full": [[4]]})
            elif step.number == 12:
                step.leave(["a"])
            elif step.number == 18:
                step.leave([*"bc"])
        found.append(tokens[:19])
    assert found[0] == found[1]
    tables = runner.graphs.buffers["tables.full"].tensor
    assert done or [3, 3, 4, -1] in tables.tolist()


def test_holding_launches_single_steps(backend: Backend) -> None:
    """Nothing is launched until all was handed out, and then one step: `lands` is the very next."""
    runner = runner_of(backend)
    loop = runner.steps(two(), chunk=4, ahead=1)
    step = [next(loop) for _ in range(5)][-1]
    step.hold("grammar")
    assert step.lands == 9
    for _ in range(4):
        step = next(loop)
        step.hold("grammar")
    for number in range(9, 12):
        step = next(loop)
        assert (step.number, step.lands, step.tokens()) == (number, number + 1, [(0, 11 + number), (1, 21 + number)])
        step.hold("grammar")
    assert runner.stats()["ahead"]["held: grammar"] == 3


def test_a_hold_in_the_middle_of_a_chunk_holds_the_next_launch(backend: Backend) -> None:
    """It is said once, and lasts until all launched steps were handed out."""
    lands = list[int]()
    for step in runner_of(backend).steps(two(), chunk=4, ahead=1):
        lands.append(step.lands)
        if step.number == 2:
            step.hold("grammar")
        if step.number == 10:
            break
    assert lands == [5, *[9] * 8, 10, 18]


def test_watched_steps_and_other_lowerings_run_one_by_one() -> None:
    """As without chunks, with the same tokens."""
    ways: list[dict[str, Any]] = [{"lowering": "fused"}, {"lowering": "slot_by_slot"}, {"debug": True}]
    for options in ways:
        for step in runner_of("cpu-capture", **options).steps(two(), chunk=4, ahead=1):
            assert step.lands == step.number + 1
            assert step.tokens() == [(0, 11 + step.number), (1, 21 + step.number)]
            if step.number == 4:
                break


@pytest.mark.parametrize("chunks", [0, "4", (0,), (True,), (2.0,), {4: 1}, [-1]], ids=str)
def test_numbers_of_steps_are_checked(chunks: Any) -> None:
    """Whole numbers of at least 1."""
    with pytest.raises(ConfigError, match="chunks: expected numbers of steps"):
        DecodeRunner(Counting, count, chunks=chunks, backend="cpu")


def test_auto_grows_while_the_device_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the next larger number of steps then, and single steps while requests join; needs cover the largest."""
    is_idle = [False]
    monkeypatch.setattr("slotgraph.backends.cpu.HostEvent.query", lambda _: is_idle[0])
    launches, lands = dict[int, int](), 0
    for step in runner_of("cpu-capture", chunks=(3, 4)).steps(two(), chunk="auto", ahead=1, needs=["lens"]):
        launches[step.launch] = launches.get(step.launch, 0) + 1
        if step.number == 0:
            assert step.needs("lens") == {0: 5 + 3 * 2, 1: 9 + 3 * 2}
        is_idle[0] = step.launch >= 4
        if step.launch == 9:
            if launches[9] == 1:
                step.join({"ids": [1], "lens": [2]}, ["c"])
            lands = step.lands
        if step.launch == 13:
            break
    assert [*launches.values()][:-1] == [1, 1, 1, 1, 1, 1, 3, 4, 4, 4, 4, 1, 4]
    assert lands == 6 + 3 + 4 * 4


@pytest.mark.parametrize("chunk", [0, 2, 8, True, "4", None], ids=str)
def test_other_chunks_are_refused(chunk: Any) -> None:
    """The error names those that were captured."""
    with pytest.raises(ConfigError, match="chunk: expected one of 1, 4, which this runner captures"):
        runner_of("cpu").steps(two(), chunk=chunk)


def test_ranks_are_refused() -> None:
    """They agree before each step."""
    with (
        mock.patch.object(Ranks, "__init__", return_value=None),
        pytest.raises(ConfigError, match="chunks= and ranks=: ranks agree on a bucket before each step"),
    ):
        DecodeRunner(Counting, count, chunks=(4,), ranks=Ranks(), backend="cpu")


class OnHost(Counting):
    numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", then=lambda numbers: numbers + 1)


class Written(Counting):
    numbers: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0, placement="host")
    total: torch.Tensor = computed(
        lambda numbers: numbers.sum(0, keepdim=True), shape=1, dtype=torch.int64, placement="host"
    )


class Rewritten(Counting):
    numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host", rewritten=True)


class OfHost(Counting):
    numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    total: torch.Tensor = computed(
        lambda numbers: numbers.sum(0, keepdim=True), shape=1, dtype=torch.int64, placement="host"
    )


class OfAdvancing(OnHost):
    total: torch.Tensor = computed(lambda numbers: numbers.sum(0, keepdim=True), shape=1, dtype=torch.int64)


MAY: Final = "because host slot 'numbers' may be written in each step, and the host must see to it; or say chunk=1"


@pytest.mark.parametrize("chunk", [4, "auto"])
@pytest.mark.parametrize(
    ("inputs", "bound", "why"),
    [
        (OnHost, False, "because host slot 'numbers' advances: place it on the device; or say chunk=1"),
        (OfAdvancing, False, "because host slot 'numbers' advances: place it on the device; or say chunk=1"),
        (Written, False, MAY),
        (Rewritten, False, MAY),
        (OfHost, True, MAY),
    ],
)
def test_work_of_the_host_between_steps_is_refused(inputs: type[Inputs], bound: bool, why: str, chunk: Any) -> None:
    """The error names the slot. A loop of single steps that runs goes on, and another one begins as ever."""
    bind = {"bind": {"numbers": torch.zeros(4, dtype=torch.int64)}} if bound else {}
    runner = runner_of("cpu-capture", inputs, **bind)
    batch = two(numbers=[1, 2])
    loop = runner.steps(batch, ahead=1)
    seen = [next(loop).tokens() for _ in range(3)]
    with pytest.raises(ConfigError, match=f"several steps cannot be one launch, {why}"):
        runner.steps(batch, chunk=chunk)
    seen += [next(loop).tokens() for _ in range(3)]
    assert seen == [[(0, 11 + number), (1, 21 + number)] for number in range(6)]
    assert next(runner.steps(batch, chunk=1)).tokens() == [(0, 11), (1, 21)]


def test_host_functions_that_only_edits_change_are_in_chunks(backend: Backend) -> None:
    """Their results change with the edit at a chunk's end."""

    class Packed(Counting):
        numbers: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
        twice: torch.Tensor = computed(lambda numbers: numbers * 2, shape=BATCH, dtype=torch.int64, pad=0)

    def step(view: Packed) -> torch.Tensor:
        return view.made.copy_(view.ids + view.twice)

    found = []
    for step_of in runner_of(backend, Packed, step).steps(two(numbers=[1, 2]), chunk=4):
        if step_of.number == 2:
            step_of.edit([0], numbers=[5])
        found.append([token for _, token in step_of.tokens()])
        if step_of.number == 8:
            break
    assert found[:6] == [[12, 24], [14, 28], [16, 32], [18, 36], [20, 40], [30, 44]]
    assert found[8] == [60, 56]


def test_a_break_is_refused() -> None:
    """The host runs it in the middle of a step. Single steps run, with the break in each."""
    backend, calls = load("cpu-capture")(), [0]

    def called(places: Any) -> torch.Tensor:
        calls[0] += 1
        return places[0].fill_(1) if places else torch.ones((), dtype=torch.int64)

    def step(view: Counting) -> torch.Tensor:
        ids = view.ids + 0
        return view.made.copy_(ids + (backend.interrupt(called) if len(ids) > 2 else 1))

    runner = runner_of(backend, step=step)
    with pytest.raises(ConfigError, match="because a break runs on the host in the middle of the step; or say chunk=1"):
        runner.steps(two(), chunk=4)  # a later step may have a larger bucket
    loop, before = runner.steps({"ids": [10, 20, 30], "lens": [1, 5, 7]}), calls[0]
    assert [next(loop).tokens() for _ in range(3)] == [
        [(0, 11 + number), (1, 21 + number), (2, 31 + number)] for number in range(3)
    ]
    assert calls[0] == before + 3


class Wrong(Counting):
    two_each: torch.Tensor = copied(TOKENS * 2, dtype=torch.bool, pad=True, then=lambda two_each: two_each)
    number: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda number: number)
    stays: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True)
    optional: torch.Tensor | None = copied(
        BATCH, dtype=torch.bool, pad=True, default=None, then=lambda optional: optional
    )


@pytest.mark.parametrize("name", ["made", "two_each", "number", "stays", "optional", "nothing", 3], ids=str)
def test_slots_that_cannot_say_who_is_done_are_refused(name: Any) -> None:
    """Only one bool a request on the device can, with a rule that returns it."""
    with pytest.raises(ConfigError, match="done"):
        DecodeRunner(Wrong, count, done=name, backend="cpu")


def test_a_chunk_that_cannot_be_captured_fails_its_bucket() -> None:
    """Its reason is in the report, and the bucket runs eagerly."""
    calls = [0]

    def step(view: Counting) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("the step was to raise")
        return view.made.copy_(view.ids + 1)

    with pytest.raises(SlotGraphError, match="the step was to raise"):
        runner_of("cpu-capture", step=step, buckets=[2])


@pytest.mark.cuda
def test_graphs_of_several_steps_share_memory() -> None:
    """A graph of eight steps has 1.2 times the memory of one step's graph at most, beyond outputs."""
    backend = backend_of("cuda")
    weight = torch.randn(1024, 1024, device=backend.device)

    def step(view: Counting) -> torch.Tensor:
        wide = view.ids[:, None].float().expand(-1, 1024)
        for _ in range(4):
            wide = (wide @ weight).tanh()
        return view.made.copy_(view.ids + 1 + (wide.sum(1) * 0).long())

    one, several = (runner_of(backend, step=step, buckets=[256], chunks=chunks).report for chunks in ((), (8,)))
    assert one is not None
    assert several is not None
    assert several.memory.graphs <= 2.2 * one.memory.graphs  # both graphs, the single step's and the chunk's


@pytest.mark.parametrize("lowering", ["foreach", "in_graph"])
def test_check_knows_that_rows_of_done_requests_hold_the_tail(lowering: str) -> None:
    """Half of the requests that it draws begin done: it finds nothing."""
    runner = runner_of("cpu-capture", Ending, done="done", lowering=lowering)
    assert "reset   rows of all other slots where done is true" in runner.plan(2).lines()
    assert check(runner, progress=False).findings == ()


PLACES: Final = Axis("PLACES", fixed=True)


@fills("low", "high")
def low_and_high(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two places of each request."""
    return rows + 4, rows + 8


class Storing(Ending):
    """Places that a function computes, and another one reads; those of requests that are done are 0."""

    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    low: torch.Tensor = computed(low_and_high, shape=BATCH, dtype=torch.int64, pad=0)
    high: torch.Tensor = computed(low_and_high, shape=BATCH, dtype=torch.int64, pad=0)
    both: torch.Tensor = computed(lambda low, high: low + high, shape=BATCH, dtype=torch.int64)


class StoringOfHost(Storing):
    rows: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")


@pytest.mark.parametrize("inputs", [Storing, StoringOfHost])
@pytest.mark.parametrize("lowering", ["foreach", "in_graph", "slot_by_slot"])
@pytest.mark.parametrize("compiles", [False, True])
def test_computed_slots_of_requests_that_are_done_hold_the_tail(
    inputs: type[Storing], lowering: str, compiles: bool
) -> None:
    """The tail is there before another function reads the slot, so a request that is done writes to place 0 alone."""
    cache = torch.zeros(32, dtype=torch.int64)

    def step(view: Storing) -> torch.Tensor:
        for places in (view.low, view.high, view.both):
            cache[places] += 1
        return view.made.copy_(view.ids + 1)

    backend = "cpu" if compiles else "cpu-capture"
    runner = runner_of(backend, inputs, step, done="done", lowering=lowering, compile_computed=compiles)
    cache.zero_()
    batch = {"ids": [END - 3], "lens": [1], "rows": [3], "done": [False]}
    for launched in runner.steps(batch, keys=["a"], ahead=1, chunk=1 if inputs is StoringOfHost else 4):
        if launched.number == 8:
            launched.leave(["a"])
    assert cache[1:].nonzero().flatten().tolist() == [6, 10, 17]
    assert cache[[7, 11, 18]].tolist() == [3, 3, 3]


class Storage(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda made: made)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1, then=lambda lens: lens + 1)
    pages: torch.Tensor = copied(BATCH, PLACES, dtype=torch.int64, pad=0, ragged=lambda lens: lens)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("pause", [0, 1, 2, 5])
def test_needs_cover_all_launches_until_the_next_turn(ahead: int, chunk: int, pause: int) -> None:
    """Also where nobody was there for a while, and several launches follow at once."""

    def step(view: Storage) -> torch.Tensor:
        view.made.copy_(view.ids + 1)
        return view.pages.gather(1, view.lens[:, None] - 1)[:, 0]

    runner = runner_of("cpu-capture", Storage, step, sizes={PLACES: 64})
    free, pages, joins = [*range(99, 0, -1)], list[int](), -1
    batch = {"ids": [1], "lens": [1], "pages": [[*range(100, 140)]]}
    for launched in runner.steps(batch, keys=["a"], ahead=ahead, chunk=chunk, needs=["pages"]):
        pages += [page for key, page in launched.tokens() if key == "b"]
        if launched.number == 5:
            launched.leave(["a"])
            joins = min(launched.number + pause, launched.lands - 1)
        if launched.number == joins:
            launched.join({"ids": [1], "lens": [1], "pages": [[free.pop()]]}, ["b"])
        if len(pages) >= 10:
            break
        new = {key: [free.pop() for _ in range(count)] for key, count in launched.needs("pages").items() if key == "b"}
        launched.append([*new], pages=[*new.values()])
    assert pages == [*range(1, 11)]


def test_what_is_said_after_the_end_is_refused() -> None:
    """Nobody would see it."""
    runner = runner_of("cpu-capture")
    loop = runner.steps(two())
    step = next(loop)
    loop.close()  # type: ignore[attr-defined] # a generator
    calls: dict[Any, tuple[Any, ...]] = {step.leave: ([0],), step.join: (two(), [3, 4]), step.hold: ("why",)}
    for say, given in calls.items():
        with pytest.raises(BatchError, match=r"these steps\(\) have ended"):
            say(*given)
    with pytest.raises(BatchError, match=r"these steps\(\) have ended"):
        step.edit([0], ids=[7])


class Wide(Counting):
    wide: torch.Tensor = output(BATCH, 2, 4, dtype=torch.int64)


def test_tokens_of_a_part_of_wide_outputs() -> None:
    """The part has gaps in the memory that a chunk's outputs share, and tokens() reads it all the same."""

    def step(view: Wide) -> torch.Tensor:
        view.made.copy_(view.ids + 1)
        return view.wide.copy_(view.made[:, None, None].expand(-1, 2, 4) + torch.arange(4))

    runner = runner_of("cpu-capture", Wide, step)
    for chunk in (1, 4):
        loop = runner.steps(two(), chunk=chunk, read=lambda wide: wide[:, :, :2])
        assert [next(loop).tokens() for _ in range(2)][1] == [(0, [12, 13, 12, 13]), (1, [22, 23, 22, 23])]
