"""Habits: the ways in which serving loops bring their batches, none of which may slow down a whole step.

Each habit is one step of nine slots on the device with one peculiarity, such as a slot whose source is converted, a
list, or another stream. It is timed beside the same step without the peculiarity, its base, by each lowering.
"""

import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.capabilities import DEVICE, HOST, Lowering
from ...dataflow.inputs import Inputs
from ...dataflow.roles import resolve_dtype
from ...dataflow.sources import side
from ...dataflow.specialization import KEPT
from ...dataflow.specifiers import computed, copied
from ..decode import DecodeRunner
from ..shortcut import KEPT as KEPT_SIZES
from .workload import COUNT, SETS, plus_one

BASE: Final = "base"
LIVE: Final = 200
PADDED: Final = 256
_SLOTS: Final[Mapping[str, tuple[Any, torch.dtype, Any]]] = {
    "input_ids": (TOKENS, torch.int64, 0),
    "seq_lens": (BATCH, torch.int32, 1),
    "positions": (TOKENS, torch.int64, 0),
    "out_cache_loc": (TOKENS, torch.int64, 0),
    "req_pool_indices": (BATCH, torch.int64, 0),
    "temperatures": (BATCH, torch.float32, 1.0),
    "lora_ids": (BATCH, torch.int32, 0),
    "encoder_lens": (BATCH, torch.int32, 0),
}
"""Axis, dtype and tail of the base's slots; a ninth is a count that the host computes."""
_WIDE: Final = 4 * PADDED
_MOST: Final = 2048
"""Rows of the bucket for sizes that never repeat, of which there are more than any cache keeps."""
_ODD: Final = ("bool", "uint8", "float16", "bfloat16", "float8_e4m3fn")

Batch = types.SimpleNamespace
Change = Callable[[Batch, int, Backend], object]
"""Gives a batch of the base its peculiarity; the number says which batch of several it is."""
Step = Callable[[Any], Any]


@attrs.frozen(kw_only=True, eq=False)
class Habit:
    """One way to bring batches.

    more: slots beside those of the base. change: what a batch brings otherwise. made: all batches, where `change` is
    not enough. way: the step, where it is more than a call of the runner. around: what the whole loop runs in. before:
    what precedes each step untimed; it gets the number of steps that are left. absent: as runners take it. bucket: its
    padded rows. streams: whether it needs a device that has streams.
    """

    name: str
    more: Mapping[str, Any] = attrs.field(factory=dict)
    change: Change | None = None
    made: Callable[["Habit", Backend], list[Any]] | None = None
    way: Callable[[DecodeRunner[Any]], Step] | None = None
    around: Callable[[Backend], AbstractContextManager[object]] | None = None
    before: Callable[[Backend], Callable[[int], object]] | None = None
    absent: tuple[tuple[str, ...], ...] = ()
    bucket: int = PADDED
    streams: bool = False

    @functools.cached_property
    def inputs(self) -> type[Inputs]:
        """The declaration."""
        body: dict[str, Any] = {name: copied(axis, dtype=dtype, pad=pad) for name, (axis, dtype, pad) in _SLOTS.items()}
        body |= {COUNT: computed(_live_tokens, shape=1, dtype=torch.int32), **self.more}
        annotated = {"__annotations__": dict.fromkeys(body, torch.Tensor | None), "__module__": __name__}
        made: type[Inputs] = types.new_class("Habitual", (Inputs,), {}, lambda space: space.update(annotated | body))
        return made

    def batches(self, backend: Backend) -> list[Any]:
        """What takes turns."""
        if self.made is not None:
            return self.made(self, backend)
        return [self.batch(backend, number) for number in range(SETS)]

    def batch(self, backend: Backend, number: int, rows: int = LIVE) -> Batch:
        """One batch, with seeded values that no other number has."""
        made, draw = Batch(), torch.Generator().manual_seed(1000 * rows + number)
        for name, slot in self.inputs.slotgraph.slots.items():
            if slot.reads(name) is not None:
                shape = [dim if isinstance(dim, int) else rows for dim in _sizes(slot.shape, rows)]
                dtype = resolve_dtype(slot.dtype, backend.capabilities)
                most = 2 if dtype == torch.bool else 100
                values = torch.randint(0, most, shape, device="cpu", generator=draw).to(dtype)
                setattr(made, name, values.to(backend.device) if slot.placement == DEVICE else values)
        if self.change is not None:
            self.change(made, number, backend)
        return made

    def runner(self, backend: Backend, lowering: Lowering) -> DecodeRunner[Any]:
        """A captured runner."""
        options: dict[str, Any] = {"buckets": [self.bucket], "absent": self.absent, "progress": False}
        runner = DecodeRunner(self.inputs, plus_one, backend=backend, lowering=lowering, **options)
        runner.capture()
        return runner


def _sizes(shape: Sequence[Any], rows: int) -> Iterator[int]:
    for dim in shape:
        yield dim.at(dict.fromkeys(dim.axes, rows))


def _live_tokens(step: Any) -> int:
    return int(step.live(TOKENS))


def habits(backend: Backend) -> list[Habit]:
    """All that this backend can show, the base first."""
    has_streams = backend.device.type != "cpu"
    found = [Habit(name=BASE), *_on_host(), *_on_device(), *_absent(), *_sized(), *_called(), *_streamed()]
    return [habit for habit in found if has_streams or not habit.streams]


def _replaced(name: str, change: Callable[[torch.Tensor], Any]) -> Change:
    """Another source in one slot's place."""
    return lambda batch, _number, _backend: setattr(batch, name, change(getattr(batch, name)))


def _on_host() -> Iterator[Habit]:
    lengths = {"seq_lens_cpu": copied(BATCH, dtype=torch.int32, pad=1, placement=HOST, converts=(torch.int64,))}
    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "host slot": lambda source: source,
        "host slot, converted": lambda source: source.long(),
        "host slot, a list": lambda source: source.tolist(),
        "host slot, NumPy": lambda source: source.numpy(),
        "host slot, NumPy converted": lambda source: source.long().numpy(),
    }
    for name, change in ways.items():
        yield Habit(name=name, more=lengths, change=_replaced("seq_lens_cpu", change))


def _on_device() -> Iterator[Habit]:
    lengths = {"seq_lens": copied(BATCH, dtype=torch.int32, pad=1, converts=(torch.int64,))}
    heats = {"temperatures": copied(BATCH, dtype=torch.float32, pad=1.0, converts=(torch.float64, torch.int64))}
    halves = {"halves": copied(BATCH, dtype=torch.float16, pad=0.5)}
    mrope = {"mrope": copied(3, TOKENS, dtype=torch.int64, pad=0, strided=True)}
    tables = {"tables": copied(BATCH, 4, dtype=torch.int32, pad=0)}
    odd = {name: copied(BATCH, dtype=getattr(torch, name), pad=0 if name != "bool" else False) for name in _ODD}
    yield Habit(name="converted by the kernel", more=lengths, change=_replaced("seq_lens", torch.Tensor.long))
    yield Habit(name="converted, float64", more=heats, change=_replaced("temperatures", torch.Tensor.double))
    yield Habit(name="converted, int64 to float32", more=heats, change=_replaced("temperatures", torch.Tensor.long))
    yield Habit(name="a list", change=_replaced("input_ids", torch.Tensor.tolist))
    yield Habit(name="a NumPy array", change=_replaced("input_ids", lambda source: source.cpu().numpy()))
    yield Habit(name="a host tensor", change=_replaced("input_ids", torch.Tensor.cpu))
    yield Habit(name="a NumPy array in pieces", change=_replaced("input_ids", lambda one: one.cpu().numpy()[::-1]))
    yield Habit(name="a list for float16", more=halves, change=_replaced("halves", torch.Tensor.tolist))
    yield Habit(name="a nested list", more=tables, change=_replaced("tables", torch.Tensor.tolist))
    yield Habit(name="odd dtypes", more=odd)
    yield Habit(name="a strided source", more=mrope, change=_replaced("mrope", _strided))
    yield Habit(name="in place", way=_in_place)


def _strided(source: torch.Tensor) -> torch.Tensor:
    """The same values as the first columns of something wider."""
    wider = source.new_full((source.shape[0], _WIDE), -1)
    wider[:, : source.shape[1]] = source
    return wider[:, : source.shape[1]]


def _in_place(runner: DecodeRunner[Any]) -> Step:
    """One slot's live rows are written by their producer where they belong."""
    rows = runner.inputs(PADDED).positions[:LIVE]
    rows.copy_(torch.arange(LIVE, device=rows.device))

    def step(batch: Batch) -> Any:
        batch.positions = rows
        return runner(batch)

    return step


def _absent() -> Iterator[Habit]:
    more = {"extra": copied(TOKENS, dtype=torch.float32, pad=0.0, default=None)}

    def gone(batch: Batch, number: int, _backend: Backend, every: int) -> None:
        if number % every == 0:
            batch.extra = None

    yield Habit(name="absent", more=more, absent=(("extra",),), change=functools.partial(gone, every=1))
    yield Habit(
        name="absent and present in turn", more=more, absent=(("extra",),), change=functools.partial(gone, every=2)
    )


def _sized() -> Iterator[Habit]:
    def walk(habit: Habit, backend: Backend) -> list[Any]:
        sizes = random.Random(0).sample(range(1, PADDED), 64)  # noqa: S311 - a seeded walk, no secret
        return [habit.batch(backend, 0, rows) for rows in sizes]

    def never(habit: Habit, backend: Backend) -> list[Any]:
        whole = vars(habit.batch(backend, 0, _MOST))
        sizes = random.Random(0).sample(range(_MOST - KEPT_SIZES - 16, _MOST), KEPT_SIZES + 16)  # noqa: S311 - likewise
        return [Batch(**{name: values[:rows] for name, values in whole.items()}) for rows in sizes]

    def fresh(habit: Habit, backend: Backend) -> list[Any]:
        return [habit.batch(backend, number) for number in range(KEPT + SETS)]

    yield Habit(name="sizes at random", made=walk)
    yield Habit(name="sizes that never repeat", made=never, bucket=_MOST)
    yield Habit(name="fresh tensors each step", made=fresh)


def _called() -> Iterator[Habit]:
    def kinds(habit: Habit, backend: Backend) -> list[Any]:
        batches = [habit.batch(backend, number) for number in range(SETS)]
        return [batch if number % 2 else vars(batch) for number, batch in enumerate(batches)]

    def beside(runner: DecodeRunner[Any]) -> Step:
        return lambda batch: runner(batch, extra=batch.extra)

    more = {"extra": copied(TOKENS, dtype=torch.float32, pad=0.0, source=side("extra"))}
    yield Habit(name="fill, then replay", way=lambda runner: lambda batch: runner.replay(runner.fill(batch)))
    yield Habit(name="a side argument", more=more, way=beside)
    yield Habit(name="mappings and objects in turn", made=kinds)
    yield Habit(name="inference mode", around=lambda _: torch.inference_mode())
    yield Habit(name="a default device", around=lambda backend: backend.device)


def _streamed() -> Iterator[Habit]:
    def turns(backend: Backend) -> Callable[[int], object]:
        module = torch.get_device_module(backend.device)
        streams = module.current_stream(backend.device), module.Stream(backend.device)
        return lambda left: module.set_stream(streams[left % 2])  # the last of several steps is on the first

    def elsewhere(habit: Habit, backend: Backend) -> list[Any]:
        module = torch.get_device_module(backend.device)
        with module.stream(module.Stream(backend.device)):
            batches = [habit.batch(backend, number) for number in range(SETS)]
        backend.synchronize()
        return batches

    yield Habit(name="two streams in turn", before=turns, streams=True)
    yield Habit(name="sources of another stream", made=elsewhere, streams=True)
