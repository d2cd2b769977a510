"""What torch does around runners: the compiler, autocast, and default devices and dtypes change no step."""

import itertools
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils import _pytree as pytree

from slotgraph import BATCH, EagerRunner, Inputs, computed, constant, copied
from slotgraph.backends import choose, load
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import ComputeError
from slotgraph.extend import HOST
from tests.runners import prefilled
from tests.runners.kinds import EVERY_KIND, anew
from tests.runners.models import PlainInputs, decoder, plain_runner, plain_step, random_batch
from tests.strategies import declaration_of, draw

BATCHES = [(rows, seed) for seed, rows in enumerate((3, 8, 3, 9, 4))]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing is left of what other tests compiled, nor of this one's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the compiler's own modules, when they are imported
        torch.compiler.reset()
    yield
    torch.compiler.reset()


def called(runner: Any, batch: Any) -> Any:
    """A step between other operators."""
    return runner({name: torch.relu(one) + one if name == "weights" else one for name, one in batch.items()}) * 2


def decided(runner: Any, batch: Any) -> Any:
    """What else a runner is asked."""
    decision, stats = runner.decide(batch), runner.stats()
    return batch["ids"] * 2 + (decision.bucket or 0) * int(bool(stats))


@pytest.mark.parametrize(("lowering", "lazy"), [*zip(LADDER, itertools.cycle((False, True)), strict=False)])
def test_steps_under_torch_compile_are_right(lowering: str, *, lazy: bool) -> None:
    """Captured, eager and late captured steps, by every use, give what they give without the compiler."""
    options: dict[str, Any] = {"backend": "cpu-capture", "lowering": lowering, "lazy": lazy}
    one, other = (plain_runner(**options) for _ in range(2))
    for use in (called, lambda runner, batch: runner.replay(runner.fill(batch)) * 2, decided):
        compiled: Any = torch.compile(use, backend="eager")
        for rows, seed in BATCHES:
            batch = random_batch(rows, seed)
            assert torch.equal(compiled(one, batch), use(other, batch))


@pytest.mark.parametrize(("kind", "inside"), [*zip(prefilled.KINDS, (False, True), strict=True)])
def test_other_runners_are_right_under_torch_compile(kind: str, *, inside: bool) -> None:
    """Eager runners and those of a stack, also in inference mode, and a capture inside of a compiled function."""
    compiled = torch.compile(called, backend="eager")
    with torch.inference_mode(mode=inside):
        eager = EagerRunner(PlainInputs, plain_step, backend="cpu")
        for rows, seed in BATCHES[:3]:
            batch = random_batch(rows, seed)
            assert torch.equal(compiled(eager, batch), called(eager, batch))
        models = [prefilled.Model(named=kind == "piecewise") for _ in range(2)]
        one, other = (prefilled.runner_of(kind, model, "cpu-capture") for model in models)
        torch.compile(lambda runner: runner.capture(), backend="eager")(one)
        other.capture()
        for lengths in ([2, 1], [5, 4], [1]):
            batch = prefilled.batch_of(lengths, sum(lengths))
            assert torch.equal(compiled(one, batch), called(other, batch))


def test_a_compiled_step_stays_compiled() -> None:
    """A runner inside of a compiled function runs a compiled step as ever; one graph cannot hold a runner."""
    counting = CompileCounter()
    step = torch.compile(lambda view: view.ids + view.places, backend=counting)
    runner, batch = EagerRunner(PlainInputs, step, backend="cpu"), random_batch(3, 1)
    compiled = torch.compile(called, backend="eager")
    assert torch.equal(compiled(runner, batch), (batch["ids"] + batch["places"]) * 2)
    assert counting.frame_count
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(lambda: runner(batch), backend="eager", fullgraph=True)()


@pytest.mark.parametrize("casts", [False, True])
def test_only_warm_ups_compile(monkeypatch: pytest.MonkeyPatch, *, casts: bool) -> None:
    """Once for each bucket, in the state in which it is captured; steps that run by no graph find the same state."""
    counting, capture, compiled = CompileCounter(), load("cpu").capture, list[int]()

    def counted(*args: Any, **options: Any) -> Any:
        compiled.append(counting.frame_count)
        return capture(*args, **options)

    monkeypatch.setattr(load("cpu"), "capture", counted)
    step = torch.compile(lambda view: view.ids + view.places, backend=counting, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16) if casts else nullcontext():
        runner = decoder(PlainInputs, step, backend="cpu", buckets=[2, 4])
    assert (compiled, counting.frame_count) == ([1, 2], 2)
    if not casts:
        runner(random_batch(3, 1))
        assert counting.frame_count == 2


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
)
CAST = [2, 4, 8]


class Ids(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, converts=(torch.float32,))


@pytest.mark.parametrize("device_backend", ["cpu-capture", CUDA])
@pytest.mark.parametrize("where", ["around", "inside", "both"])
@pytest.mark.parametrize("lazy", [False, True])
def test_graphs_cast_weights_themselves(device_backend: str, where: str, *, lazy: bool) -> None:
    """Each bucket's graph gives what the model gives, in any order, also once autocast has ended and weights change."""
    device = "cuda" if device_backend == "cuda" else "cpu"
    one, two, tanh = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Tanh()  # each of which is used twice
    layers = torch.nn.Sequential(torch.nn.Embedding(32, 16), *[one, tanh, two, tanh] * 2).to(device)

    def model(view: Any) -> Any:
        with nullcontext() if where == "around" else torch.autocast(device, torch.bfloat16):
            return layers(view.ids)

    outer: Any = nullcontext() if where == "inside" else torch.autocast(device, torch.bfloat16)
    with outer:
        model(Ids(ids=torch.arange(3, device=device)))  # as engines do, which fills the cache of casts
        runner = decoder(Ids, model, buckets=CAST, backend=device_backend, lazy=lazy)
        for rows in CAST if lazy else ():
            runner({"ids": draw(0, 31, (rows,), rows).to(device)})
    for turn in range(3):
        with torch.no_grad():
            for weight in layers.parameters():
                weight.mul_(-0.75)
        torch.randn(1 << 16, device=device)  # which takes what was freed
        for rows in (1, 7, 3, 2, 8, 4):
            ids = draw(0, 31, (rows,), 10 * turn + rows).to(device)
            bucket = min(one for one in CAST if one >= rows)
            padded = torch.nn.functional.pad(ids, (0, bucket - rows))
            with torch.no_grad(), outer:
                expected = model(Ids(ids=padded))[:rows]
            assert torch.equal(runner({"ids": ids}), expected)


@contextmanager
def default_device(which: str | None) -> Iterator[None]:
    """None, or meta: by a context, or by `torch.set_default_device`."""
    if which == "process":
        torch.set_default_device("meta")
    try:
        with torch.device("meta") if which == "meta" else nullcontext():
            yield
    finally:
        torch.set_default_device(None)


def _plain(outputs: Any) -> list[Any]:
    parts = attrs.asdict(outputs, recurse=False) if attrs.has(type(outputs)) else outputs
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(parts)]


def on_default(*needs: str, placement: Any = "device") -> type[Inputs]:
    """A declaration with a function that makes its tensor on whatever device is the default."""
    functions = {(): lambda step: torch.arange(3) + step.live(BATCH), ("ids",): lambda ids: torch.arange(ids.shape[0])}
    counts = computed(functions[needs], shape=BATCH if needs else 3, dtype=torch.int64, placement=placement)
    return declaration_of({"ids": copied(BATCH, dtype=torch.int64, pad=0), "counts": counts})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    """A list of floats is float32 wherever its slot's dtype does not say what it is."""
    runner = EagerRunner(Ids, lambda view: view.ids * 3, backend="cpu")
    torch.set_default_dtype(dtype)
    try:
        assert runner({"ids": [5.0, 600.0]}).tolist() == [15, 1800]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_function_obeys_the_callers_default(cpu: str) -> None:
    """A tensor without data is refused by the slot's name, except in a graph, which holds what was captured."""
    batch, backend, of_ids = {"ids": [5, 6]}, choose(cpu), on_default("ids")
    step: Any = lambda view: view.ids + view.counts[: view.ids.shape[0]].sum()
    fixed = declaration_of({"table": constant(lambda _: torch.arange(3), shape=3, dtype=torch.int64)})
    with torch.device("meta"), pytest.raises(ComputeError, match=r"slot 'table'.* meta, .* name the device"):
        EagerRunner(fixed, step, backend="cpu").fill({})  # a constant's function does so, too
    for inputs in (on_default(), on_default(placement=HOST), of_ids):
        runners: list[Any] = [EagerRunner(inputs, step, backend=backend)]
        each: Any = {"buckets": [2], "backend": backend}
        runners += [decoder(inputs, step, lowering=one, **each) for one in backend.capabilities.lowerings]
        for runner in runners:
            right = runner(batch).tolist()
            try:
                with torch.device("meta"):
                    during = runner(batch).tolist()
            except ComputeError as error:
                assert re.search(r"slot 'counts'.* meta, .* name the device", str(error))
            else:
                assert (inputs, during) == (of_ids, right)  # the function is in the graph
            assert runner(batch).tolist() == right


@pytest.mark.parametrize(("kind", "lowering"), EVERY_KIND)
def test_every_runner_is_right_under_a_default_device(backend_name: str, kind: str, lowering: str) -> None:
    """Made, captured and run under a default device, and run on after it has ended, a runner does as without one."""
    if lowering not in ("auto", *load(backend_name)().capabilities.lowerings):
        pytest.skip(f"{backend_name} has no {lowering}")
    is_free = kind not in prefilled.KINDS  # else its model would be made there, too
    right: list[Any] = []
    for made, run in ((None, None), ("meta", "meta"), ("meta", None), (None, "process")):
        with default_device(made if is_free else None):
            one = anew(kind, backend_name, lowering)
        batches = [one.batch(rows) for rows in (2, 1, 3, 20, 2)]
        with default_device(run):
            during = [_plain(one.runner(batch)) for batch in batches]
        right = right or during
        assert during == right, (made, run)
        assert [_plain(one.runner(batch)) for batch in batches] == right, (made, run)
