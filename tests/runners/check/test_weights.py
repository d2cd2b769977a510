"""What a graph keeps of a weight, and what a step changes or draws, is found by name and line, and put back."""

import contextlib
import functools
import random
import re
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import slotgraph
from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    BreakableRunner,
    Inputs,
    computed,
    copied,
    errors,
    graph_break,
    keep,
    output,
)
from slotgraph.backends import choose
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.extend import once
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.check.trial import Finding
from tests.runners.models import bytes_of, decoder, ready
from tests.strategies import DTYPES, numbers

WORDS, WIDE, PLACES = 8, 4, 40
CAPTURES = "cpu-capture"


class Rows(Inputs):
    x: torch.Tensor = copied(BATCH, WIDE, dtype=torch.float32, pad=0)
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=WORDS - 1)
    places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)


class Tokens(Inputs):  # the same for a stack with a break
    x: torch.Tensor = copied(TOKENS, WIDE, dtype=torch.float32, pad=0)
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, limit=WORDS - 1)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

    @classmethod
    def placeholder(cls, step: Any) -> Any:
        return {"lens": [step.live(TOKENS)]}


@graph_break
def passed_on(x: torch.Tensor) -> torch.Tensor:
    """A break that changes nothing."""
    return x * 1


class Model(nn.Module):
    """A layer, a table, a cache, and what a fault needs. `fault` is called with the model and the layer's rows."""

    def __init__(self, fault: Callable[["Model", torch.Tensor], torch.Tensor], *, broken: bool = False) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE, generator=draw), requires_grad=False)
        self.table = nn.Parameter(torch.randn(WORDS, WIDE, generator=draw), requires_grad=False)
        self.register_buffer("count", torch.rand((), generator=draw) + 1)
        self.register_buffer("mean", torch.randn(WIDE, generator=draw))
        self.register_buffer("cache", torch.randn(PLACES, WIDE, generator=draw))
        self.extra = torch.randn(3, generator=draw).half()
        self.drop = nn.Dropout(0.5)
        self.array = self.weight.numpy()
        self.fault, self.broken = fault, broken
        self.scale: Any = None

    def forward(self, x: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = (passed_on(x) if self.broken else x) @ self.weight + self.table[ids]
        self.get_buffer("cache")[places] = rows
        return self.fault(self, rows + self.get_buffer("cache")[places] * self.extra.sum())


class Around(nn.Module):  # a step around the model
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, view: Any) -> torch.Tensor:
        rows: torch.Tensor = self.model(view.x, view.ids, view.places)
        return rows


def captured(fault: Any, kind: str = "decode", backend: Any = CAPTURES, **options: Any) -> Any:
    """A captured runner of a model with a fault."""
    step = Around(Model(fault, broken=kind == "breakable"))
    device = choose(backend).device
    step.model.array = step.model.weight.numpy()
    step = step.to(device)
    if kind == "decode":
        return decoder(Rows, step, backend=backend, **{"buckets": [2, 4], **options})
    given = {"stack": "model", "buckets": [4, 8], "max_batch": 3, "output_rows": TOKENS, **options}
    return ready(BreakableRunner(Tokens, step, backend=backend, progress=False, **given))


def model_of(runner: Any) -> Model:
    """The model of such a runner."""
    model = runner.stage.step.model
    assert isinstance(model, Model)
    return model


def batch(rows: int, draw: torch.Generator, kind: str = "decode", device: Any = "cpu") -> dict[str, torch.Tensor]:
    """A random batch of it."""
    made = {
        "x": torch.randn(rows, WIDE, generator=draw),
        "ids": torch.randint(0, WORDS, (rows,), generator=draw),
        "places": torch.randperm(PLACES - 1, generator=draw)[:rows] + 1,
    }
    if kind == "breakable":
        made["lens"] = torch.tensor([rows])
    return {name: one.to(device) for name, one in made.items()}


def report_of(runner: Any, kind: str = "decode", **options: Any) -> CheckReport:
    """What all checks say."""
    device = runner.stage.backend.device
    make = functools.partial(batch, kind=kind, device=device)
    outside = ["lens"] if kind == "breakable" else []
    return slotgraph.check(runner, make, progress=False, read_outside=outside, **options)


def found_in(fault: Any, kind: str = "decode", backend: Any = CAPTURES, **options: Any) -> list[Finding]:
    """What is found."""
    return list(report_of(captured(fault, kind, backend), kind, **options).findings)


def by_thread(compute: Callable[[], Any]) -> Any:
    """What a function gives on another thread, whose operators no capture records."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(compute()))
    thread.start()
    thread.join()
    return made[0]


def sampled(model: Model, rows: torch.Tensor) -> torch.Tensor:
    """Gumbel noise, as a sampler adds it."""
    del model
    return rows - torch.empty_like(rows).exponential_().log()


DRAWN: dict[str, Callable[[Model, torch.Tensor], torch.Tensor]] = {
    "aten::bernoulli_": lambda model, rows: model.drop(rows),
    "aten::rand_like": lambda _, rows: rows * (torch.rand_like(rows) > 0.4),
    "aten::exponential_": sampled,
}


@pytest.mark.parametrize("kind", ["decode", "breakable"])
@pytest.mark.parametrize("operator", DRAWN)
def test_random_numbers(cpu: str, operator: str, kind: str) -> None:
    """A dropout that is still on, a mask, a sampler: one finding, with the operator and its line; none if declared."""
    runner = captured(DRAWN[operator], kind, cpu)
    (found,) = report_of(runner, kind).findings
    assert found.check == "poison"
    assert found.message.startswith("two replays of one batch differ: live row ")
    assert f"which {operator} at test_weights.py:" in found.message
    assert "call eval()" in found.message
    assert report_of(runner, kind, random=True).ok
    model_of(runner).eval()  # too late for a graph, and in time for a step that is called again
    assert report_of(runner, kind).ok == (operator == "aten::bernoulli_" and cpu == "cpu")


@pytest.mark.parametrize("seed", range(20))
def test_a_mask_that_may_come_twice(seed: int) -> None:
    """One row of four elements has sixteen masks: some other numbers give another one."""
    torch.manual_seed(seed)
    runner = captured(DRAWN["aten::bernoulli_"], buckets=[1])
    (found,) = report_of(runner, only="poison", rounds=1).findings
    assert "which aten::bernoulli_ at" in found.message


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])  # noqa: NPY002 - as steps do
def test_random_numbers_of_the_host(cpu: str, draw: Callable[[], float]) -> None:
    """Numbers that Python or NumPy draw: a graph keeps one, and a step that is called again gets another each time."""
    (found,) = found_in(lambda _, rows: rows * draw(), backend=cpu)
    if cpu == "cpu":
        assert "with other random numbers, which Python's or NumPy's random draws" in found.message
    else:
        assert "the step draws random numbers on the host, and the graph keeps those of its capture" in found.message


def test_attention_draws_nothing() -> None:
    """Attention is marked by torch as an operator that draws, whatever its dropout: the one that does draw is named."""

    def attended(model: Model, rows: torch.Tensor) -> torch.Tensor:
        one = rows[:, None, None]
        made: torch.Tensor = model.drop(nn.functional.scaled_dot_product_attention(one, one, one)[:, 0, 0])
        return made

    (found,) = found_in(attended)
    assert "which aten::bernoulli_ at" in found.message


def _scaled(model: Model, rows: torch.Tensor) -> torch.Tensor:
    model.weight.mul_(0.99)
    return rows


def _clamped(model: Model, rows: torch.Tensor) -> torch.Tensor:
    model.weight.clamp_(-0.5, 0.5)
    return rows


def _counted(model: Model, rows: torch.Tensor) -> torch.Tensor:
    model.get_buffer("count").add_(1)
    return rows * model.get_buffer("count")


def _averaged(model: Model, rows: torch.Tensor) -> torch.Tensor:
    model.get_buffer("mean").mul_(0.9).add_(0.1)
    return rows


def _plain(model: Model, rows: torch.Tensor) -> torch.Tensor:
    model.extra.mul_(0.75)
    return rows


CHANGED = {
    "parameter 'model.weight'": (_scaled, "aten::mul_", "model.weight.mul_(0.99)"),
    "parameter 'model.weight' once": (_clamped, "aten::clamp_", "model.weight.clamp_(-0.5, 0.5)"),
    "buffer 'model.count'": (_counted, "aten::add_", 'model.get_buffer("count").add_(1)'),
    "buffer 'model.mean'": (_averaged, "aten::mul_", 'model.get_buffer("mean").mul_(0.9).add_(0.1)'),
    "tensor 'model.extra'": (_plain, "aten::mul_", "model.extra.mul_(0.75)"),
}


@pytest.mark.parametrize("kind", ["decode", "breakable"])
@pytest.mark.parametrize("what", CHANGED)
def test_weights_that_a_step_changes(cpu: str, what: str, kind: str) -> None:
    """Named, with the operator and its line, and put back; the cache that it writes is no fault."""
    fault, operator, line = CHANGED[what]
    runner = captured(fault, kind, cpu)
    before = {name: bytes_of(one) for name, one in model_of(runner).state_dict().items()}
    (found,) = report_of(runner, kind).findings
    assert found.check == "weights"
    assert found.message.startswith(
        f"the step changes {what.removesuffix(' once')} itself ({operator} at test_weights."
    )
    assert f", `{line}`)" in found.message
    assert "declare it: state=[...]" in found.message
    assert {name: bytes_of(one) for name, one in model_of(runner).state_dict().items()} == before


def test_a_declared_change_is_none(cpu: str) -> None:
    """What is named as state may change."""
    runner = captured(_counted, backend=cpu)
    model = model_of(runner)
    assert report_of(runner, state=[model.get_buffer("count"), model.get_buffer("cache")]).ok


def _by_array(model: Model, rows: torch.Tensor) -> torch.Tensor:
    return torch.mul(rows, float(model.array.sum()))


def _by_thread(model: Model, rows: torch.Tensor) -> torch.Tensor:
    return torch.mul(rows, by_thread(lambda: float(model.weight.sum())))


def _tensor_by_thread(model: Model, rows: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = by_thread(lambda: model.weight.softmax(0))
    return rows @ made


def _by_dlpack(model: Model, rows: torch.Tensor) -> torch.Tensor:
    return rows * float(np.from_dlpack(model.weight)[0, 0])


FROZEN = (_by_array, _by_thread, _tensor_by_thread, _by_dlpack)


@pytest.mark.parametrize("kind", ["decode", "breakable"])
@pytest.mark.parametrize("fault", FROZEN)
def test_what_a_graph_keeps_of_a_weight(cpu: str, fault: Any, kind: str) -> None:
    """A number, or a tensor, made of a weight beside the graph's operators: the weight is named, and is put back."""
    runner = captured(fault, kind, cpu)
    before = {name: bytes_of(one) for name, one in model_of(runner).state_dict().items()}
    findings = report_of(runner, kind).findings
    assert {name: bytes_of(one) for name, one in model_of(runner).state_dict().items()} == before
    if cpu == "cpu":  # which calls the step again
        assert findings == ()
        return
    (found,) = findings
    assert found.check == "weights"
    assert (
        "after a change of parameter 'model.weight': the graph goes on with what the step made of it" in found.message
    )


def _number_once(model: Model, rows: torch.Tensor) -> torch.Tensor:
    if model.scale is None:
        model.scale = float(model.weight.sum())
    return torch.mul(rows, model.scale)


def _tensor_once(model: Model, rows: torch.Tensor) -> torch.Tensor:
    if model.scale is None:
        model.scale = model.weight.softmax(0).sum(1)
    return torch.mul(rows, model.scale)


@pytest.mark.parametrize(("fault", "operator"), [(_number_once, "aten::sum"), (_tensor_once, "aten::_softmax")])
def test_what_only_the_first_run_makes_of_a_weight(fault: Any, operator: str) -> None:
    """It is kept by the step itself, so that no run of it sees a change of the weight either."""
    (found,) = found_in(fault)
    assert found.message.startswith(
        f"parameter 'model.weight' was taken by {operator} in the first run of the step alone"
    )


class _Interrupted(BaseException):
    """As an interrupt is."""


@pytest.mark.parametrize("error", [RuntimeError, _Interrupted])
@pytest.mark.parametrize("at", range(2, 60, 5))
def test_all_is_as_it_was(cpu: str, error: type[BaseException], at: int) -> None:
    """Whatever the step raises, in whichever of its runs: weights, caches, slots of state, and random numbers."""
    runs = [-1000]

    def failing(model: Model, rows: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        if runs[0] == at:
            raise error("in the middle of it")
        return _counted(model, rows) if at % 2 else rows

    runner = captured(failing, "breakable", cpu, buckets=[4])  # of which the break runs in each replay, too
    model = model_of(runner)
    before = {name: bytes_of(one) for name, one in {**model.state_dict(), "extra": model.extra}.items()}
    random_before = bytes_of(torch.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002 - as steps draw
    runs[0] = 0
    with contextlib.suppress(error, errors.SlotGraphError):
        report_of(runner, "breakable", only=("poison", "parity", "weights"), rounds=1)
    runs[0] = 1000
    assert {name: bytes_of(one) for name, one in {**model.state_dict(), "extra": model.extra}.items()} == before
    assert (bytes_of(torch.get_rng_state()), random.getstate()) == random_before[:2]
    assert np.random.get_state()[1].tolist() == random_before[2]  # type: ignore[index]  # noqa: NPY002 - as above
    given = batch(3, torch.Generator().manual_seed(1), "breakable")
    again = captured(lambda _, rows: rows, "breakable", cpu, buckets=[4])
    if not at % 2:
        assert torch.equal(runner(given), again(given))


@pytest.mark.parametrize("free", [100, 130, 700, 1 << 20])
def test_little_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """What no copy of fits together is changed part by part, and what fits in no part is noted."""
    runner = captured(_by_array)
    monkeypatch.setattr("slotgraph.runners.engine.state._free_on", lambda *_: free)
    report = slotgraph.check(runner, batch, only="weights", state=[], progress=False)
    note = "parameter 'model.weight' was not changed: there is no room for a copy"
    assert (report.ok, note in report.notes) == ((True, True) if free == 100 else (False, False))  # of its 64 bytes


def test_memory_of_others(tmp_path: Path) -> None:
    """Weights that lie in a file, or that other processes share, are left alone, and noted."""
    np.save(tmp_path / "table.npy", np.random.default_rng(1).random((WORDS, WIDE), dtype=np.float32))
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    with pytest.warns(UserWarning, match="not writable"):
        table = torch.from_numpy(mapped)
    shared = torch.rand(WIDE).share_memory_()
    report = report_of(captured(lambda _, rows: rows + table[0] * shared))
    assert report.ok
    assert re.search(r"2 of \d+ tensors that the step holds, such as .*, were not changed", str(report.notes))


def test_casts_are_not_kept() -> None:
    """Within torch.autocast, which keeps casts of weights, the changed ones leave none behind."""
    layer = nn.Linear(WIDE, WIDE)
    runner = captured(lambda _, rows: layer(rows).float())
    given = batch(3, torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(given["x"])
        assert report_of(captured(lambda _, rows: layer(rows).float())).ok
        assert torch.equal(layer(given["x"]), before)
    assert report_of(runner).ok


def test_random_numbers_go_on_where_they_were(cpu: str) -> None:
    """After a check the next numbers are those that would have come without it."""
    runner = captured(DRAWN["aten::rand_like"], backend=cpu)
    torch.manual_seed(3)
    expected = torch.rand(3), random.random()
    torch.manual_seed(3)
    state = random.getstate()
    report_of(runner)
    assert random.getstate() == state
    assert torch.equal(torch.rand(3), expected[0])


class Drawn(nn.Module):
    """A random step of rows that are each their own affair, over the weights and the state that engines have."""

    def __init__(self, program: list[str], seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.program = program
        self.layer = nn.Linear(WIDE, WIDE)
        self.table = nn.Embedding(WORDS, WIDE)
        self.norm = nn.BatchNorm1d(WIDE)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("keys", torch.randn(PLACES, WIDE, generator=draw))
        self.states = {"hidden": torch.randn(PLACES, WIDE, generator=draw)}
        self.seen = torch.zeros(1)  # which nothing reads
        self.tied = self.table.weight
        self.scale = [torch.randn(1, generator=draw).bfloat16().expand(WIDE)]
        self.small = torch.randn(WIDE, generator=draw).to(torch.float8_e4m3fn)
        self.fused = torch.randn(2 * WIDE, WIDE, generator=draw)
        self.parts = torch.split(self.fused, WIDE)
        self.ready = torch.randn(WIDE, generator=draw).sum().item()  # made before any capture
        self.eval()

    def forward(self, view: Any) -> torch.Tensor:
        rows = view.x.clone()
        for name in self.program:
            rows = OPERATIONS[name](self, rows, view)
        for name in [one for one in vars(view) if one.startswith("other_")]:
            rows = rows + getattr(view, name).double().reshape(len(rows), -1).sum(1, keepdim=True).float()
        view.made.copy_(rows)
        return torch.mul(rows, 2)

    def cached(self, rows: torch.Tensor, view: Any) -> torch.Tensor:
        self.get_buffer("keys")[view.places] = rows
        return rows + self.get_buffer("keys")[view.places] / 2

    def recurred(self, rows: torch.Tensor, view: Any) -> torch.Tensor:
        hidden = self.states["hidden"]
        hidden[view.places] = hidden[view.places] * 0.9 + rows
        return hidden[view.places]

    def counted(self, rows: torch.Tensor, view: Any) -> torch.Tensor:
        self.seen.add_(view.live.float())
        return rows


Operation = Callable[[Drawn, torch.Tensor, Any], torch.Tensor]
OPERATIONS: dict[str, Operation] = {
    "layer": lambda step, rows, _: torch.tanh(step.drop(step.norm(step.layer(rows)))),
    "table": lambda step, rows, view: rows + step.table(view.ids),
    "scale": lambda step, rows, view: rows * view.weights[:, None] * step.ready,
    "cache": Drawn.cached,
    "recurrent": Drawn.recurred,
    "statistic": Drawn.counted,
    "tied": lambda step, rows, _: rows + torch.tanh(rows @ step.tied.T) @ step.tied,
    "expanded": lambda step, rows, _: rows + step.scale[0] + step.small.float(),
    "parts": lambda step, rows, _: rows @ step.parts[0] + rows @ step.parts[1],
    "flags": lambda _, rows, view: torch.where(view.flags[:, None], rows, -rows),
}


def read_by_steps(tails: Sequence[Any] = (0, 1, 0), placement: Any = "device") -> type[Inputs]:
    """A declaration of what such a step reads. tails: Those of x, weights and count."""

    class Read(Inputs):
        x: torch.Tensor = copied(BATCH, WIDE, dtype=torch.float32, pad=tails[0])
        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, limit=WORDS - 1)
        places: torch.Tensor = copied(BATCH, dtype=CACHE_LOC, pad=0)
        weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=tails[1])
        flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=False)
        count: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=tails[2], placement=placement)
        live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
        twice: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
        made: torch.Tensor = output(BATCH, WIDE, dtype=torch.float32)

    return Read


@st.composite
def drawn_inputs(draw: st.DrawFn) -> type[Inputs]:
    """What such a step reads, and slots of any dtype, width, tail and placement beside it."""
    rules: Any = ([0, 1.5, keep("rows apart"), once(2)], [1, 0], [0, keep("not read")])
    tails = [draw(st.sampled_from(each)) for each in rules]
    read = read_by_steps(tails, draw(st.sampled_from(["device", "host"])))
    others: dict[str, Any] = {}
    for index in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        value = draw(numbers(dtype))
        pad = draw(st.sampled_from([value, once(value), keep("rows apart")]))
        others[f"other_{index}"] = copied(BATCH, *draw(st.sampled_from([(), (3,)])), dtype=dtype, pad=pad)
    body = {"__annotations__": dict.fromkeys(others, torch.Tensor), **others}
    return types.new_class("Wider", (read,), {}, lambda namespace: namespace.update(body))


OUTSIDE = ("ids", "places", "weights", "flags", "count", "live", "twice")
FAULTS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "dropout": (lambda step, rows: step.drop.train()(rows), "two replays of one batch differ"),
    "change": (lambda step, rows: rows + 0 * step.layer.bias.add_(1), "the step changes parameter 'step.layer.bias'"),
    "number": (
        lambda step, rows: rows * by_thread(lambda: float(step.layer.weight.detach().sum())),
        "after a change of parameter 'step.layer.weight'",
    ),
}


def found_in_any(data: st.DataObject, fault: str) -> None:
    """Check a random step over a random declaration: nothing is found but the fault, and all weights are as before."""
    inputs, seed = data.draw(drawn_inputs()), data.draw(st.integers(0, 99))
    program = data.draw(st.lists(st.sampled_from([*OPERATIONS]), max_size=5))
    sizes = data.draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))
    torch.manual_seed(seed)
    step = Drawn(program, seed)

    def run(view: Any) -> torch.Tensor:
        rows = step(view)
        return FAULTS[fault][0](step, rows) if fault else rows

    before = {name: bytes_of(one) for name, one in step.state_dict().items()}
    runner = decoder(inputs, run, backend=CAPTURES, buckets=sorted(sizes), lowering=data.draw(st.sampled_from(LADDER)))
    report = slotgraph.check(runner, progress=False, rounds=1, seed=seed, read_outside=OUTSIDE)
    assert {name: bytes_of(one) for name, one in step.state_dict().items()} == before
    assert [FAULTS[fault][1] in one.message for one in report.findings] == [True] * bool(fault), str(report)


@settings(max_examples=settings().max_examples // 4)
@given(data=st.data())
def test_no_innocent_is_blamed(data: st.DataObject) -> None:
    """Nothing is found in any correct step of a correct declaration."""
    found_in_any(data, "")


def test_few_rows_that_draw_one_mask_twice_are_known_to_draw() -> None:
    """Parity does not blame padding for it: without padding the step draws other numbers."""
    torch.manual_seed(7)
    step = Drawn(["layer"], 7)
    faulty = FAULTS["dropout"][0]
    runner = decoder(read_by_steps(), lambda view: faulty(step, step(view)), backend=CAPTURES, buckets=[4])
    report = slotgraph.check(runner, progress=False, rounds=1, seed=7, read_outside=OUTSIDE)
    assert [one.check for one in report.findings] == ["poison"], str(report)


@settings(max_examples=settings().max_examples // 5)
@given(data=st.data(), fault=st.sampled_from([*FAULTS]))
def test_any_step_with_a_fault(data: st.DataObject, fault: str) -> None:
    """Whatever else a step does, its fault is found, and nothing else."""
    found_in_any(data, fault)
