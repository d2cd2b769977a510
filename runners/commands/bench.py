"""What `slotgraph bench` runs: decode steps of any number of slots, by hand and by this library, held to the oracle."""

import functools
import itertools
import math
import operator
import types
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs
import torch
from rich.console import Console

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
from ..explained.pages import Table
from ..testing.benchmarks import PER_SLOT, REGROUPED, SETS, FillByHand, Way
from ..testing.ground import difference, differences
from ..testing.timing import Run, measure

SIZES: Final = ((1, 1), (7, 8), (37, 48), (200, 256), (4096, 4096))
"""Live and padded rows."""
BARE: Final = "bare"
ORACLE: Final[Lowering] = "slot_by_slot"
FILL: Final = "fill"
STEP: Final = "step"
_TITLES: Final = {FILL: "fill and view", STEP: "whole step: fill, view and replay"}
_TIMES: Final = {"host_us": "host", "gpu_us": "device"}
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

Row = dict[str, Any]


FULL: Final = (50, 20, 9)
QUICK: Final = (5, 5, 3)
"""How long to measure: rounds on the host, the steps of each round, and rounds on the device."""


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
    stage = oracle.runner.stage
    declared = stage.declaration.slots

    def run(one: Contestant, batch: Any) -> tuple[Any, Any]:
        """What it returns, and what it leaves in each slot that the batch has."""
        with torch.no_grad():
            returned = one.call(batch)
        stage.backend.synchronize()
        gone = {name for name, slot in declared.items() if slot.reads(name) and look_up(batch, name) is None}
        buffers = one.runner.graphs.buffers
        return returned, {name: None if name in gone else buffers[name].tensor for name in declared}

    for rows, batch in batches:
        outputs, wanted = run(oracle, batch)
        for one in others:
            returned, held = run(one, batch)
            faults = list(differences(held, wanted, declared, {BATCH: rows, TOKENS: rows}))
            if one.what == STEP and (returned.shape != outputs.shape or difference(returned, outputs)):
                faults.append("it returned other outputs")
            if faults:
                raise WrongBytesError(f"{title}, {rows} rows, the {one.what} of {one.name}: {faults[0]}")


def measured_rows(backend: Backend, counts: Sequence[int], effort: tuple[int, int, int]) -> list[Row]:
    """Fills and whole steps of all contestants, for each number of slots. WrongBytesError if one fills wrongly."""
    rows, runs = list[Row](), list[Run]()
    for count, (live, padded) in itertools.product(counts, SIZES):
        inputs = declare_decode(count)
        found, drawn = contestants(inputs, backend, padded), functools.partial(draw, inputs, backend)
        batches = [drawn(live, number) for number in range(SETS)]
        others = [(size, drawn(size)) for size in (padded, 1, live)]  # that grow and shrink
        verify(f"{count} slots", found, [*((live, batch) for batch in batches), *others])
        told = {"slots": count, "live": live, "padded": padded}
        rows += [{"what": one.what, "lowering": one.name, **told} for one in found]
        runs += [Run(one.call, batches) for one in found]
    measure(runs, backend, *effort)
    return [{**row, **run.as_data()} for row, run in zip(rows, runs, strict=True)]


def show_rows(rows: Sequence[Row], ours: str, console: Console) -> None:
    """Print medians of fills and of whole steps, and how many times more than `ours` the hand-written ones take."""
    for (what, title), (time, where) in itertools.product(_TITLES.items(), _TIMES.items()):
        timed = [row for row in rows if row["what"] == what and row[time] is not None]
        names = list(dict.fromkeys(row["lowering"] for row in timed))
        shown = list[Row]()
        for (slots, live, padded), group in itertools.groupby(timed, operator.itemgetter("slots", "live", "padded")):
            times = {row["lowering"]: row[time] for row in group}
            cells: Row = {"slots": slots, "rows": f"{live}/{padded}"}
            cells |= {name.replace("_", "\n"): times.get(name) for name in names}
            for name in (PER_SLOT, REGROUPED) if ours in names else ():
                ratio = times.get(name, math.nan) / times.get(ours, math.nan)
                cells |= {f"{name}_/ ours".replace("_", "\n"): f"{ratio:.1f} x"} if name in names else {}
            shown.append(cells)
        if shown:
            console.print(Table(f"{where} microseconds, {title}", shown))
    console.print(f"ours: {ours}, which this backend prefers")
