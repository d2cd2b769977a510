"""A whole step under each habit of serving loops, beside the same step without it: compared with the oracle, and timed.

Each habit is one step of nine slots on the device with one peculiarity, such as a slot whose source is converted, a
list, or another stream. None may slow down a whole step, nor leave its runner's lowering.

pytest tests/benchmarks/test_habits.py -s
"""

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied
from slotgraph.backends import Backend
from slotgraph.dataflow.capabilities import LoweringName
from slotgraph.extend import HOST, side
from slotgraph.runners.testing.bench import declare_decode
from slotgraph.runners.testing.benchmarks import ORACLE, SETS, Contestant, TakesBatch, verify
from slotgraph.runners.testing.timing import Run, measure
from tests.benchmarks.decoding import Batch, captured_runner, draw
from tests.benchmarks.shown import show

LIVE, PADDED = 200, 256
_SLOTS: Final = 9
_WIDE: Final = 4 * PADDED
_MOST: Final = 2048
"""Rows of the bucket for sizes that never repeat, of which there are more than any cache keeps."""
_FRESH: Final = 512
"""Sets of tensors, more than any cache keeps addresses."""
_ODD: Final = ("bool", "uint8", "int8", "float16", "bfloat16")  # float8 is not on every device
_NONE: Final[Mapping[str, Any]] = {}

Change = Callable[[Batch, int], Any]
"""Gives a batch of the base its peculiarity; the number says which batch of several it is."""


@attrs.frozen(kw_only=True, eq=False)
class Habit:
    """Steps of one bucket, and how a loop runs them. before: what precedes each step untimed, with those left."""

    name: str
    inputs: type[Inputs]
    draw: Callable[[int, int], Any]
    padded: int = PADDED
    sizes: Sequence[int] = (LIVE,) * SETS
    absent: Sequence[Sequence[str]] = ()
    call: Callable[[DecodeRunner[Any]], TakesBatch] = attrs.field(default=lambda runner: runner)
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    before: Callable[[int], object] | None = None


def habits(backend: Backend) -> list[Habit]:
    """All that this backend can show, the base first."""
    made = functools.partial(_habit, backend)
    found = [made("base"), *_on_host(made), *_on_device(made), *_absent(made), *_sized(made), *_called(made, backend)]
    return found if backend.device.type == "cpu" else [*found, *_streamed(made, backend)]


@pytest.mark.slotgraph_backends("cpu", "cpu-capture", "cuda")
def test_no_habit_leaves_its_lowering(backend: Backend, pytestconfig: pytest.Config) -> None:
    """All habits by all lowerings but the oracle, round by round in turn."""
    found = dict[tuple[str, str], Run]()
    for habit in habits(backend):
        names: list[LoweringName] = [ORACLE, *(one for one in backend.capabilities.lowerings if one != ORACLE)]
        made = [captured_runner(habit.inputs, backend, habit.padded, one, absent=habit.absent) for one in names]
        ways: dict[str, Contestant] = {
            one: Contestant(habit.call(it), it.graphs.buffers) for one, it in zip(names, made, strict=True)
        }
        sizes = [*habit.sizes[: 2 * SETS], habit.padded, 1, *habit.sizes[:2]]
        with habit.around():
            drawn = (({BATCH: rows, TOKENS: rows}, habit.draw(rows, at)) for at, rows in enumerate(sizes))
            verify(habit.name, habit.inputs.slotgraph, backend, ways[ORACLE], ways, drawn)
        batches = [habit.draw(rows, number) for number, rows in enumerate(habit.sizes)]
        for one in names[1:]:
            found[habit.name, one] = Run(ways[one].call, batches, habit.around, habit.before)
    shown = pytestconfig.getoption("capture") == "no"
    measure([*found.values()], backend, *((50, 20, 9) if shown else (1, 2, 0)))
    for lowering in {lowering for _, lowering in found}:
        times = {habit: run for (habit, one), run in found.items() if one == lowering}
        show(f"{backend.name}, {lowering}: host", {habit: run.host for habit, run in times.items()})
        show(f"{backend.name}, {lowering}: device", {habit: run.device for habit, run in times.items() if run.device})


def _habit(
    backend: Backend, name: str, more: Mapping[str, Any] = _NONE, change: Change | None = None, **options: Any
) -> Habit:
    """A habit, whose declaration has slots beside those of the base."""
    inputs = declare_decode(_SLOTS, **more)

    def drawn(rows: int, number: int) -> Any:
        batch = draw(inputs, backend, rows, number)
        return batch if change is None else change(batch, number)

    return Habit(name=name, inputs=inputs, draw=drawn, **options)


def _replaced(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """Another source in one slot's place."""

    def replaced(batch: Batch, _number: int) -> Batch:
        setattr(batch, name, change(getattr(batch, name)))
        return batch

    return replaced


def _on_host(made: Callable[..., Habit]) -> Iterator[Habit]:
    lengths = {"seq_lens_cpu": copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, converts=(torch.int64,))}
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "host slot": lambda source: source,
        "host slot, converted": lambda source: source.long(),
        "host slot, a list": lambda source: source.tolist(),
        "host slot, NumPy": lambda source: source.numpy(),
        "host slot, NumPy converted": lambda source: source.long().numpy(),
    }
    for name, change in ways.items():
        yield made(name, lengths, _replaced("seq_lens_cpu", change))


def _on_device(made: Callable[..., Habit]) -> Iterator[Habit]:
    lengths = {"seq_lens": copied(BATCH, dtype=torch.int32, pad=1, converts=(torch.int64,))}
    heats = {"temperatures": copied(BATCH, dtype=torch.float32, pad=1.0, converts=(torch.float64, torch.int64))}
    halves = {"halves": copied(BATCH, dtype=torch.float16, pad=0.5)}
    mrope = {"mrope": copied(3, TOKENS, dtype=torch.int64, pad=0, strided=True)}
    tables = {"tables": copied(BATCH, 4, dtype=torch.int32, pad=0)}
    odd = {name: copied(BATCH, dtype=getattr(torch, name), pad=0 if name != "bool" else False) for name in _ODD}
    yield made("converted by the kernel", lengths, _replaced("seq_lens", torch.Tensor.long))
    yield made("converted, float64", heats, _replaced("temperatures", torch.Tensor.double))
    yield made("converted, int64 to float32", heats, _replaced("temperatures", torch.Tensor.long))
    yield made("a list", change=_replaced("input_ids", torch.Tensor.tolist))
    yield made("a NumPy array", change=_replaced("input_ids", lambda source: source.cpu().numpy()))
    yield made("a host tensor", change=_replaced("input_ids", torch.Tensor.cpu))
    yield made("a NumPy array in pieces", change=_replaced("input_ids", lambda one: one.cpu().numpy()[::-1]))
    yield made("a list for float16", halves, _replaced("halves", torch.Tensor.tolist))
    yield made("a nested list", tables, _replaced("tables", torch.Tensor.tolist))
    yield made("a list of NumPy arrays", tables, _replaced("tables", lambda source: [*source.cpu().numpy()]))
    yield made("odd dtypes", odd)
    yield made("a strided source", mrope, _replaced("mrope", _strided))
    yield made("in place", call=_in_place)


def _strided(source: torch.Tensor) -> torch.Tensor:
    """The same values as the first columns of something wider."""
    wider = source.new_full((source.shape[0], _WIDE), -1)
    wider[:, : source.shape[1]] = source
    return wider[:, : source.shape[1]]


def _in_place(runner: DecodeRunner[Any]) -> TakesBatch:
    """One slot's live rows are written by their producer where they belong."""
    rows = runner.inputs(PADDED).positions
    rows.copy_(torch.arange(PADDED, device=rows.device))

    def step(batch: Batch) -> Any:
        batch.positions = rows[: batch.rows]
        return runner(batch)

    return step


def _absent(made: Callable[..., Habit]) -> Iterator[Habit]:
    more = {"extra": copied(TOKENS, dtype=torch.float32, pad=0.0, default=None)}

    def gone(batch: Batch, number: int, every: int) -> Batch:
        if number % every == 0:
            batch.extra = None
        return batch

    for name, every in (("absent", 1), ("absent and present in turn", 2)):
        yield made(name, more, functools.partial(gone, every=every), absent=(("extra",),))


def _sized(made: Callable[..., Habit]) -> Iterator[Habit]:
    sizes = list(range(1, _MOST))
    random.Random(0).shuffle(sizes)
    never = made("sizes that never repeat", padded=_MOST, sizes=sizes)
    whole = vars(never.draw(_MOST, 0))

    def cut(rows: int, _number: int) -> Batch:
        return Batch(**{**{name: one[:rows] for name, one in whole.items() if name != "rows"}, "rows": rows})

    yield made("sizes at random", sizes=[size for size in sizes if size < PADDED][:64])
    yield attrs.evolve(never, draw=cut)
    yield made("fresh tensors each step", sizes=(LIVE,) * _FRESH)


def _called(made: Callable[..., Habit], backend: Backend) -> Iterator[Habit]:
    more = {"extra": copied(TOKENS, dtype=torch.float32, pad=0.0, source=side("extra"))}
    yield made("fill, then replay", call=lambda runner: lambda batch: runner.replay(runner.fill(batch)))
    yield made("a side argument", more, call=lambda runner: lambda batch: runner(batch, extra=batch.extra))
    yield made("mappings and objects in turn", change=lambda batch, number: batch if number % 2 else vars(batch))
    yield made("inference mode", around=torch.inference_mode)
    yield made("a default device", around=lambda: backend.device)


def _streamed(made: Callable[..., Habit], backend: Backend) -> Iterator[Habit]:
    module = torch.get_device_module(backend.device)
    streams = module.current_stream(backend.device), module.Stream(backend.device)

    def elsewhere(batch: Batch, _number: int) -> Batch:
        with module.stream(streams[1]):
            moved = {name: value if name == "rows" else value.clone() for name, value in vars(batch).items()}
        backend.synchronize()
        return Batch(**moved)

    # the last of several steps is on the first
    yield made("two streams in turn", before=lambda left: module.set_stream(streams[left % 2]))
    yield made("sources of another stream", change=elsewhere)
