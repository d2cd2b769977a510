"""`slotgraph bench`: times steps of a runner, of a declaration or built-in ones, with each way to fill them."""

import itertools
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from ...backends.base import Backend
from ...dataflow.axes import BATCH, TOKENS, WIDTH
from ...dataflow.capabilities import AUTO, CACHE_LOC, LoweringName, Role, chosen_lowering
from ...dataflow.errors import ConfigError, SlotGraphError
from ...dataflow.inputs import Inputs
from ...dataflow.shown import Table
from ...dataflow.slots import computed, copied
from ...dataflow.tails import Number
from ..decode import DecodeRunner, RequestRunner
from ..engine.runner import Runner
from ..explained.pages import Explained
from ..prefill import StackRunner
from ..recording.records import versions
from .benchmarks import ORACLE, PADDED, SETS, Contestant, Drawn, draw, verify, ways_to_fill
from .by_hand import COMPILED, PER_SLOT, REGROUPED, fill_by_hand
from .ground import LIVE, Ground
from .timing import THREADS, Run, measure

ANY: Final = "any"
"""Marks live rows that differ in each step: up to 256 sizes, each once, in random order."""
GIVEN: Final = "given"
"""Marks the live rows of the caller's batches."""
SIZES: Final[Mapping[int, Sequence[int | str]]] = {1: (1,), 8: (7,), 48: (37,), 256: (200, ANY), 4096: (4096,)}
"""The buckets of our own decode steps, and their live rows."""
BARE: Final = "bare"
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
_WAITS: Final = "- means that the host cannot get ahead of the device, so that its time cannot be measured alone."
_CLOCKS: Final = (("host_us", "host", ""), ("gpu_us", "device", _WAITS))
"""The clocks of a table: the key in a row, the clock's name, and a note on missing figures."""
Measured = RequestRunner[Any] | StackRunner[Any]
Batches = Callable[[int, torch.Generator], Any] | Iterable[Any]
"""Batches, or a function that makes one of so many rows. Each may be a pair with side arguments."""


def smallest_step(view: Any, /) -> Any:
    """Run the smallest possible step, so that its graph hides no time of a fill."""
    return next(slot for slot in vars(view).values() if isinstance(slot, torch.Tensor)).clone()


def declare_decode(slots: int, **more: Any) -> type[Inputs]:
    """Declare a decode step of `count` slots, at least 2: copied ones and one count. more: Slots to add or replace."""
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


def shuffled(most: int) -> list[int]:
    """Return all sizes up to one, in random order."""
    order = torch.randperm(most, generator=torch.Generator().manual_seed(3), device="cpu")
    return [1 + place for place in order.tolist()]


def ways_to_step(
    runner: RequestRunner[Any], bucket: int, hands: Sequence[str]
) -> tuple[Contestant, dict[str, Contestant]]:
    """Return the oracle, and whole steps of one bucket: by hand, by a runner for each lowering, and a bare replay."""
    stage = runner.stage
    found = dict[str, Contestant]()
    runners = {name: captured(runner, name, bucket) for name in stage.backend.capabilities.lowerings}
    graphs = runners[ORACLE].graphs
    graph = next(iter(graphs.captured.values())).graph
    rows = graphs.output_rows

    def by_hand(way: str) -> Contestant:
        padded = runner.sizes[bucket]
        fill = fill_by_hand(stage.declaration, stage.backend, padded, graphs.buffers, way, in_graph=True)

        def step(one: Drawn) -> Any:
            fill(one.batch, one.rows, one.side)
            graph.replay()
            outputs = graph.outputs
            return outputs[: one.sizes[rows]] if rows and isinstance(outputs, torch.Tensor) else outputs

        return Contestant(step, graphs.buffers)

    def by(made: DecodeRunner[Any]) -> Contestant:
        return Contestant(lambda one: made(one.batch, **one.side), made.graphs.buffers)

    found = {way: by_hand(way) for way in hands} | {name: by(made) for name, made in runners.items()}
    return found[ORACLE], {**found, BARE: Contestant(lambda _: graph.replay(), graphs.buffers)}


def captured(runner: RequestRunner[Any], lowering: LoweringName, bucket: int) -> DecodeRunner[Any]:
    """Return the same runner with another lowering, and with one captured bucket."""
    plain: Any = {"max_waste": 1.0, "debug": False, "lazy": False, "graphs": True, "progress": False}
    made = runner.remade(lowering=lowering, buckets=[bucket], **plain)
    made.capture()
    return made


def cases(
    runner: Measured, lives: Sequence[int | str], hands: Sequence[str], batches: Batches | None = None
) -> Iterator[tuple[Row, Run]]:
    """Yield a row and a run for each way to fill a runner's largest bucket, and for each number of live rows.

    They are whole steps, if its graphs are. Raise WrongBytesError if a way fills wrongly.
    """
    bucket = runner.buckets.largest
    declaration = runner.stage.declaration
    lead = BATCH if runner.is_whole else TOKENS
    ground = Ground(runner.stage, runner.sizes[bucket])
    if isinstance(runner, RequestRunner):
        oracle, ways = ways_to_step(runner, bucket, hands)
    else:
        oracle, ways = ways_to_fill(ground, hands=hands)

    def sized(made: Any) -> Drawn:
        batch, side = made if isinstance(made, tuple) else (made, {})
        *rows, leading = runner.size(batch, side)
        sizes = {**ground.most, **dict(zip(declaration.varying, rows, strict=True)), lead: leading}
        return Drawn(batch, side, sizes, tuple(rows))

    def drawn(rows: int, number: int) -> Drawn:
        if callable(batches):
            return sized(batches(rows, torch.Generator().manual_seed(number)))
        requests = {BATCH: min(rows, ground.part({})[BATCH])} if BATCH in ground.leads else {}
        return draw(ground, {**requests, lead: rows}, number)

    for live in lives:
        sizes = shuffled(bucket)[:PADDED] if live == ANY else [int(live)] * SETS if live != GIVEN else ()
        timed = [drawn(size, number) for number, size in enumerate(sizes)]
        timed += [] if batches is None or callable(batches) else map(sized, batches)
        others = [drawn(size, 0) for size in (bucket, 1, sizes[0])] if sizes else []  # of random sizes
        over = f"{len(declaration.slots)} slots", declaration, ground.backend, oracle
        every = [(one.sizes, one) for one in (*timed, *others)]
        filling = {name: way for name, way in ways.items() if name not in (BARE, COMPILED)}
        verify(*over, filling, every, outputs=runner.cuts and runner.stage.step is smallest_step)  # may be random
        why = ""
        try:
            verify(*over, {COMPILED: ways[COMPILED]} if COMPILED in ways else {}, every, outputs=False)
        except SlotGraphError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            paragraph, *_ = str(error).split("\n\n")
            why = f"it is not compiled here: {type(error).__name__}: {' '.join(paragraph.split())}"
        for name, way in ways.items():
            note = why if name == COMPILED else ""
            row = {"slots": len(declaration.slots), "live": live, "padded": bucket, "lowering": name, "note": note}
            yield row, Run(way.call, () if note else timed)


@attrs.frozen(repr=False)
class BenchReport(Explained):
    """What a benchmark has measured.

    Attributes:
        rows: A row for each way and case: slots, live and padded rows, lowering, microseconds of a step, and a note if
            it was not measured.
        conditions: The target, the machine, and the time.
    """

    rows: Sequence[Row]
    conditions: Mapping[str, Any]

    def tables(self) -> Iterator[Table]:
        """Yield medians of a step, and how many times longer the hand-written ones take."""
        about = self.conditions
        device = self.conditions["device"]
        ours = about["ours"]
        what = about["measured"]
        told = (
            "A whole step is fill, view and replay; rows are live/padded, and any are steps that each have another "
            f"number of live rows. Ours is {ours}, which this {'runner' if about['target'] else 'backend'} prefers."
        )
        notes = dict.fromkeys(f"{row['lowering']}: {row['note']}" for row in self.rows if row.get("note"))
        subject = f" of {about['target']}" if about["target"] else ""
        made = f"slotgraph {about['slotgraph']}, torch {about['torch']}; {about['date']}"
        text = "\n".join([told, *notes, *([ON_A_CPU] if device == "cpu" else ())])
        yield Table(f"slotgraph bench{subject} on {device}; {made}", text=text)
        slots = dict.fromkeys(row["slots"] for row in self.rows)
        for count, (key, which, missing) in itertools.product(slots, _CLOCKS):
            cases: dict[str, Row] = {}
            for row in self.rows:
                if row["slots"] == count and row[key] is not None:
                    case = f"{row['live']}/{row['padded']}"
                    name = row["lowering"] + " (ours)" * (row["lowering"] == ours)
                    cases.setdefault(case, {"rows": case})[name] = row[key]
            for times in cases.values():
                for name in (PER_SLOT, REGROUPED, COMPILED):
                    if {name, f"{ours} (ours)"} <= times.keys():
                        times[f"{name} / ours"] = f"{times[name] / times[f'{ours} (ours)']:.1f} x"
            if cases:
                title = f"{which} microseconds of a {what} with {count} slots on {device}"
                yield Table(title, [*cases.values()], missing, drawn=True)


def bench(
    target: Runner[Any] | type[Inputs] | None = None,
    batches: Batches | None = None,
    *,
    slots: Iterable[int] = (4, 12, 48),
    quick: bool = False,
    backend: str | Backend = "auto",
    **options: Any,
) -> BenchReport:
    """Measure the cost of a step's inputs with this library and by hand, all alternating in one run.

    By hand they are written slot by slot, regrouped for foreach copies, and compiled by torch.compile; by this library
    they are filled by each lowering that the backend has. All run the same step: the runner's own, or the smallest
    possible. Each is first compared with the slot-by-slot lowering, byte for byte. A bare replay shows what the step
    takes alone. Runners that capture a part of their step are measured by their fills.

    Args:
        target: A runner, captured or not, which is measured in its largest bucket and captured once more for each
            lowering, or a declaration. By default built-in decode steps.
        batches: Batches, or a function of rows and a generator that makes one. Each may be a pair with side arguments.
            By default they are drawn, three quarters full and of sizes that were never seen.
        slots: The number of slots of built-in decode steps.
        quick: Measure a few rounds only, and compile nothing.
        backend: The backend for a declaration or for built-in steps.
        options: Options of the `DecodeRunner` of a declaration. By default it has one bucket of 256 requests, and 8
            rows on further varying axes and 3 on fixed ones.

    Raises:
        WrongBytesError: A way leaves other bytes than the slot-by-slot lowering.
        ConfigError: An argument does not fit, or a batch cannot be drawn.
        CaptureError: The runner's step cannot be captured.
    """
    hands = (PER_SLOT, REGROUPED) if target is None or quick else (PER_SLOT, REGROUPED, COMPILED)
    measured = list[tuple[Measured, Sequence[int | str]]]()
    if target is None:
        for count, (bucket, lives) in itertools.product(sorted({*slots}), SIZES.items()):
            inputs = declare_decode(count)
            measured.append((runner_of(inputs, buckets=[bucket], output_rows=TOKENS, backend=backend), lives))
    else:
        only = _runner_to_measure(target, backend, options)
        known = max(1, int(only.buckets.largest * LIVE))
        measured.append((only, (known, ANY) if batches is None or callable(batches) else (GIVEN,)))
    found = [pair for runner, lives in measured for pair in cases(runner, lives, hands, batches)]
    runner, _ = measured[-1]
    on = runner.stage.backend
    ways = {row["lowering"] for row, _ in found}
    wanted = chosen_lowering(on.capabilities, runner.config.lowering)
    measure([run for _, run in found if run.batches], on, *(QUICK if quick else FULL))
    about = {
        "target": "" if target is None else f"{runner.name} of {runner.stage.declaration.name}",
        "measured": "whole step" if runner.is_whole else "fill",
        "ours": next(name for name in (wanted, *on.capabilities.lowerings) if name in ways),
        "backend": on.name,
        "device": getattr(torch.get_device_module(on.device), "get_device_name", str)(on.device),
        "threads": THREADS,
        "quick": quick,
        "date": time.strftime("%Y-%m-%d"),
        **versions(),
    }
    return BenchReport([{**row, **run.as_data()} for row, run in found], about)


def _runner_to_measure(target: object, backend: str | Backend, options: Mapping[str, Any]) -> Measured:
    """Return the runner, or one of the declaration. Raise ConfigError if it cannot be measured."""
    if isinstance(target, type) and issubclass(target, Inputs):
        return runner_of(target, backend=backend, **options)
    plain = not options and backend == AUTO
    if (
        plain
        and isinstance(target, RequestRunner | StackRunner)
        and target.coordinator.size == 1
        and not target.variants
    ):
        return target
    raise ConfigError(
        "bench measures a declaration, or a runner of one rank that captures graphs for buckets of one axis without "
        "variants, with the options that it has; got "
        f"{target!r}{f' and {[*options]}' if options else ''}"
    )


def runner_of(inputs: type[Inputs], **options: Any) -> DecodeRunner[Any]:
    """Return a runner of a declaration and the smallest step, with usual sizes for all axes without one."""
    usual = {axis: 3 if axis.fixed else 8 for axis in inputs.slotgraph.axes if axis not in (BATCH, TOKENS, WIDTH)}
    given: dict[str, Any] = {"buckets": [PADDED], "output_rows": None, **options}
    given["sizes"] = {**usual, **options.get("sizes", {})}
    return DecodeRunner(inputs, smallest_step, **given)
