"""What `slotgraph bench` runs: decode steps of any number of slots, by hand and by this library, held to the oracle."""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Step, extent
from ...dataflow.capabilities import CACHE_LOC, DEVICE, Lowering, Role, resolve_dtype
from ...dataflow.errors import WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sources import look_up
from ...dataflow.specifiers import computed, copied
from ...dataflow.tails import Number
from ..capture import capture_step, warm_up
from ..decode import DecodeRunner
from ..testing.by_hand import FillByHand
from ..testing.bytes import difference, differences
from ..testing.contests import PER_SLOT, REGROUPED, SETS

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
BARE: Final = "bare"
ORACLE: Final = "slot_by_slot"
FILL: Final = "fill"
STEP: Final = "step"
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

    def hosted(rows: int, number: int, lists: int) -> Batch:
        batch = draw(inputs, backend, rows, number)
        for index, (name, value) in enumerate([one for one in vars(batch).items() if one[0] != "rows"]):
            setattr(batch, name, value.tolist() if index < lists else value.cpu().numpy())
        return batch

    for live, padded in SIZES:
        drawn = functools.partial(draw, inputs, backend)
        yield Case(name="device", inputs=inputs, backend=backend, draw=drawn, padded=padded, sizes=(live,) * SETS)
    for name, lists in (("numpy", 0), ("lists", _LISTS)):
        yield Case(name=name, inputs=inputs, backend=backend, draw=functools.partial(hosted, lists=lists))


@attrs.frozen(kw_only=True, eq=False)
class Contestant:
    """One way to run a case.

    Args:
        name: A lowering's, or that of a way by hand.
        step: Fill, view and replay.
        fill: Fill and view alone, where that is measured.
        slots: What its steps fill, every padded row.
        runner: Whose it is, where it is this library's.
    """

    name: str
    step: Way
    fill: Way | None = None
    slots: Mapping[str, torch.Tensor] = attrs.field(factory=dict)
    runner: DecodeRunner[Any] | None = None


def contestants(case: Case) -> list[Contestant]:
    """Two by hand, a runner for each lowering that the backend has, and a bare replay."""
    lowerings = [by_lowering(case, lowering) for lowering in case.backend.capabilities.lowerings]
    return [by_hand(case, PER_SLOT), by_hand(case, REGROUPED), *lowerings, by_hand(case, BARE)]


def by_lowering(case: Case, lowering: Lowering) -> Contestant:
    """A captured runner: the public path, with sizing, routing and checks."""
    options: dict[str, Any] = {"buckets": [case.padded], "absent": case.absent, "progress": False}
    runner = DecodeRunner(case.inputs, plus_one, backend=case.backend, lowering=lowering, **options)
    runner.capture()
    buffers, fill = runner.graphs.buffers, None if lowering == ORACLE else runner.fill
    slots = {name: buffers[name].tensor for name in case.inputs.slotgraph.slots}
    return Contestant(name=lowering, step=case.call(runner), fill=fill, slots=slots, runner=runner)


def by_hand(case: Case, name: str) -> Contestant:
    """A way that engines hand-write, or a bare replay: of a graph that holds the step, and nothing of a fill."""
    backend, declaration = case.backend, case.inputs.slotgraph
    axes = len(declaration.varying)
    filled = FillByHand(
        declaration, backend, dict.fromkeys(declaration.varying, case.padded), grouped=name == REGROUPED
    )
    captured = torch.no_grad()(functools.partial(plus_one, types.SimpleNamespace(**filled.slots)))
    warm_up(backend, captured)
    graph = capture_step(backend, captured, pool=backend.pool())

    def fill(batch: Any) -> Any:
        return filled(batch, (batch.rows,) * axes)

    def step(batch: Any) -> Any:
        filled.fill(batch, (batch.rows,) * axes)
        graph.replay()
        return graph.outputs[: batch.rows]

    if name == BARE:
        return Contestant(name=name, step=lambda _: graph.replay())
    return Contestant(name=name, step=step, fill=fill, slots=filled.slots)


def verify(case: Case, found: Sequence[Contestant], whats: Sequence[str] = (FILL, STEP)) -> None:
    """Hold what each contestant leaves in the slots, and returns, to the oracle. WrongBytesError says a difference.

    Batches are those of the case, and then others that grow and shrink.
    """
    oracle, declared = by_lowering(case, ORACLE), case.inputs.slotgraph.slots
    sizes = [*case.sizes[: 2 * SETS], case.padded, 1, *case.sizes[:2]]

    def run(one: Contestant, what: str, batch: Any) -> tuple[Any, dict[str, torch.Tensor | None]]:
        """What it returns, and what it leaves in each slot that the batch has."""
        with torch.no_grad(), case.around():
            returned = getattr(one, what)(batch)
        case.backend.synchronize()
        gone = {name for name, slot in declared.items() if slot.reads(name) and look_up(batch, name) is None}
        return returned, {name: None if name in gone else tensor for name, tensor in one.slots.items()}

    for number, rows in enumerate(sizes):
        batch = case.draw(rows, number)
        outputs, wanted = run(oracle, STEP, batch)
        for one, what in itertools.product(found, whats):
            if not one.slots or getattr(one, what) is None:
                continue
            returned, held = run(one, what, batch)
            fault = next(differences(held, wanted, declared, {BATCH: rows, TOKENS: rows}), None)
            if what == STEP and (returned.shape != outputs.shape or difference(returned, outputs)):
                fault = fault or "it returned other outputs"
            if fault is not None:
                message = f"{case.name}, {rows}/{case.padded} rows, the {what} of {one.name}: {fault}"
                raise WrongBytesError(message)
