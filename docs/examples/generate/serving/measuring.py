"""Measuring: what a decode step takes in all, and what its graph takes alone; the rest is the price of its inputs."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import attrs
import torch

from serving.attention import paged
from serving.compiled import MODE, WARMUPS, check_compiles, compiled_step, graphs_skipped
from serving.engine import Engine
from serving.inputs import DecodeInputs
from serving.options import Options
from serving.ranks import as_first_says
from serving.request import Request
from serving.steady import Size, Steady
from serving.steps import Steps
from serving.timing import Contestant, Race, Spread, Wait

PLAIN, COMPILED, ALONE = WAYS = "DecodeRunner, step", "DecodeRunner, torch.compile(step)", f"{MODE} alone"
"""Whole steps that are compared: two through a runner, and transformers' own under torch.compile."""
FEWEST, MOST = 3, 100
"""Steps in a turn."""


@attrs.frozen(kw_only=True)
class Effort:
    """How much is timed.

    rounds: turns of each contestant. turn: seconds that one should take: on a device long beside its start, on a CPU
    short beside whatever else the machine does. every_size: each bucket, or the largest alone. ways: whether the host
    waits for each step. compare: whether compiled steps take part.
    """

    rounds: int
    turn: float
    every_size: bool
    ways: tuple[bool, ...]
    compare: bool


ON_A_DEVICE = Effort(rounds=11, turn=0.02, every_size=True, ways=(False, True), compare=True)
ON_A_CPU = Effort(rounds=15, turn=0.008, every_size=False, ways=(False,), compare=False)


@attrs.frozen(kw_only=True)
class StepTimes:
    """One decode step of `live` requests in a bucket, run in several ways, in microseconds.

    each: whether the host waited for each step; else `steps` of them ran one behind another, and it waited at the end.
    replay: a graph of the step alone, on whatever its inputs hold. whole: runner(batch). share: of `whole`, what it
    takes beyond `replay`, compared round by round. eager: the same step on the same view, not captured. ways: whole
    steps beside each other, by the names of `WAYS`; empty where they were not compared.
    """

    live: int
    bucket: int
    each: bool
    steps: int
    replay: Spread
    whole: Spread
    share: Spread
    eager: Spread
    ways: dict[str, Spread]


@attrs.frozen(kw_only=True)
class Measured:
    """All that was timed. device: not on a CPU. note: what is to be said of torch.compile, empty if nothing is."""

    rounds: int
    device: bool
    times: list[StepTimes]
    note: str


def measure(engine: Engine, options: Options, requests: Sequence[Request]) -> Measured | None:
    """Time the decode steps of a run that is over; None where there is nothing to time, or it is not wanted."""
    device, effort = is_device(engine), asked(engine, options)
    steady = Steady.after(engine, options, requests)
    sizes = steady.sizes()
    if not effort.rounds or not sizes:
        return None
    times: list[StepTimes] = []
    note = ""
    for size in sizes if effort.every_size else sizes[-1:]:
        batches = steady.batches(size)
        contestants = own_ways(engine, batches)
        others: dict[str, Contestant] = {}
        race = race_of(effort, contestants, engine.decode.stage.backend.synchronize)
        if effort.compare and size == sizes[-1]:
            others, note = _others(engine, batches, size, race, compiled=options.compile)
        own = COMPILED if options.compile else PLAIN
        times += [_timed(size, attrs.evolve(race, each=each), contestants, others, own) for each in effort.ways]
    return Measured(rounds=effort.rounds, device=device, times=times, note=note)


def is_device(engine: Engine) -> bool:
    """Whether steps run on something else than a CPU."""
    return engine.decode.stage.backend.device.type != "cpu"


def asked(engine: Engine, options: Options) -> Effort:
    """The usual effort, but for what the options ask."""
    effort = ON_A_DEVICE if is_device(engine) else ON_A_CPU
    rounds = effort.rounds if options.rounds is None else options.rounds
    return attrs.evolve(effort, rounds=rounds, compare=effort.compare if options.compare is None else options.compare)


@contextlib.contextmanager
def served(steps: Steps) -> Iterator[None]:
    """As in the engine."""
    with paged(steps.model), torch.inference_mode():
        yield


def own_ways(engine: Engine, batches: Sequence[DecodeInputs]) -> list[Contestant]:
    """The step's graph alone, runner(batch), and the same step on the same view without a graph.

    The first is captured for this: the runner's own graph may hold a part of the fill.
    """
    runner, step, backend = engine.decode, engine.step, engine.decode.stage.backend
    around = functools.partial(served, engine.steps)
    with around():
        view = runner.fill(batches[0])
        with backend.stream():
            step(view)
            backend.synchronize()
            graph = backend.capture(lambda: step(view))
    return [
        Contestant(lambda _: graph.replay(), around),
        Contestant(lambda number: runner(batches[number % len(batches)]), around),
        Contestant(lambda _: step(view), around),
    ]


def race_of(effort: Effort, contestants: Sequence[Contestant], wait: Wait) -> Race:
    """As many steps in a turn as there is time for by the second contestant, the whole step.

    Two rounds: the first warms all contestants up.
    """
    _, whole, *_ = Race(2, FEWEST, wait, each=True).run(contestants)
    steps = max(FEWEST, min(MOST, round(1e6 * effort.turn / whole[-1])))
    return Race(effort.rounds, as_first_says(steps), wait)


def _others(
    engine: Engine, batches: Sequence[DecodeInputs], size: Size, race: Race, *, compiled: bool
) -> tuple[dict[str, Contestant], str]:
    """The ways beside the engine's own, by name, and what is to be said: why one cannot be timed, or made no graph."""
    other, skipped = PLAIN if compiled else COMPILED, graphs_skipped()
    ways = {
        other: functools.partial(_through_runner, engine, batches, size, compiled=not compiled),
        ALONE: functools.partial(_alone, engine, batches, race),
    }
    found: dict[str, Contestant] = {}
    notes: list[str] = []
    for name, make in ways.items():
        try:
            one = make()
            attrs.evolve(race, rounds=1).run([one])
        except Exception as error:  # noqa: BLE001 - torch may raise anything here, and nothing else depends on it
            notes.append(f"{name} was not timed: {type(error).__name__}: {_first_line(error)}")
        else:
            found[name] = one
    if skipped := graphs_skipped() - skipped:
        notes.append(f"{ALONE} ran without CUDA graphs: torch skipped them ({skipped} times)")
    return found, ". ".join(notes)


def _through_runner(engine: Engine, batches: Sequence[DecodeInputs], size: Size, *, compiled: bool) -> Contestant:
    """The step that the engine does not run, as written or compiled, captured for one bucket."""
    if compiled:
        check_compiles(engine.decode.stage.backend.name)
    runner = engine.decoder(engine.steps.decoding(compiled=compiled), [size.bucket], progress=False)
    around = functools.partial(served, engine.steps)
    with around():
        runner.capture()
    return Contestant(lambda number: runner(batches[number % len(batches)]), around)


def _alone(engine: Engine, batches: Sequence[DecodeInputs], race: Race) -> Contestant:
    with torch.inference_mode():
        reach = engine.decode.fill(batches[0]).block_tables.shape[1] * engine.steps.cache.page_size
    return compiled_step(engine.steps.model, batches, max(reach, race.steps + WARMUPS + 2))


def _timed(
    size: Size, race: Race, contestants: Sequence[Contestant], others: dict[str, Contestant], own: str
) -> StepTimes:
    replay, whole, eager, *rest = race.run([*contestants, *others.values()])
    ways = {own: whole, **dict(zip(others, rest, strict=True))} if others else {}
    return StepTimes(
        live=size.live,
        bucket=size.bucket,
        each=race.each,
        steps=race.steps,
        replay=Spread.of(replay),
        whole=Spread.of(whole),
        share=Spread.of([1 - alone / all_of_it for alone, all_of_it in zip(replay, whole, strict=True)]),
        eager=Spread.of(eager),
        ways={name: Spread.of(ways[name]) for name in WAYS if name in ways},
    )


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no more is known")
