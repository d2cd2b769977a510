"""A default device, of the caller's or of the process, changes nothing: all memory is where its slot says."""

import contextlib
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.utils import _pytree as pytree

import slotgraph
from slotgraph import BATCH, HOST, DecodeRunner, EagerRunner, Inputs, computed, constant, copied
from slotgraph.backends import Backend
from slotgraph.errors import ComputeError, ConfigError
from slotgraph.runners.recording.files import RecordedFile
from slotgraph.runners.recording.replaying import replay_file
from slotgraph.testing import assert_fill_equals_oracle, assert_padding_independent, assert_parity
from tests.runners import prefilled
from tests.runners.counted import STANDARD, Lowered

DEVICES = ["cpu", "meta", *(["cuda"] if torch.cuda.is_available() else [])]
WAYS = ("construction", "steps", "both", "process")
each_device = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def default_device(device: str, *, process: bool = False) -> Iterator[None]:
    """A default device, by a context or by `torch.set_default_device`."""
    if not process:
        with torch.device(device):
            yield
        return
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def contexts(way: str, device: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a runner is made in, and what its steps run in."""
    made, run = (
        default_device(device, process=way == "process") if way != left_out else contextlib.nullcontext()
        for left_out in ("steps", "construction")
    )
    return made, run


class Rich(Inputs):
    """One slot of each way that a value takes into its buffer."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
    halves: torch.Tensor = copied(BATCH, dtype=torch.float16, pad=2.5)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=-1.0)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True)
    short: torch.Tensor = copied(BATCH, dtype=torch.int32, converts=(torch.int64,), pad=7)
    lens_cpu: torch.Tensor = copied(BATCH, dtype=torch.int32, placement=HOST, pad=1)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.float32, pad=4, default=None)
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
    spread: torch.Tensor = computed(lambda step: [step.live(BATCH), 0.5, 8], shape=3, dtype=torch.float16)
    ends: torch.Tensor = computed(
        lambda step: torch.arange(2, device="cpu") + step.live(BATCH), shape=2, dtype=torch.int64
    )
    total_cpu: torch.Tensor = computed(
        lambda lens_cpu, step: int(lens_cpu[: step.live(BATCH)].sum()), shape=1, dtype=torch.int64, placement=HOST
    )
    doubled: torch.Tensor = computed(lambda ids: ids * 2, shape=BATCH, dtype=torch.int64)
    table: torch.Tensor = constant(lambda _: [0.5, 1.5, 2.5], shape=3, dtype=torch.float16)


SLOTS = tuple(Rich.slotgraph.slots)


def rich_step(view: Rich) -> torch.Tensor:
    """[rows, 2] numbers that depend on every slot on the device."""
    rows, device = view.ids.shape[0], view.ids.device
    made = torch.arange(rows, device=device) + torch.full((rows,), 5, device=device) + torch.eye(rows, device=device)[0]
    one = view.ids + view.short * view.live + view.doubled + view.ends[0] * view.flags + made
    other = view.halves * view.table[1] + view.pairs[:, 1] + view.spread[0]
    return torch.stack([one.double(), other.double() + (0 if view.extra is None else view.extra)], dim=1)


def batches_of(backend: Backend, seed: int) -> list[dict[str, Any]]:
    """Batches of changing sizes and makes of sources: tensors, lists, arrays, with and without the optional slot."""
    draw, found = random.Random(seed), []  # noqa: S311 - no secrets
    for number, rows in enumerate((3, 1, 4, 9, 2, 7, 5)):
        values: dict[str, list[Any]] = {
            "ids": [draw.randrange(1, 99) for _ in range(rows)],
            "halves": [draw.randrange(1, 9) / 4 for _ in range(rows)],
            "pairs": [[draw.randrange(1, 99) / 8, draw.randrange(1, 99) / 8] for _ in range(rows)],
            "flags": [draw.random() < 0.5 for _ in range(rows)],
            "short": [draw.randrange(1, 99) for _ in range(rows)],
            "lens_cpu": [draw.randrange(1, 99) for _ in range(rows)],
        }
        if number % 2:
            values["extra"] = [draw.randrange(1, 99) / 2 for _ in range(rows)]
        found.append(
            {name: _made(name, value, (number + at) % 3, backend) for at, (name, value) in enumerate(values.items())}
        )
    return found


def _made(name: str, value: list[Any], make: int, backend: Backend) -> Any:
    slot = Rich.slotgraph.slots[name]
    dtype = torch.int64 if name == "short" else slot.dtype
    tensor = torch.tensor(value, dtype=dtype, device="cpu")  # type: ignore[arg-type] # no slot here has a role
    if make == 0:
        return tensor.to("cpu" if slot.placement == HOST else backend.device)
    return value if make == 1 and name != "short" else tensor.numpy()


def seen(runner: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a step returns and what its view holds, as plain data."""
    view = runner.fill(batch)
    outputs = runner.replay(view)
    backend = runner.parts.stage.backend
    backend.synchronize()
    held = {name: getattr(view, name) for name in SLOTS}
    return {"outputs": outputs.tolist()} | {name: None if one is None else one.tolist() for name, one in held.items()}


def decode(backend: Backend, lowering: str, **options: Any) -> DecodeRunner[Rich]:
    """A captured runner; batches of 9 are too large for it."""
    given: dict[str, Any] = {"buckets": [2, 4, 8], "absent": [{"extra"}], "progress": False, **options}
    runner = DecodeRunner(Rich, rich_step, backend=backend, lowering=lowering, **given)
    runner.capture()
    return runner


MAKERS: Mapping[str, Callable[[Backend, str], Any]] = {
    "decode": decode,
    "lazy": lambda backend, lowering: decode(backend, lowering, lazy=True),
    "eager": lambda backend, _: EagerRunner(Rich, rich_step, backend=backend, no_copy=False),
    "no copy": lambda backend, _: EagerRunner(Rich, rich_step, backend=backend, no_copy=True),
}


@each_device
@pytest.mark.parametrize("kind", MAKERS)
def test_the_life_of_a_runner(backend: Backend, kind: str, device: str) -> None:
    """Made, captured and run under a default device, and run on after it has ended, a runner does as without one."""
    batches = batches_of(backend, 5)
    lowerings = backend.capabilities.lowerings if kind in ("decode", "lazy") else ("auto",)
    right = [seen(MAKERS[kind](backend, "slot_by_slot"), batch) for batch in batches]
    for lowering, way in itertools.product(lowerings, WAYS):
        made, run = contexts(way, device)
        with made:
            runner = MAKERS[kind](backend, lowering)
        with run:
            during = [seen(runner, batch) for batch in batches[:4]]
        after = [seen(runner, batch) for batch in batches]
        assert during == right[:4], (lowering, way)
        assert after == right, (lowering, way)


def _prefill(kind: str, backend: Backend) -> tuple[Callable[[], Any], list[Any]]:
    """How a prefill runner is made, of a model that is there before, and batches for it."""
    model = prefilled.Model(named=kind == "piecewise").to(backend.device)

    def make() -> Any:
        runner = prefilled.runner_of(kind, model, backend, lowering="auto")
        runner.capture()
        return runner

    return make, [prefilled.batch_of(lengths, 7, backend.device) for lengths in ([3], [1, 2, 1], [9, 4], [30])]


def _standard(phase: str, backend: Backend) -> tuple[Callable[[], Any], list[Any]]:
    """The same of a runner of the standard declarations."""
    kind = STANDARD[phase]
    given = {field.name: getattr(kind, field.name) for field in attrs.fields(type(kind))}
    if phase == "eager":  # which has no lowering to choose
        return lambda: kind.make(kind, backend), [kind.batch(backend, rows, rows) for rows in (2, 1, 3, 2)]
    lowered = Lowered(**given, lowering=backend.capabilities.lowerings[-1])
    return lambda: lowered.make(lowered, backend), [lowered.batch(backend, rows, rows) for rows in (2, 1, 3, 2)]


def _plain(outputs: Any) -> list[Any]:
    if attrs.has(type(outputs)):
        outputs = attrs.asdict(outputs, recurse=False)
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in pytree.tree_leaves(outputs)]


@each_device
@pytest.mark.parametrize("kind", [*prefilled.KINDS, *STANDARD])
def test_every_other_runner(backend: Backend, kind: str, device: str) -> None:
    """The runners of the library, prefill and speculative ones among them, over the standard declarations."""
    make, batches = _prefill(kind, backend) if kind in prefilled.KINDS else _standard(kind, backend)
    runner = make()
    right = [_plain(runner(batch)) for batch in batches]
    for way in WAYS:
        made, run = contexts(way, device)
        with made:
            runner = make()
        with run:
            during = [_plain(runner(batch)) for batch in batches]
        assert during == right, way
        assert [_plain(runner(batch)) for batch in batches] == right, way


@each_device
def test_checks_and_suites(backend: Backend, device: str) -> None:
    """Checks, debug modes and the assertions for suites draw their own batches, on the device of the slots."""
    values = {"halves": (0, 9), "pairs": (0, 9)}
    with default_device(device):
        runner = decode(backend, "auto", buckets=[2, 4])
        assert not slotgraph.check(runner, rounds=1, values=values).findings
        assert_parity(runner, values=values)
        assert_padding_independent(runner, values=values)
        assert_fill_equals_oracle(Rich, {BATCH: 5}, backend=backend, max_examples=10)
        debugged = decode(backend, "auto", debug=["parity", "poison"])
        for batch in batches_of(backend, 3)[:3]:
            debugged(batch)


@each_device
def test_a_step_is_recorded_and_run_again(backend: Backend, device: str, tmp_path: Path) -> None:
    """Steps recorded and run again under a default device give what they gave."""
    file = tmp_path / "steps.safetensors"
    runner, batches = decode(backend, "auto"), batches_of(backend, 4)
    with default_device(device):
        with slotgraph.record(runner, file, outputs=True):
            for batch in batches:
                runner(batch)
        report = replay_file(RecordedFile.read(file), decode(backend, "auto"))
    assert [step.outcome for step in report.steps] == ["equal"] * len(batches)


class OnDefault(Inputs):
    """A function that makes its tensor on whatever device is the default."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda step: torch.arange(3) + step.live(BATCH), shape=3, dtype=torch.int64)


class OnDefaultHost(Inputs):
    """The same of a slot on the host."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(
        lambda step: torch.arange(3) + step.live(BATCH), shape=3, dtype=torch.int64, placement=HOST
    )


class OnDefaultDevice(Inputs):
    """The same of a function of slots on the device."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    counts: torch.Tensor = computed(lambda ids: torch.arange(ids.shape[0]), shape=BATCH, dtype=torch.int64)


@pytest.mark.slotgraph_backends("cpu", "cpu-capture")
@pytest.mark.parametrize("inputs", [OnDefault, OnDefaultHost, OnDefaultDevice])
def test_a_function_obeys_the_callers_default(backend: Backend, inputs: type[Any]) -> None:
    """A tensor without data is refused by the slot's name, except in a graph, which holds what was captured.

    The next step, without the default device, is right.
    """
    batch = {"ids": [5, 6]}

    def step(view: Any) -> Any:
        return view.ids + view.counts[: view.ids.shape[0]].sum()

    for lowering in backend.capabilities.lowerings:
        for runner in (
            DecodeRunner(inputs, step, buckets=[2], backend=backend, lowering=lowering, progress=False),
            EagerRunner(inputs, step, backend=backend),
        ):
            if isinstance(runner, DecodeRunner):
                runner.capture()
            right = runner(batch).tolist()
            try:
                with torch.device("meta"):
                    during = runner(batch).tolist()
            except ComputeError as error:
                assert re.search(r"slot 'counts'.* meta, .* name the device", str(error))  # noqa: PT017 - or no error
            else:
                assert inputs is OnDefaultDevice
                assert isinstance(runner, DecodeRunner)
                assert during == right  # the function is in the graph
            assert runner(batch).tolist() == right


def test_a_maker_of_values_obeys_the_callers_default() -> None:
    """A function that makes values for a check is asked for others where they have no data."""
    runner = DecodeRunner(
        OnDefault, lambda view: view.ids + view.counts[0], buckets=[2], backend="cpu-capture", progress=False
    )
    runner.capture()
    values = {"ids": lambda shape, dtype, _: torch.ones(shape, dtype=dtype)}
    assert not slotgraph.check(runner, rounds=1, values=values).findings
    with torch.device("meta"), pytest.raises(ConfigError, match=r"slot 'ids': values' function .* on meta"):
        slotgraph.check(runner, rounds=1, values=values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    """A list of floats is float32 wherever its slot's dtype does not say what it is."""

    class Converting(Inputs):
        """A slot of whole numbers that takes floats."""

        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, converts=(torch.float32,))

    runner = EagerRunner(Converting, lambda view: view.ids * 3, backend="cpu")
    torch.set_default_dtype(dtype)
    try:
        assert runner({"ids": [5.0, 600.0]}).tolist() == [15, 1800]
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_constant_obeys_the_callers_default() -> None:
    """As a computed slot's function does: its runner is refused."""

    class Constants(Inputs):
        """One constant."""

        ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
        table: torch.Tensor = constant(lambda _: torch.arange(3), shape=3, dtype=torch.int64)

    with torch.device("meta"), pytest.raises(ComputeError, match=r"slot 'table'.* meta, .* name the device"):
        DecodeRunner(Constants, lambda view: view.ids, buckets=[2], backend="cpu", progress=False).capture()
