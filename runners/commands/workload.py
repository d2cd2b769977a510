"""What `slotgraph bench` runs: decode steps of any number of slots, by hand and by this library, held to the oracle."""

import types
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, Step
from ...dataflow.capabilities import CACHE_LOC, Lowering, Role
from ...dataflow.errors import WrongBytesError
from ...dataflow.inputs import Inputs
from ...dataflow.sampling import sample_batch, sampled_slots
from ...dataflow.slots import computed, copied
from ...dataflow.sources import look_up
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
    declaration, seeded = inputs.slotgraph, torch.Generator().manual_seed(rows)
    low = 100 * number
    values = {name: (low, low + 99) for name, slot in sampled_slots(declaration) if slot.dtype != torch.bool}
    live, capabilities = {BATCH: rows, TOKENS: rows}, backend.capabilities
    sample = sample_batch(declaration, capabilities, live, seeded, values=values, device=backend.device)
    return Batch(rows=rows, **sample.batch, **sample.side)


@attrs.frozen(eq=False)
class Contestant:
    """One way to fill, or to run a whole step.

    Attributes:
        what: Which of both.
        name: A lowering's, or that of a way by hand.
        call: Takes a batch.
        runner: Runs the step, or captured the graph that is replayed. Its buffers are what is filled.
    """

    what: str
    name: str
    call: Way
    runner: DecodeRunner[Any]


def contestants(inputs: type[Inputs], backend: Backend, padded: int) -> list[Contestant]:
    """Two by hand, a runner for each lowering that the backend has, and a bare replay, which fills nothing.

    The graph of the ways by hand holds the step, and nothing of a fill.
    """
    host, declaration = captured(inputs, backend, padded, ORACLE), inputs.slotgraph
    graph, found = host.graphs.captured[padded, frozenset()].graph, list[Contestant]()
    sizes, slots = dict.fromkeys(declaration.varying, padded), {one.name: one.tensor for one in host.graphs.buffers}

    def by_hand(name: str) -> list[Contestant]:
        filled = FillByHand(declaration, backend, sizes, grouped=name == REGROUPED, slots=slots)

        def step(batch: Any) -> Any:
            filled.fill(batch, (batch.rows,) * len(sizes))
            graph.replay()
            return graph.outputs[: batch.rows]

        fill = Contestant(FILL, name, lambda batch: filled(batch, (batch.rows,) * len(sizes)), host)
        return [fill, Contestant(STEP, name, step, host)]

    for lowering in backend.capabilities.lowerings:
        runner = captured(inputs, backend, padded, lowering)
        found += [Contestant(FILL, lowering, runner.fill, runner)] if lowering != ORACLE else []
        found.append(Contestant(STEP, lowering, runner, runner))
    return [*by_hand(PER_SLOT), *by_hand(REGROUPED), *found, Contestant(STEP, BARE, lambda _: graph.replay(), host)]


def captured(
    inputs: type[Inputs], backend: Backend, padded: int, lowering: Lowering, **options: Any
) -> DecodeRunner[Any]:
    """A captured runner: the public path, with sizing, routing and checks."""
    given: dict[str, Any] = {"buckets": [padded], "lowering": lowering, "progress": False, **options}
    runner = DecodeRunner(inputs, plus_one, backend=backend, **given)
    runner.capture()
    return runner


def verify(title: str, found: Sequence[Contestant], batches: Iterable[tuple[int, Any]]) -> None:
    """Hold what each contestant leaves in the slots, and what its steps return, to the lowering slot by slot.

    Args:
        title: What they run.
        found: The contestants, that lowering among them.
        batches: With their live rows.

    Raises:
        WrongBytesError: One fills something else, or returns other outputs.
    """
    oracle, *others = sorted((one for one in found if one.name != BARE), key=lambda one: one.name != ORACLE)
    stage = oracle.runner.parts.stage
    declared = stage.declaration.slots
    for rows, batch in batches:
        gone = {name for name, slot in declared.items() if slot.reads(name) and look_up(batch, name) is None}

        def run(one: Contestant, batch: Any = batch, gone: set[str] = gone) -> tuple[Any, Any]:
            """What it returns, and what it leaves in each slot that the batch has."""
            with torch.no_grad():
                returned = one.call(batch)
            stage.backend.synchronize()
            buffers = one.runner.graphs.buffers
            return returned, {name: None if name in gone else buffers[name].tensor for name in declared}

        outputs, wanted = run(oracle)
        for one in others:
            returned, held = run(one)
            faults = list(differences(held, wanted, declared, {BATCH: rows, TOKENS: rows}))
            if one.what == STEP and (returned.shape != outputs.shape or difference(returned, outputs)):
                faults.append("it returned other outputs")
            if faults:
                raise WrongBytesError(f"{title}, {rows} rows, the {one.what} of {one.name}: {faults[0]}")
