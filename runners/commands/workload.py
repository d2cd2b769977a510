"""What `slotgraph bench` runs: decode-shaped declarations of any number of slots, and cases, which say what is brought."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, extent
from ...dataflow.capabilities import DEVICE
from ...dataflow.inputs import Inputs
from ...dataflow.roles import CACHE_LOC, Role, resolve_dtype
from ...dataflow.specifiers import computed, copied
from ...dataflow.step import Step
from ...dataflow.tails import Number
from ..decode import DecodeRunner
from ..testing.contests import SETS

_SLOTS: Final[Sequence[tuple[str, Any, torch.dtype | Role, Number]]] = (
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
SIZES: Final = ((1, 1), (7, 8), (37, 48), (200, 256), (4096, 4096))
"""Live and padded rows."""
LIVE, PADDED = SIZES[3]
_LISTS: Final = 3

Way = Callable[[Any], Any]
"""Takes a batch; returns a view where it fills, and outputs where it runs a whole step."""


class Batch(types.SimpleNamespace):
    """One batch: its sources as attributes, as an engine's own batch has them, with its live rows."""

    rows: int


def plus_one(view: Any) -> Any:
    """The step: as small as one can be, so that its graph hides nothing of what a fill takes."""
    return view.input_ids + 1


def declare_decode(slots: int, **more: Any) -> type[Inputs]:
    """A decode declaration of `slots` slots, at least 2: all copied but one count, which the host computes.

    Args:
        slots: How many slots there are without those in `more`.
        **more: Slots beside these, or in the place of those of the same name.
    """
    body: dict[str, Any] = {}
    for index in range(slots - 1):
        again, which = divmod(index, len(_SLOTS))
        name, axis, dtype, pad = _SLOTS[which]
        body[f"{name}_{again}" if again else name] = copied(axis, dtype=dtype, pad=pad)
    body |= {"num_token_non_padded": computed(_live_tokens, shape=1, dtype=torch.int32), **more}
    body |= {"__annotations__": dict.fromkeys(body, torch.Tensor | None), "__module__": __name__}
    made: type[Inputs] = types.new_class(f"Decode{slots}", (Inputs,), {}, lambda space: space.update(body))
    return made


def _live_tokens(step: Step) -> int:
    return step.live(TOKENS)


def draw(inputs: type[Inputs], backend: Backend, rows: int, number: int = 0) -> Batch:
    """A batch with seeded values, all of them others than under another number, but for those of bools."""
    made, seeded = Batch(rows=rows), torch.Generator().manual_seed(rows)
    for name, slot in inputs.slotgraph.slots.items():
        if slot.reads(name) is not None:
            dtype = resolve_dtype(slot.dtype, backend.capabilities)
            shape = extent(slot.shape, {BATCH: rows, TOKENS: rows})
            low, high = (0, 2) if dtype == torch.bool else (100 * number, 100 * number + 100)
            values = torch.randint(low, high, shape, device="cpu", generator=seeded).to(dtype)
            setattr(made, name, values.to(backend.device) if slot.placement == DEVICE else values)
    return made


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """Steps of one bucket, and how a loop runs them.

    Args:
        name: What is special about it.
        inputs: The declaration.
        backend: Where it runs.
        draw: A batch of so many rows; the number says which of several it is.
        padded: Rows of the bucket.
        sizes: Live rows of the batches that take turns.
        absent: As runners take it.
        call: Makes of a runner what runs a step.
        around: What the whole loop runs in.
        before: What precedes each step untimed; it gets the number of steps that are left.
    """

    name: str
    inputs: type[Inputs]
    backend: Backend
    draw: Callable[[int, int], Any]
    padded: int = PADDED
    sizes: Sequence[int] = (LIVE,) * SETS
    absent: Sequence[Sequence[str]] = ()
    call: Callable[[DecodeRunner[Any]], Way] = attrs.field(default=lambda runner: runner)
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    before: Callable[[int], object] | None = None

    @functools.cached_property
    def batches(self) -> list[Any]:
        """What takes turns."""
        return [self.draw(rows, number) for number, rows in enumerate(self.sizes)]


def cases(slots: int, backend: Backend) -> Iterator[Case]:
    """What is measured for one number of slots: sources on the device in each bucket, and host data in one."""
    inputs = declare_decode(slots)

    def drawn(rows: int, number: int, lists: int | None = None) -> Batch:
        batch = draw(inputs, backend, rows, number)
        if lists is not None:
            for index, (name, value) in enumerate(list(vars(batch).items())[1:]):
                setattr(batch, name, value.tolist() if index < lists else value.cpu().numpy())
        return batch

    ways = [("device", drawn, size) for size in SIZES]
    hosted = {"numpy": 0, "lists": _LISTS}
    ways += [(name, functools.partial(drawn, lists=lists), (LIVE, PADDED)) for name, lists in hosted.items()]
    for name, make, (live, padded) in ways:
        yield Case(name=name, inputs=inputs, backend=backend, draw=make, padded=padded, sizes=(live,) * SETS)
