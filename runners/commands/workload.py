"""What `slotgraph bench` fills: decode-shaped declarations of any number of slots, and batches for them."""

import random
import types
from collections.abc import Iterator, Sequence
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.inputs import Inputs
from ...dataflow.roles import CACHE_LOC, Role, resolve_dtype
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

CASES: Final = ((1, 1), (7, 8), (37, 48), (200, 256))
"""Live and padded rows."""

BUCKETS: Final = tuple(padded for _, padded in CASES)
WALK: Final = 64
"""Steps of a walk: requests come and go, so that the live size differs from step to step."""
_CHANGES: Final = (-4, -3, -2, -1, 1, 2, 3, 4)


def _live_tokens(step: Step) -> int:
    return step.live(TOKENS)


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
    body["num_token_non_padded"] = computed(_live_tokens, shape=1, dtype=torch.int32)
    body["__annotations__"]["num_token_non_padded"] = torch.Tensor
    made: type[Inputs] = types.new_class(f"Decode{slots}", (Inputs,), {}, lambda namespace: namespace.update(body))
    return made


def _slots(count: int) -> Iterator[tuple[str, Axis, torch.dtype | Role, Number]]:
    for index in range(count):
        again, which = divmod(index, len(_SHAPES))
        name, axis, dtype, pad = _SHAPES[which]
        yield f"{name}_{again}" if again else name, axis, dtype, pad


@attrs.frozen(eq=False)
class Batch:
    """One batch: `rows` live rows, and its tensors as attributes, as an engine's own batch has them."""

    rows: int
    tensors: types.SimpleNamespace


def make_batches(inputs: type[Inputs], sizes: Sequence[int], backend: Backend) -> list[Batch]:
    """A batch for each live size, with seeded random values on the backend's device; equal sizes share one."""
    made = {rows: _batch(inputs, rows, backend) for rows in set(sizes)}
    return [made[rows] for rows in sizes]


def _batch(inputs: type[Inputs], rows: int, backend: Backend) -> Batch:
    seeded = torch.Generator().manual_seed(rows)
    tensors = {}
    for name, slot in inputs.slotgraph.slots.items():
        if slot.reads(name) is not None:
            dtype = resolve_dtype(slot.dtype, backend.capabilities)
            values = torch.randint(0, 2 if dtype == torch.bool else 100, (rows,), generator=seeded)
            tensors[name] = values.to(backend.device, dtype)
    return Batch(rows, types.SimpleNamespace(**tensors))


def walk_sizes(padded: int, smaller: int, steps: int = WALK) -> list[int]:
    """Live sizes of a walk between two buckets: in each step up to four requests come or go; seeded."""
    drawn = random.Random(padded)  # noqa: S311 - a seeded walk, no secret
    sizes = [(smaller + padded) // 2]
    while len(sizes) < steps:
        changes = [change for change in _CHANGES if smaller < sizes[-1] + change <= padded]
        sizes.append(sizes[-1] + drawn.choice(changes))
    return sizes
