"""What `slotgraph bench` runs: decode-shaped declarations of any number of slots, and batches for them."""

import bisect
import random
import types
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, get_args

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ...dataflow.buffers import Buffers, allocate
from ...dataflow.inputs import Inputs
from ...dataflow.roles import CACHE_LOC, Role, resolve_dtype
from ...dataflow.specialization import KEPT
from ...dataflow.specifiers import computed, copied
from ...dataflow.step import Step
from ...dataflow.tails import Number

_SHAPES: Final[Sequence[tuple[str, Axis, torch.dtype | Role, Number]]] = (
    ("input_ids", TOKENS, torch.int64, 0),
    ("seq_lens", BATCH, torch.int32, 1),
    ("positions", TOKENS, torch.int64, 0),
    ("out_cache_loc", TOKENS, CACHE_LOC, 0),
    ("req_pool_indices", BATCH, torch.int64, 0),
    ("is_greedy", BATCH, torch.bool, False),
    ("temperatures", BATCH, torch.float32, 1.0),
    ("top_ps", BATCH, torch.float32, 1.0),
    ("lora_ids", BATCH, torch.int32, 0),
    ("encoder_lens", BATCH, torch.int32, 0),
    ("mamba_indices", BATCH, torch.int32, 0),
)
"""Name, axis, dtype and tail of what engines feed a decode step; beyond these the same again under other names."""
COUNT: Final = "num_token_non_padded"

CASES: Final = ((1, 1), (7, 8), (37, 48), (200, 256))
"""Live and padded rows."""
BUCKETS: Final = tuple(padded for _, padded in CASES)
FLAT: Final = (1, 64, 512, 4096)
"""Live sizes, each in a bucket of just that size, over which a step's cost should not grow."""
MIXED: Final = 12
"""The number of slots that the live sizes of `FLAT`, and sources that are always the same or never, are measured with.
"""
WALK: Final = 64
"""Steps of a walk: requests come and go, so that the live size differs from step to step."""
_CHANGES: Final = (-4, -3, -2, -1, 1, 2, 3, 4)

Sources = Literal["device", "same", "new", "numpy", "lists"]
"""What batches bring: tensors on the device, of which several sets take turns, the same ones each time, or ones at
addresses that were not seen lately; arrays; or lists for the first `LISTS` slots, and arrays for the others."""
SOURCES: Final[tuple[Sources, ...]] = get_args(Sources)
HOST_SOURCES: Final[tuple[Sources, ...]] = ("numpy", "lists")
LISTS: Final = 3
SETS: Final = 4
"""Sets of sources that take turns, each with addresses and values of its own: a step must not find what it found last,
or it could spare itself the upload."""
_SETS: Final[dict[Sources, int]] = {"same": 1, "new": KEPT + SETS}


class Batch(types.SimpleNamespace):
    """One batch: its sources as attributes, as an engine's own batch has them, with its live and padded rows."""

    rows: int
    padded: int


def _live_tokens(step: Step) -> int:
    return step.live(TOKENS)


def plus_one(view: Any) -> Any:
    """The step: as small as one can be, so that its graph hides nothing of what a fill takes."""
    return view.input_ids + 1


def declare_decode(slots: int) -> type[Inputs]:
    """A decode declaration of `slots` slots, at least 2: all copied but one count, which the host computes."""
    body: dict[str, Any] = {
        "__annotations__": {},
        "__module__": __name__,
        "__doc__": f"A decode step of {slots} slots.",
    }
    for name, axis, dtype, pad in _slots(slots - 1):
        body[name] = copied(axis, dtype=dtype, pad=pad)
        body["__annotations__"][name] = torch.Tensor
    body[COUNT] = computed(_live_tokens, shape=1, dtype=torch.int32)
    body["__annotations__"][COUNT] = torch.Tensor
    made: type[Inputs] = types.new_class(f"Decode{slots}", (Inputs,), {}, lambda namespace: namespace.update(body))
    return made


def _slots(count: int) -> Iterator[tuple[str, Axis, torch.dtype | Role, Number]]:
    for index in range(count):
        again, which = divmod(index, len(_SHAPES))
        name, axis, dtype, pad = _SHAPES[which]
        yield f"{name}_{again}" if again else name, axis, dtype, pad


@attrs.frozen(eq=False)
class Workload:
    """A declaration on one backend, and the buckets that its batches go to."""

    inputs: type[Inputs]
    backend: Backend
    buckets: tuple[int, ...]

    @classmethod
    def of(cls, slots: int, backend: Backend, buckets: tuple[int, ...] = BUCKETS) -> "Workload":
        """A decode step of so many slots."""
        return cls(declare_decode(slots), backend, buckets)

    @property
    def slots(self) -> int:
        """How many slots are declared."""
        return len(self.inputs.slotgraph.slots)

    @property
    def capacity(self) -> Sizes:
        """The sizes of the largest bucket."""
        return {BATCH: self.buckets[-1], TOKENS: self.buckets[-1]}

    def padded(self, rows: int) -> int:
        """The bucket of a batch."""
        return self.buckets[bisect.bisect_left(self.buckets, rows)]

    def buffers(self) -> Buffers:
        """Buffers for the largest bucket, beside any runner's."""
        backend = self.backend
        return allocate(self.inputs.slotgraph, self.capacity, backend.capabilities, backend.empty)

    def sets(self, rows: int, sources: Sources = "device") -> list[Batch]:
        """Batches of one live size that take turns."""
        return [self.batch(rows, sources, number) for number in range(_SETS.get(sources, SETS))]

    def batch(self, rows: int, sources: Sources = "device", number: int = 0) -> Batch:
        """A batch with seeded values, all of them others than under another number, but for those of bools."""
        seeded = torch.Generator().manual_seed(rows)
        made, lists = Batch(rows=rows, padded=self.padded(rows)), LISTS if sources == "lists" else 0
        for name, slot in self.inputs.slotgraph.slots.items():
            if slot.reads(name) is not None:
                dtype = resolve_dtype(slot.dtype, self.backend.capabilities)
                low, high = (0, 2) if dtype == torch.bool else (100 * number, 100 * number + 100)
                values = torch.randint(low, high, (rows,), device="cpu", generator=seeded).to(dtype)
                setattr(made, name, self._source(values, sources, as_list=lists > 0))
                lists -= 1
        return made

    def _source(self, values: torch.Tensor, sources: Sources, *, as_list: bool) -> Any:
        if sources in HOST_SOURCES:
            return values.tolist() if as_list else values.numpy()
        return values.to(self.backend.device)


@attrs.frozen(eq=False)
class Case:
    """Batches that take turns, and what is to be said of them; `lowest` is below `live` where live sizes change."""

    slots: int
    lowest: int
    live: int
    padded: int
    sources: Sources
    batches: Sequence[Batch]

    @classmethod
    def steady(cls, workload: Workload, live: int, sources: Sources = "device") -> "Case":
        """The same live size in each step."""
        batches = workload.sets(live, sources)
        return cls(workload.slots, live, live, workload.padded(live), sources, batches)

    @classmethod
    def walk(cls, workload: Workload, steps: int) -> "Case":
        """Another live size in each step, all of them in the largest bucket."""
        sizes = walk_sizes(workload.buckets[-1], workload.buckets[-2], steps)
        batches = [workload.batch(rows, "device", number % SETS) for number, rows in enumerate(sizes)]
        return cls(workload.slots, min(sizes), max(sizes), workload.buckets[-1], "device", batches)


def cases_of(workload: Workload, walk: int) -> Iterator[Case]:
    """What is measured for one number of slots: live sizes, host data in the largest bucket, and a walk."""
    most = CASES[-1][0]
    for live, _ in CASES:
        yield Case.steady(workload, live)
    for sources in SOURCES if workload.slots == MIXED else HOST_SOURCES:
        if sources != "device":
            yield Case.steady(workload, most, sources)
    yield Case.walk(workload, walk)


def flat_cases(workload: Workload) -> Iterator[Case]:
    """Every bucket, full."""
    for rows in workload.buckets:
        yield Case.steady(workload, rows)


def make_batches(inputs: type[Inputs], sizes: Sequence[int], backend: Backend) -> list[Batch]:
    """A batch for each live size, with tensors on the backend's device."""
    workload = Workload(inputs, backend, tuple(sorted(set(sizes))))
    return [workload.batch(rows) for rows in sizes]


def integers_of(slots: int, live: int) -> int:
    """Whole numbers that a batch of "lists" brings in lists."""
    return min(LISTS, slots - 1) * live


def walk_sizes(padded: int, smaller: int, steps: int = WALK) -> list[int]:
    """Live sizes of a walk between two buckets: in each step up to four requests come or go; seeded."""
    drawn = random.Random(padded)  # noqa: S311 - a seeded walk, no secret
    sizes = [(smaller + padded) // 2]
    while len(sizes) < steps:
        changes = [change for change in _CHANGES if smaller < sizes[-1] + change <= padded]
        sizes.append(sizes[-1] + drawn.choice(changes))
    return sizes
