"""Steps that follow one another in any order of news, beside plain Python: no output and no byte of a slot differs."""

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, Final
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, computed, copied, output
from slotgraph.errors import BatchError
from slotgraph.extend import LaunchedStep
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
Act = Callable[[dict[Hashable, Row]], object]
PADS: Final = {"ids": 0, "positions": -1, "lens": 1, "pages": 7, "done": True, "rope": 3, "bias": -0.5}
SHOULD_RAISE: Final = [False]
ROW: Final[Row] = {
    "ids": 3,
    "positions": 8,
    "lens": 9,
    "pages": [4, 2, 9, 1, 7],
    "done": False,
    "rope": [1, 2, 3],
    "bias": 1.0,
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
    places: torch.Tensor = computed(place, shape=TOKENS, dtype=torch.int64)
    count: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def step(view: AheadInputs) -> torch.Tensor:
    """[BATCH] numbers, each of all slots of its row and of the number of live rows."""
    if SHOULD_RAISE[0]:
        raise RuntimeError("the step was to raise")
    lens = view.lens + view.rope.sum(0) + (view.bias * 4).to(torch.int64)
    made = view.ids * 3 + view.positions + lens + view.places + view.count + view.done * 1000
    view.made.copy_(made % MODULUS)
    return view.made


def plain_step(row: Row, count: int) -> int:
    """The same of one row in plain Python."""
    position = row["positions"]
    stored = row["pages"][position % WIDE] * 4 + position
    lens = row["lens"] + sum(row["rope"]) + int(row["bias"] * 4)
    return int((row["ids"] * 3 + position + lens + stored + count + 1000 * row["done"]) % MODULUS)


def plain_rules(row: Row) -> None:
    """What one row holds in the next step."""
    row["done"] = row["done"] or row["made"] % 5 == 0
    row["bias"] += 0.0 if row["done"] else 0.25
    row["ids"], row["positions"], row["lens"] = row["made"], row["positions"] + 1, row["lens"] + 1
    row["rope"] = [one + 2 for one in row["rope"]]


@functools.cache
def runner_on(backend: str, lowering: str | None, done: str | None = None) -> DecodeRunner[AheadInputs]:
    """A captured runner, of which each example begins steps anew. done: the slot that ends requests, or None."""
    options: Any = {"backend": backend_of(backend, lowering), "sizes": {PAGES: WIDE}, "output_rows": BATCH}
    options |= {"chunks": CHUNKS, "done": done}
    if lowering is not None:
        options["lowering"] = lowering
    made: DecodeRunner[AheadInputs] = decoder(AheadInputs, step, buckets=BUCKETS, **options)
    return made


rows_of_requests = st.builds(
    lambda numbers, pages, done: {
        "ids": numbers[0] % 1000,
        "positions": numbers[1] % 50,
        "lens": 1 + numbers[2] % 60,
        "pages": pages,
        "done": done,
        "rope": [numbers[3] % 9, numbers[4] % 9, numbers[5] % 9],
        "bias": float(numbers[6] % 5),
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
        tensor = torch.tensor([row[name] for row in rows], dtype=dtype)
        if name == "rope":
            tensor = tensor.view(-1, 3).t().contiguous()
        elif name == "pages":
            tensor = tensor.view(-1, WIDE)
        found[name] = [row[name] for row in rows] if lists and name in {"positions", "lens"} else tensor.to(device)
    return found


class Broken(Exception):  # noqa: N818 - as an interrupt
    """What breaks a step off."""


class Steps(RuleBasedStateMachine):
    """A loop of steps, and the same requests in plain Python. taken: steps of all examples so far."""

    ways: ClassVar[Sequence[tuple[str, str | None]]] = ()
    taken: ClassVar[int] = 0

    @initialize(
        data=st.data(),
        ahead=st.sampled_from([0, 1, 4]),
        chunk=st.sampled_from([1, *CHUNKS]),
        done=st.sampled_from([None, "done"]),
    )
    def begin(self, data: st.DataObject, ahead: int, chunk: int, done: str | None) -> None:
        way = data.draw(st.sampled_from(self.ways))
        self.runner, self.ahead, self.next_key = runner_on(*way, done), ahead, 0
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
        device = self.runner.stage.backend.device
        batch = batch_of(rows, device, lists=len(rows) % 2 == 0)
        self.steps = self.runner.steps(batch, keys=keys, ahead=self.ahead, needs=["lens"], chunk=self.chunk)
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
                self.model[key] |= {name: PADS[name] for name in PADS}
                self.model[key] |= {"pages": [PADS["pages"]] * WIDE, "rope": [PADS["rope"]] * 3}
            for row in self.model.values():
                row["made"] = plain_step(row, len(self.model))
            self.history.append({key: row["made"] for key, row in self.model.items()})
        want = self.history[step.number]
        assert dict(zip(step.keys, step.outputs.tolist(), strict=True)) == want
        counting = (self.alive | self.counted) - self.done[step.number]
        assert dict(step.tokens()) == {key: one for key, one in want.items() if key in counting}
        chunk = step._loop._chain.chunk
        if self.ahead == 0 and step.lands not in self.news and not self.ends:
            assert step.needs("lens") == {key: self.model[key]["lens"] + chunk for key in self.alive}
        chain: Chain[Any] = step._loop._chain
        keys, bucket = chain._keys, self.runner.buckets.fit(len(chain._keys))
        assert bucket is not None
        live = batch_of([self.model[key] for key in keys], torch.device("cpu"), lists=False)
        for name, pad in PADS.items():
            whole = self.runner.graphs.buffers[name].tensor.cpu()
            dim = 1 if name == "rope" else 0
            assert torch.equal(whole.narrow(dim, 0, len(keys)), live[name]), name
            tail = whole.narrow(dim, len(keys), bucket - len(keys))
            assert torch.equal(tail, torch.full_like(tail, pad)), name

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
        batch = batch_of(rows, self.runner.stage.backend.device, lists=lists)
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
        brought = batch_of(rows, self.runner.stage.backend.device, lists=lists)
        self.step.edit(keys, **{name: brought[name] for name in names})

        def change(model: dict[Hashable, Row]) -> None:
            for key, row in zip(keys, rows, strict=True):
                if key in model:
                    model[key].update({name: copy.deepcopy(row[name]) for name in names})

        self.note(change)

    @rule(rows=st.lists(rows_of_requests, min_size=1, max_size=3))
    def refused(self, rows: list[Row]) -> None:
        """Nothing of a refused edit stays: the steps that follow are as without it."""
        assert self.step is not None
        batch = batch_of(rows, self.runner.stage.backend.device, lists=False)
        key = min(self.alive)
        wrong: list[Callable[[LaunchedStep], object]] = [
            lambda step: step.leave([key, "nobody"]),
            lambda step: step.join(batch, [key, *range(-len(rows), -1)]),
            lambda step: step.join({**batch, "lens": batch["lens"].double()}, range(-len(rows), 0)),
            lambda step: step.edit([key], pages=[[1]]),
            lambda step: step.edit([key], nothing=[1]),
            lambda step: step.edit([key, key], lens=[1, 2]),
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
        self.proceed(self.chunk)  # with all news before
        assert self.step is not None
        keys, chain = sorted(self.alive), self.step._loop._chain
        self.step.edit([keys[0]], lens=[9])
        with (
            broken(chain, where) as is_there,
            pytest.raises(Exception, match="was to") if is_there else (contextlib.nullcontext()),
        ):
            for _ in range((self.ahead + 2) * self.chunk):
                next(self.steps)
        self.start(data.draw(st.lists(rows_of_requests, min_size=1, max_size=6)))


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
    replayed = (chain, "_replay") if chain.chunk == 1 else (chain._captured.chunks[chain.chunk], "replay")
    place, name = {"write": (chain._edits, "write"), "send": (chain._edits, "send"), "replay": replayed}[where]
    is_there = where == "replay" or (where == "write") == (chain._edit_graph is None)
    if chain._by_calls or not is_there:
        yield False
        return
    with mock.patch.object(place, name, breaks):
        yield True


def play(ways: Sequence[tuple[str, str | None]], examples: int, count: int) -> None:
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


WAYS: Final = (("cpu", None), ("cpu-capture", None), ("cpu-capture", "in_graph"), ("cpu", "fused"), (NAME, "foreach"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(filter(None, way)))
def test_steps_are_right_in_any_order_of_news(way: tuple[str, str | None]) -> None:
    """Requests that leave, join and change, refused edits, broken steps, other buckets: all as in plain Python."""
    play([way], examples=4, count=25)


@pytest.mark.slow
def test_ten_thousand_steps_are_right() -> None:
    """The same for 10,000 steps."""
    begun = Steps.taken
    while Steps.taken - begun < 10_000:
        play(WAYS, examples=40, count=50)


@pytest.mark.cuda
@pytest.mark.parametrize("lowering", ["in_graph", "foreach"])
def test_steps_are_right_in_any_order_of_news_on_cuda(lowering: str) -> None:
    """The same by the compiled kernel, and by torch's own operators."""
    play([("cuda", lowering)], examples=25, count=40)
