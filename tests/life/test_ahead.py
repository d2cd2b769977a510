"""Steps that follow one another in any order of news, beside plain Python: no output and no byte of a slot differs."""

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, Final
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, InputBuffers, Inputs, computed, copied, output
from slotgraph.backends import Backend, Graph
from slotgraph.errors import BatchError
from slotgraph.extend import LaunchedStep, Ragged
from slotgraph.runners.engine.config import Buckets
from slotgraph.runners.steps.chain import Chain
from tests.packing import NAME, backend_of
from tests.runners.models import decoder

PAGES: Final = Axis("PAGES", fixed=True)
WIDE, MOST, MODULUS = 5, 16, 10007
BUCKETS: Final = (1, 2, 4, 8, MOST)
CHUNKS: Final = (1, 2, 3, 8)
HEALTH: Final = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
THOROUGH: Final = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
Row = dict[str, Any]
Way = tuple[str, str | None] | tuple[str, str | None, str]
"""A backend, a lowering, and whose graphs run."""
Act = Callable[[dict[Hashable, Row]], object]
PADS: Final = {"ids": 0, "positions": -1, "lens": 1, "pages": 7, "done": True, "rope": 3, "bias": -0.5, "table": -3}
SHOULD_RAISE: Final = [False]
ROW: Final[Row] = {
    "ids": 3,
    "positions": 8,
    "lens": 9,
    "pages": [4, 2, 9, 1, 7],
    "done": False,
    "rope": [1, 2, 3],
    "bias": 1.0,
    "table": [5, 6],
}


def place(pages: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Where a token is stored, by its request's table."""
    return pages.gather(1, positions.remainder(pages.shape[1])[:, None])[:, 0] * 4 + positions


class AheadInputs(Inputs):  # each kind of rule, and of shape
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=PADS["ids"], then=lambda made: made)
    positions: torch.Tensor = copied(
        TOKENS, dtype=torch.int64, pad=PADS["positions"], then=lambda positions: positions + 1
    )
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=PADS["lens"], then=lambda lens: lens + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=PADS["pages"])
    done: torch.Tensor = copied(
        BATCH, dtype=torch.bool, pad=PADS["done"], then=lambda done, made: done | (made % 5 == 0)
    )
    rope: torch.Tensor = copied(3, TOKENS, dtype=torch.int16, pad=PADS["rope"], then=lambda rope: rope + 2)
    bias: torch.Tensor = copied(  # of the new value of `done`
        BATCH, dtype=torch.float32, pad=PADS["bias"], then=lambda bias, done: torch.where(done, bias, bias + 0.25)
    )
    table: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=PADS["table"], ragged=lambda lens: lens // 16)
    places: torch.Tensor = computed(place, shape=TOKENS, dtype=torch.int64)
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def step(view: AheadInputs) -> torch.Tensor:
    """[BATCH] numbers, each of all slots of its row and of the number of live rows."""
    if SHOULD_RAISE[0]:
        raise RuntimeError("the step was to raise")
    lens = view.lens + view.rope.sum(0) + (view.bias * 4).to(torch.int64)
    made = view.ids * 3 + view.positions + lens + view.places + view.count + view.done * 1000 + view.table.sum(1)
    view.made.copy_(made % MODULUS)
    return view.made


def plain_step(row: Row, count: int) -> int:
    """The same of one row in plain Python."""
    position = row["positions"]
    stored = row["pages"][position % WIDE] * 4 + position
    lens = row["lens"] + sum(row["rope"]) + int(row["bias"] * 4)
    table = sum(row["table"]) + PADS["table"] * (WIDE - len(row["table"]))
    return int((row["ids"] * 3 + position + lens + stored + count + 1000 * row["done"] + table) % MODULUS)


def plain_rules(row: Row) -> None:
    """What one row holds in the next step."""
    row["done"] = row["done"] or row["made"] % 5 == 0
    row["bias"] += 0.0 if row["done"] else 0.25
    row["ids"], row["positions"], row["lens"] = row["made"], row["positions"] + 1, row["lens"] + 1
    row["rope"] = [one + 2 for one in row["rope"]]


@attrs.frozen(eq=False)
class Own:
    """Graphs of one's own over `InputBuffers`, with what the game asks of a runner.

    Attributes:
        is_in_graph: Whether each graph begins with the device's part of a fill.
    """

    backend: Backend
    buffers: InputBuffers[AheadInputs]
    is_in_graph: bool
    buckets: Buckets = attrs.field(factory=lambda: Buckets(BUCKETS))
    replays: dict[int, Graph] = attrs.field(factory=dict)

    def capture(self) -> None:
        """Capture a graph for each bucket."""
        for rows in BUCKETS:
            bucket = self.buffers.at({BATCH: rows, TOKENS: rows})
            self.buffers.prepare({BATCH: rows, TOKENS: rows})

            def captured(bucket: Any = bucket) -> torch.Tensor:
                if self.is_in_graph:
                    bucket.fill_in_graph()
                return step(bucket.view())

            self.backend.synchronize()
            with self.backend.stream():
                self.replays[rows] = self.backend.capture(captured)

    def launch(self, view: AheadInputs) -> torch.Tensor:
        """Replay the graph of a view's size."""
        if SHOULD_RAISE[0]:
            raise RuntimeError("the step was to raise")
        graph = self.replays[len(view.ids)]
        graph.replay()
        outputs: torch.Tensor = graph.outputs
        return outputs

    def steps(self, batch: dict[str, Any], **options: Any) -> Iterator[LaunchedStep]:
        """As a runner's."""
        sizes = [{BATCH: rows, TOKENS: rows} for rows in BUCKETS]
        return self.buffers.steps(self.launch, batch, padded=sizes, output_rows=BATCH, **options)

    def memory(self, name: str) -> torch.Tensor:
        """A slot."""
        return self.buffers._layer.buffers[name].tensor


@functools.cache
def runner_on(backend: str, lowering: str | None, done: str | None = None) -> DecodeRunner[AheadInputs]:
    """A captured runner, of which each example begins steps anew. done: the slot that ends requests, or None."""
    options: Any = {"backend": backend_of(backend, lowering), "sizes": {PAGES: WIDE}, "output_rows": BATCH}
    options |= {"chunks": CHUNKS, "done": done}
    if lowering is not None:
        options["lowering"] = lowering
    made: DecodeRunner[AheadInputs] = decoder(AheadInputs, step, buckets=BUCKETS, **options)
    return made


@attrs.frozen(eq=False)
class Runs:
    """What runs steps: its backend, its buckets, how it begins, and the memory of a slot."""

    backend: Backend
    buckets: Buckets
    steps: Callable[..., Iterator[LaunchedStep]]
    memory: Callable[[str], torch.Tensor]


@functools.cache
def runs_on(backend: str, lowering: str | None, own: str = "", done: str | None = None) -> Runs:
    """A runner, or graphs of one's own."""
    if not own:
        runner = runner_on(backend, lowering, done)
        return Runs(runner.stage.backend, runner.buckets, runner.steps, lambda name: runner.graphs.buffers[name].tensor)
    on, sizes = backend_of(backend, lowering), {BATCH: MOST, TOKENS: MOST, PAGES: WIDE}
    buffers = InputBuffers(AheadInputs, sizes, backend=on, lowering=lowering or "auto")
    graphs = Own(on, buffers, own == "in the graph")
    graphs.capture()
    return Runs(on, graphs.buckets, graphs.steps, graphs.memory)


rows_of_requests = st.builds(
    lambda numbers, pages, done: {
        "ids": numbers[0] % 1000,
        "positions": numbers[1] % 50,
        "lens": 1 + numbers[2] % 60,
        "pages": pages,
        "done": done,
        "rope": [numbers[3] % 9, numbers[4] % 9, numbers[5] % 9],
        "bias": float(numbers[6] % 5),
        "table": pages[: numbers[0] % (WIDE + 1)],
    },
    st.lists(st.integers(0, 1 << 20), min_size=7, max_size=7),
    st.lists(st.integers(1, 99), min_size=WIDE, max_size=WIDE),
    st.booleans(),
)


def batch_of(rows: Sequence[Row], device: torch.device, *, lists: bool) -> dict[str, Any]:
    """A batch of these rows, of tensors where slots are, or of host data where that is taken."""
    dtypes = {name: kind.dtype for name, kind in AheadInputs.slotgraph.slots.items() if name in PADS}
    found: dict[str, Any] = {}
    for name, dtype in dtypes.items():
        assert isinstance(dtype, torch.dtype)
        if name == "table":
            found[name] = table_of([row[name] for row in rows], lists=lists)
            continue
        tensor = torch.tensor([row[name] for row in rows], dtype=dtype)
        if name == "rope":
            tensor = tensor.view(-1, 3).t().contiguous()
        elif name == "pages":
            tensor = tensor.view(-1, WIDE)
        found[name] = [row[name] for row in rows] if lists and name in {"positions", "lens"} else tensor.to(device)
    return found


def table_of(rows: Sequence[list[int]], *, lists: bool) -> Any:
    """Ragged rows, as lists or all behind one another."""
    if lists:
        return [*rows]
    values = torch.tensor([one for row in rows for one in row], dtype=torch.int32)
    return Ragged(values, offsets=[0, *itertools.accumulate(map(len, rows))])


class Broken(Exception):  # noqa: N818 - as an interrupt
    """What breaks a step off."""


class Steps(RuleBasedStateMachine):
    """A loop of steps, and the same requests in plain Python. taken: steps of all examples so far."""

    ways: ClassVar[Sequence[Way]] = ()
    taken: ClassVar[int] = 0

    @initialize(
        data=st.data(),
        ahead=st.sampled_from([0, 1, 4]),
        chunk=st.sampled_from([1, *CHUNKS]),
        done=st.sampled_from([None, "done"]),
    )
    def begin(self, data: st.DataObject, ahead: int, chunk: int, done: str | None) -> None:
        way = data.draw(st.sampled_from(self.ways))
        if len(way) > 2:  # graphs of one's own run one step in a launch
            chunk, done = 1, None
        self.runner, self.ahead, self.next_key = runs_on(*way, done=done), ahead, 0
        self.chunk, self.ends = chunk, done is not None
        self.start(data.draw(st.lists(rows_of_requests, min_size=1, max_size=6)))

    def start(self, rows: Sequence[Row]) -> None:
        """Begin steps with a batch of these requests."""
        keys = self.new_keys(len(rows))
        self.model: dict[Hashable, Row] = {key: copy.deepcopy(row) for key, row in zip(keys, rows, strict=True)}
        self.alive, self.news, self.history = {*keys}, dict[int, list[Act]](), list[dict[Hashable, int]]()
        self.done = list[set[Hashable]]()  # of each step, whose rows are done
        self.gone, self.counted = (
            dict[int, int](),
            set[int](),
        )  # by key the step without it; whose rows count until then
        device = self.runner.backend.device
        batch = batch_of(rows, device, lists=len(rows) % 2 == 0)
        options: dict[str, Any] = {"chunk": self.chunk} if self.chunk > 1 else {}
        self.steps = self.runner.steps(batch, keys=keys, ahead=self.ahead, needs=["lens", "table"], **options)
        self.step: LaunchedStep | None = None
        self.proceed(1)

    def new_keys(self, count: int) -> list[int]:
        self.next_key += count
        return [*range(self.next_key - count, self.next_key)]

    def note(self, act: Act) -> None:
        """Have the model do something when the step comes that an edit made now reaches."""
        assert self.step is not None
        self.news.setdefault(self.step.lands, []).append(act)

    def proceed(self, count: int) -> None:
        """Take so many steps, and compare each."""
        for _ in range(count):
            self.step = next(self.steps, None)
            if self.step is None:
                assert not self.alive
                return
            Steps.taken += 1
            self.compare(self.step)

    def compare(self, step: LaunchedStep) -> None:
        """The outputs of a step, and all slots as the last one that was launched left them."""
        while len(self.history) < step.lands:
            if self.history:
                for row in self.model.values():
                    plain_rules(row)
            for act in self.news.get(len(self.history), ()):
                act(self.model)
            self.done.append({key for key, row in self.model.items() if self.ends and row["done"]})
            for key in self.done[-1]:  # as padded rows
                row = self.model[key]
                row.setdefault("known", row["table"])  # the host appends to this
                row |= {**PADS, "pages": [PADS["pages"]] * WIDE, "rope": [PADS["rope"]] * 3, "table": []}
            for row in self.model.values():
                row["made"] = plain_step(row, len(self.model))
            self.history.append({key: row["made"] for key, row in self.model.items()})
        want = self.history[step.number]
        assert dict(zip(step.keys, step.outputs.tolist(), strict=True)) == want
        counting = (self.alive | self.counted) - self.done[step.number]
        assert dict(step.tokens()) == {key: one for key, one in want.items() if key in counting}
        if not self.ends:
            self.compare_needs(step)
        chain: Chain[Any] = step._loop._chain
        keys, bucket = chain._keys, self.runner.buckets.fit(len(chain._keys))
        assert bucket is not None
        live = batch_of([self.model[key] for key in keys], torch.device("cpu"), lists=False)
        for name, pad in PADS.items():
            whole = self.runner.memory(name).cpu()
            dim = 1 if name == "rope" else 0
            if name == "table":
                rests = [row + [pad] * (WIDE - len(row)) for row in (self.model[key][name] for key in keys)]
                live[name] = torch.tensor(rests, dtype=torch.int32).view(-1, WIDE)
            assert torch.equal(whole.narrow(dim, 0, len(keys)), live[name]), name
            tail = whole.narrow(dim, len(keys), bucket - len(keys))
            assert torch.equal(tail, torch.full_like(tail, pad)), name

    def compare_needs(self, step: LaunchedStep) -> None:
        """What requests need in the last step of a later launch."""
        rows, chunk = self.next_rows(), step._loop._chain.chunk_sizes[-1]
        for steps in (1, 2, 40):
            lens = {key: row["lens"] + steps * chunk - 1 for key, row in rows.items()}
            assert step.needs("lens", steps=steps) == lens
            lacking = {key: one // 16 - len(rows[key]["table"]) for key, one in lens.items()}
            assert step.needs("table", steps=steps) == {key: max(0, one) for key, one in lacking.items()}

    @rule(count=st.sampled_from([1, 1, 2, 3, 10, 40]))
    def run(self, count: int) -> None:
        self.proceed(count)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), now=st.booleans())
    def leave(self, data: st.DataObject, now: bool) -> None:
        assert self.step is not None
        some = st.lists(st.sampled_from(sorted(self.alive)), unique=True, max_size=len(self.alive) - 1)
        keys = data.draw(some)
        self.step.leave(keys, now=now)
        self.alive -= {*keys}
        self.gone.update(dict.fromkeys(keys, self.step.lands))
        self.counted |= set() if now else {*keys}
        self.note(lambda model: [model.pop(key, None) for key in keys])

    @rule(rows=st.lists(rows_of_requests, min_size=1, max_size=6), lists=st.booleans())
    def join(self, rows: list[Row], lists: bool) -> None:
        assert self.step is not None
        again = [key for key, lands in self.gone.items() if lands <= self.step.number]  # of which no row is to come
        keys = [*again, *self.new_keys(len(rows))][: len(rows)]
        batch = batch_of(rows, self.runner.backend.device, lists=lists)
        if len(self.alive) + len(rows) > MOST:
            with pytest.raises(BatchError, match="let others leave first"):
                self.step.join(batch, keys)
            return
        self.step.join(batch, keys)
        self.alive |= {*keys}
        self.counted -= {*keys}
        self.gone = {key: lands for key, lands in self.gone.items() if key not in self.alive}
        self.note(lambda model: model.update((key, copy.deepcopy(row)) for key, row in zip(keys, rows, strict=True)))

    @rule(data=st.data(), lists=st.booleans())
    def edit(self, data: st.DataObject, lists: bool) -> None:
        assert self.step is not None
        keys = data.draw(st.lists(st.sampled_from(sorted(self.alive)), unique=True, min_size=1))
        rows = data.draw(st.lists(rows_of_requests, min_size=len(keys), max_size=len(keys)))
        names = data.draw(st.lists(st.sampled_from(sorted(PADS)), unique=True, min_size=1, max_size=3))
        brought = batch_of(rows, self.runner.backend.device, lists=lists)
        self.step.edit(keys, **{name: brought[name] for name in names})

        def change(model: dict[Hashable, Row]) -> None:
            for key, row in zip(keys, rows, strict=True):
                if key in model:
                    model[key].update({name: copy.deepcopy(row[name]) for name in names})
                    if "table" in names:
                        model[key].pop("known", None)

        self.note(change)

    @rule(data=st.data(), times=st.integers(1, 3))
    def append(self, data: st.DataObject, times: int) -> None:
        """Values behind those of some rows, several times for one step; nothing where a row is full."""
        assert self.step is not None
        for _ in range(times):
            keys = data.draw(st.lists(st.sampled_from(sorted(self.alive)), unique=True))
            values = st.lists(st.lists(st.integers(-5, 99), max_size=2), min_size=len(keys), max_size=len(keys))
            added = data.draw(values)
            before = {key: len(row.get("known") or row["table"]) for key, row in self.next_rows().items()}
            full = next((key for key, more in zip(keys, added, strict=True) if before[key] + len(more) > WIDE), None)
            if full is not None:
                says = rf"'table': the row of request {full} has {before[full]} values and gets .* room for {WIDE}"
                with pytest.raises(BatchError, match=says):
                    self.step.append(keys, table=added)
                continue
            self.step.append(keys, table=added)
            self.note(functools.partial(append_to, dict(zip(keys, added, strict=True))))

    def next_rows(self) -> dict[Hashable, Row]:
        """What each live request has in the next step that is launched, with all that was said so far."""
        assert self.step is not None
        model: dict[Hashable, Row] = copy.deepcopy(self.model)
        for row in model.values():
            plain_rules(row)
        for act in self.news.get(self.step.lands, ()):
            act(model)
        return {key: model[key] for key in self.alive}

    @rule(rows=st.lists(rows_of_requests, min_size=1, max_size=3))
    def refused(self, rows: list[Row]) -> None:
        """Nothing of a refused edit stays: the steps that follow are as without it."""
        assert self.step is not None
        batch = batch_of(rows, self.runner.backend.device, lists=False)
        key = min(self.alive)
        wrong: list[Callable[[LaunchedStep], object]] = [
            lambda step: step.leave([key, "nobody"]),
            lambda step: step.join(batch, [key, *range(-len(rows), -1)]),
            lambda step: step.join({**batch, "lens": batch["lens"].double()}, range(-len(rows), 0)),
            lambda step: step.edit([key], pages=[[1]]),
            lambda step: step.edit([key], nothing=[1]),
            lambda step: step.edit([key, key], lens=[1, 2]),
            lambda step: step.append([key, "nobody"], table=[[], []]),
            lambda step: step.append([key], table=[[1] * (WIDE + 1)]),
            lambda step: step.append([key], table=[[1.5]]),
            lambda step: step.append([key], table=[[True]]),
            lambda step: step.append([key], table=[[1 << 31]]),
            lambda step: step.append([key], table=[1]),
            lambda step: step.append([key], table=[[1], [2]]),
            lambda step: step.append([key], pages=[[1]]),
        ]
        for one in wrong:
            with pytest.raises(BatchError):
                one(self.step)

    @rule()
    def hold(self) -> None:
        assert self.step is not None
        self.step.hold("a test")
        self.proceed(1)

    @rule(data=st.data(), where=st.sampled_from(["write", "send", "replay", "step"]))
    def break_off(self, data: st.DataObject, where: str) -> None:
        """A step that breaks off in the middle ends the loop; the runner takes the next one."""
        assert self.step is not None
        lands = self.step.lands
        while self.step.lands == lands:  # so that the next edit is the only one; a held loop launches later
            self.proceed(1)
        keys, chain = sorted(self.alive), self.step._loop._chain
        self.step.edit([keys[0]], lens=[9])
        with (
            broken(chain, where) as is_there,
            pytest.raises(Exception, match="was to") if is_there else (contextlib.nullcontext()),
        ):
            for _ in range((self.ahead + 2) * self.chunk):
                next(self.steps)
        self.start(data.draw(st.lists(rows_of_requests, min_size=1, max_size=6)))


def append_to(added: dict[Hashable, list[int]], model: dict[Hashable, Row]) -> None:
    """What an append does to the model."""
    for key, values in added.items():
        if key in model and values:
            row = model[key]
            row["table"] = row.pop("known", row["table"]) + values


@contextlib.contextmanager
def broken(chain: Any, where: str) -> Iterator[bool]:
    """Have the next step raise at some place; whether there is such a place."""

    def breaks(*_: Any) -> None:
        raise Broken("it was to break off")

    if where == "step":  # a replay of a true graph runs no Python
        SHOULD_RAISE[0] = not chain._captured.graph.is_recorded
        try:
            yield SHOULD_RAISE[0]
        finally:
            SHOULD_RAISE[0] = False
        return
    chunk = chain.chunk_sizes[-1]
    replayed = (chain, "_replay") if chunk == 1 else (chain._captured.chunks[chunk], "replay")
    place, name = {"write": (chain._edits, "write"), "send": (chain._edits, "send"), "replay": replayed}[where]
    is_there = where == "replay" or (where == "write") == (chain._edit_graph is None)
    if chain._by_calls or not is_there:
        yield False
        return
    with mock.patch.object(place, name, breaks):
        yield True


def play(ways: Sequence[Way], examples: int, count: int) -> None:
    """Run the machine over some backends and lowerings."""
    machine = type("StepsOnSome", (Steps,), {"ways": ways})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=count,
            deadline=None,
            phases=[Phase.generate, Phase.explicit, *([Phase.shrink] if THOROUGH else [])],
            suppress_health_check=HEALTH,
        ),
    )


WAYS: Final[Sequence[Way]] = (
    ("cpu", None),
    ("cpu-capture", None),
    ("cpu-capture", "in_graph"),
    ("cpu", "fused"),
    (NAME, "foreach"),
    ("cpu", None, "own"),
    ("cpu", "fused", "in the graph"),
    ("cpu-capture", None, "own"),
    ("cpu-capture", None, "in the graph"),
    ("cpu-capture", "in_graph", "own"),
    ("cpu-capture", "in_graph", "in the graph"),
    (NAME, "foreach", "own"),
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(filter(None, way)))
def test_steps_are_right_in_any_order_of_news(way: Way) -> None:
    """Requests that leave, join and change, refused edits, broken steps, other buckets: all as in plain Python."""
    play([way], examples=4 if len(way) == 2 else 2, count=25)


@pytest.mark.slow
def test_ten_thousand_steps_are_right() -> None:
    """The same for 10,000 steps."""
    begun = Steps.taken
    while Steps.taken - begun < 10_000:
        play(WAYS, examples=40, count=50)


@pytest.mark.cuda
@pytest.mark.parametrize("own", ["", "own", "in the graph"])
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_steps_are_right_in_any_order_of_news_on_cuda(lowering: str, own: str) -> None:
    """The same by the compiled kernel, and by torch's own operators."""
    play([("cuda", lowering, own)], examples=25, count=40)
