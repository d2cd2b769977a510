"""The benchmark of `slotgraph bench`: decode steps of any number of slots, by hand and by this library."""

import functools
import itertools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS
from ...dataflow.capabilities import CACHE_LOC, LoweringName, Role
from ...dataflow.inputs import Inputs
from ...dataflow.slots import computed, copied
from ...dataflow.tails import Number
from ..decode import DecodeRunner
from ..engine.sampling import sample_batch
from ..explained.pages import Table
from ..testing.benchmarks import PER_SLOT, REGROUPED, SETS, ByHand, Contestant, fill_by_hand, verify
from ..testing.timing import Run, measure

SIZES: Final = ((1, 1), (7, 8), (37, 48), (200, 256), (4096, 4096))
"""Live and padded rows."""
ANY: Final = "any"
"""Marks live rows that differ in each step: each size up to the bucket's once, in random order."""
ANY_OF: Final = 256
"""The bucket of these steps."""
ORACLE: Final[LoweringName] = "slot_by_slot"
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
"""Name, axis, dtype and tail of the slots that engines give a decode step.

Further slots repeat them under other names.
"""

Row = dict[str, Any]
FULL: Final = (50, 20, 9)
QUICK: Final = (5, 5, 3)
"""How long to measure: rounds on the host, the steps of each round, and rounds on the device."""
ON_A_CPU: Final = "A CPU shows no device's gain, as it has no launches to save: measure on the device you serve on."

_WAITS: Final = "- stands where the host cannot get ahead of the device, and so its time cannot be measured alone."


class Batch(types.SimpleNamespace):
    """One batch: its sources as attributes, like an engine's own batch, with its live rows."""

    rows: int


def plus_one(view: Any) -> Any:
    """Run the smallest possible step, so that its graph hides no time of a fill."""
    return view.input_ids + 1


def declare_decode(slots: int, **more: Any) -> type[Inputs]:
    """Declare a decode step of so many slots, at least 2: all copied but a count. more: Slots to add or replace."""
    body: dict[str, Any] = {}
    for index in range(slots - 1):
        again, which = divmod(index, len(_SLOTS))
        name, axis, dtype, pad = _SLOTS[which]
        body[f"{name}_{again}" if again else name] = copied(axis, dtype=dtype, pad=pad)
    body |= {"num_token_non_padded": computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)}
    body |= more
    body |= {"__annotations__": dict.fromkeys(body, torch.Tensor), "__module__": __name__}
    made: type[Inputs] = types.new_class(f"Decode{slots}", (Inputs,), {}, lambda space: space.update(body))
    return made


def draw(inputs: type[Inputs], backend: Backend, rows: int, number: int = 0) -> Batch:
    """Draw a batch with seeded values. Under another number all of them differ, except bools."""
    declaration, seeded = inputs.slotgraph, torch.Generator().manual_seed(rows)
    low = 100 * number
    values = {name: (low, low + 99) for name in declaration.sources if declaration.slots[name].dtype != torch.bool}
    live, capabilities = {BATCH: rows, TOKENS: rows}, backend.capabilities
    sample = sample_batch(declaration, capabilities, live, seeded, values=values, device=backend.device)
    return Batch(rows=rows, **sample.batch, **sample.side)


def contestants(inputs: type[Inputs], backend: Backend, padded: int) -> dict[str, Contestant]:
    """Return whole steps by name: two by hand, a runner for each lowering, and a bare replay without a fill."""
    found, declaration = dict[str, Contestant](), inputs.slotgraph
    runners = {name: captured_runner(inputs, backend, padded, name) for name in backend.capabilities.lowerings}
    graph, axes = runners[ORACLE].graphs.captured[padded, frozenset()].graph, declaration.varying
    buffers = runners[ORACLE].graphs.buffers
    for name in (PER_SLOT, REGROUPED):
        fill = fill_by_hand(declaration, backend, dict.fromkeys(axes, padded), buffers, grouped=name == REGROUPED)

        def step(batch: Any, fill: ByHand = fill) -> Any:
            fill(batch, (batch.rows,) * len(axes))
            graph.replay()
            return graph.outputs[: batch.rows]

        found[name] = Contestant(step, buffers)
    found |= {name: Contestant(runner, runner.graphs.buffers) for name, runner in runners.items()}
    return {**found, "bare": Contestant(lambda _: graph.replay(), buffers)}


def captured_runner(
    inputs: type[Inputs], backend: Backend, padded: int, lowering: LoweringName, **options: Any
) -> DecodeRunner[Any]:
    """Return a captured runner: the public path, with sizing, routing and checks."""
    options |= {"buckets": [padded], "lowering": lowering, "progress": False}
    runner = DecodeRunner(inputs, plus_one, backend=backend, **options)
    runner.capture()
    return runner


def shuffled(most: int) -> list[int]:
    """Return all sizes up to one, in random order."""
    order = torch.randperm(most, generator=torch.Generator().manual_seed(3), device="cpu")
    return [1 + place for place in order.tolist()]


def measured_rows(backend: Backend, counts: Sequence[int], effort: tuple[int, int, int]) -> list[Row]:
    """Measure whole steps of all contestants, for each number of slots. Raise WrongBytesError if one fills wrongly."""
    rows, runs = list[Row](), list[Run]()
    cases: tuple[tuple[int | str, int], ...] = (*SIZES, (ANY, ANY_OF))
    for count, (live, padded) in itertools.product(counts, cases):
        inputs = declare_decode(count)
        found, drawn = contestants(inputs, backend, padded), functools.partial(draw, inputs, backend)
        sizes = shuffled(padded) if isinstance(live, str) else [live] * SETS
        batches = [drawn(size, number) for number, size in enumerate(sizes)]
        others = [drawn(size) for size in (padded, 1, sizes[0])]  # batches that grow and shrink
        sized = ((dict.fromkeys((BATCH, TOKENS), one.rows), one) for one in (*batches, *others))
        verify(f"{count} slots", inputs.slotgraph, backend, found[ORACLE], found, sized)
        rows += [{"slots": count, "live": live, "padded": padded, "lowering": name} for name in found]
        runs += [Run(one.call, batches) for one in found.values()]
    measure(runs, backend, *effort)
    return [{**row, **run.as_data()} for row, run in zip(rows, runs, strict=True)]


def tables_of_rows(rows: Sequence[Row], about: Mapping[str, Any]) -> Iterator[Table]:
    """Yield medians of whole steps, and how many times longer the hand-written ones take. about: The conditions."""
    ours, device = about["ours"], about["device"]
    told = (
        "A whole step is fill, view and replay; rows are live/padded, and any/256 are steps that each have another "
        f"number of live rows. Ours is {ours}, which this backend prefers.\n"
    )
    title = f"slotgraph bench on {device}; slotgraph {about['slotgraph']}, torch {about['torch']}; {about['date']}"
    yield Table(title, text=told + ON_A_CPU * (device == "cpu"))
    for time, which, missing in (("host_us", "host", ""), ("gpu_us", "device", _WAITS)):
        cases: dict[str, Row] = {}
        for row in rows:
            if row[time] is not None:
                cases.setdefault(f"{row['slots']}, {row['live']}/{row['padded']}", {})[row["lowering"]] = row[time]
        for case, times in cases.items():
            ratios = {
                f"{name} / ours": f"{times[name] / times[ours]:.1f} x"
                for name in (PER_SLOT, REGROUPED)
                if {name, ours} <= times.keys()
            }
            cases[case] = {"slots, rows": case, **times, **ratios}
        if cases:
            yield Table(f"{which} microseconds of a whole step on {device}", [*cases.values()], missing, drawn=True)
