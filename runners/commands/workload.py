"""What `slotgraph bench` runs: decode steps of any number of slots, by hand and by this library, held to the oracle."""

import types
from collections.abc import Iterable, Mapping, Sequence
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
from ..decode import DecodeRunner
from ..testing.benchmarks import PER_SLOT, REGROUPED, Way
from ..testing.by_hand import FillByHand
from ..testing.ground import difference, differences

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
BARE: Final = "bare"
ORACLE: Final[Lowering] = "slot_by_slot"
FILL: Final = "fill"
STEP: Final = "step"


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


@attrs.frozen(eq=False)
class Contestant:
    """One way to run a step.

    Attributes:
        name: A lowering's, or that of a way by hand.
        step: Fill, view and replay.
        fill: Fill and view alone, if that is measured.
        slots: What its steps fill, every padded row.
        runner: Runs the step, or captured the graph that is replayed.
    """

    name: str
    step: Way
    fill: Way | None
    slots: Mapping[str, torch.Tensor]
    runner: DecodeRunner[Any]


def contestants(inputs: type[Inputs], backend: Backend, padded: int) -> list[Contestant]:
    """Two by hand, a runner for each lowering that the backend has, and a bare replay."""
    by_hands = [by_hand(inputs, backend, padded, name) for name in (PER_SLOT, REGROUPED)]
    found = [by_lowering(inputs, backend, padded, lowering) for lowering in backend.capabilities.lowerings]
    return [*by_hands, *found, by_hand(inputs, backend, padded, BARE)]


def by_lowering(inputs: type[Inputs], backend: Backend, padded: int, lowering: Lowering, **options: Any) -> Contestant:
    """A captured runner: the public path, with sizing, routing and checks."""
    given: dict[str, Any] = {"buckets": [padded], "lowering": lowering, "progress": False, **options}
    runner = DecodeRunner(inputs, plus_one, backend=backend, **given)
    runner.capture()
    slots = {buffer.name: buffer.tensor for buffer in runner.graphs.buffers}
    return Contestant(lowering, runner, None if lowering == ORACLE else runner.fill, slots, runner)


def by_hand(inputs: type[Inputs], backend: Backend, padded: int, name: str) -> Contestant:
    """A way that engines hand-write, or a bare replay: of a graph that holds the step, and nothing of a fill."""
    host = by_lowering(inputs, backend, padded, ORACLE)
    captured = host.runner.graphs.get(padded, frozenset())
    if captured is None:
        message = f"no graph was captured for {padded} rows"
        raise RuntimeError(message)
    graph, varying = captured.graph, inputs.slotgraph.varying
    if name == BARE:
        return Contestant(name, lambda _: graph.replay(), None, {}, host.runner)
    sizes = dict.fromkeys(varying, padded)
    filled = FillByHand(inputs.slotgraph, backend, sizes, grouped=name == REGROUPED, slots=host.slots)

    def fill(batch: Any) -> Any:
        return filled(batch, (batch.rows,) * len(varying))

    def step(batch: Any) -> Any:
        filled.fill(batch, (batch.rows,) * len(varying))
        graph.replay()
        return graph.outputs[: batch.rows]

    return Contestant(name, step, fill, host.slots, host.runner)


def verify(title: str, found: Sequence[Contestant], oracle: Contestant, batches: Iterable[tuple[int, Any]]) -> None:
    """Hold what each contestant leaves in the slots, and returns, to the oracle.

    Args:
        title: What they run.
        found: The contestants.
        oracle: A runner that fills slot by slot.
        batches: With their live rows.

    Raises:
        WrongBytesError: One fills something else, or returns other outputs.
    """
    stage = oracle.runner.parts.stage
    declared, wait = stage.declaration.slots, stage.backend.synchronize
    for rows, batch in batches:
        with torch.no_grad():
            outputs = oracle.step(batch)
        gone = {name for name, slot in declared.items() if slot.reads(name) and look_up(batch, name) is None}
        wanted = {name: None if name in gone else tensor for name, tensor in oracle.slots.items()}
        for one in found:
            for what, way in ((FILL, one.fill), (STEP, one.step)):
                if way is None or not one.slots:
                    continue
                with torch.no_grad():
                    returned = way(batch)
                wait()
                held = {name: None if name in gone else tensor for name, tensor in one.slots.items()}
                fault = next(differences(held, wanted, declared, {BATCH: rows, TOKENS: rows}), None)
                if what == STEP and (returned.shape != outputs.shape or difference(returned, outputs)):
                    fault = fault or "it returned other outputs"
                if fault is not None:
                    message = f"{title}, {rows} rows, the {what} of {one.name}: {fault}"
                    raise WrongBytesError(message)
