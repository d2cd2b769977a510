"""Measuring: what a step takes in all, and what its graph takes alone; the rest is the price of its inputs."""

import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import attrs
import torch
import torch.distributed as dist
from transformers import StaticCache

from serving.attention import SDPA, PageAllocator, attend_within_requests, paged
from serving.engine import Engine
from serving.inputs import DecodeInputs, decode_batch, prefill_batch
from serving.options import Options
from serving.request import Request
from serving.steps import Steps, check_compiles
from slotgraph import EagerRunner
from slotgraph.runners.testing.timing import Spread

Times: TypeAlias = dict[str, Any]
# One way to run a step, which takes its number; and what holds while its steps run.
Contestant: TypeAlias = tuple[Callable[[int], object], Callable[[], AbstractContextManager[object]]]
MODE = "reduce-overhead"
PLAIN, MASKED, COMPILED, ALONE = WAYS = (
    "DecodeRunner, step",
    "DecodeRunner, step by sdpa",
    "DecodeRunner, torch.compile(step)",
    f"{MODE} alone",
)
"""Whole steps that are compared: three through a runner, and transformers' own under torch.compile."""
FEWEST, MOST = 3, 100  # steps in a turn
WARMUPS = 6  # torch.compile compiles in the first step, records in the second, and checks in the third
VARIANTS, MOST_SIZES = 4, 4
CPU_TOKENS = 128  # of a timed prefill step on a CPU, which shows only that it can be measured


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
ON_A_CPU = Effort(rounds=5, turn=0.008, every_size=False, ways=(False,), compare=False)


@attrs.frozen
class Race:
    """Contestants take turns of so many steps in each round; each: the host waits for each step, not for each turn."""

    rounds: int
    steps: int
    wait: Callable[[], object]
    each: bool = False

    @classmethod
    def of(cls, effort: Effort, contestants: Sequence[Contestant], wait: Callable[[], object]) -> "Race":
        """As many steps in a turn as the second contestant has time for once it is warm, the same in all ranks."""
        _, whole, *_ = cls(2, FEWEST, wait, each=True).run(contestants)
        steps = [max(FEWEST, min(MOST, round(1e6 * effort.turn / whole[-1])))]
        if dist.is_initialized():
            dist.broadcast_object_list(steps)
        return cls(effort.rounds, steps[0], wait)

    def run(self, contestants: Sequence[Contestant]) -> list[list[float]]:
        """Microseconds a step for each contestant and round, without the garbage collector's pauses."""
        gc.collect()
        gc.disable()
        try:
            rounds = [[self._turn(contestant) for contestant in contestants] for _ in range(self.rounds)]
        finally:
            gc.enable()
        return [list(one) for one in zip(*rounds, strict=True)]

    def _turn(self, contestant: Contestant) -> float:
        (step, around), wait, each = contestant, self.wait, self.each
        with around():
            step(0)  # untimed: it brings back what the others put out of the way
            wait()
            begin = time.perf_counter()
            for number in range(1, self.steps + 1):
                step(number)
                if each:
                    wait()
            wait()
            return 1e6 * (time.perf_counter() - begin) / self.steps


def measure(engine: Engine, options: Options, requests: Sequence[Request], fill: Spread | None) -> Times | None:
    """Time the decode steps of a run that is over; None where there is nothing to time, or it is not wanted.

    fill: what the host takes to fill the inputs, as it was timed by itself.

    Each of the times is of one decode step of `live` requests in a bucket, run in several ways, in microseconds.
    each: whether the host waited for each step; else `steps` of them ran one behind another, and it waited at the end.
    replay: a graph of the step alone, on whatever its inputs hold. whole: runner(batch). share: of `whole`, what it
    takes beyond `replay`, compared round by round; on a CPU, whose rounds differ by more than that, what `fill` takes.
    eager: the same step on the same view, not captured. ways: whole steps beside each other, by the names of `WAYS`;
    empty where they were not compared. note: of torch.compile.
    """
    backend, effort = engine.decode.stage.backend, effort_of(engine, options)
    decoded, sizes = to_time(engine, options, requests)
    if not effort.rounds or not sizes:
        return None
    times: list[Times] = []
    note = ""
    for live, bucket in sizes if effort.every_size else sizes[-1:]:
        batches = batches_of(engine, options, decoded[:live])
        contestants = _own_ways(engine, batches)
        race = Race.of(effort, contestants, backend.synchronize)
        others: dict[str, Contestant] = {}
        if bucket == sizes[-1][1]:
            others, note = _others(engine, batches, bucket, race, options, compare=effort.compare)
        own = COMPILED if options.compile else PLAIN
        for each in effort.ways:
            replay, whole, eager, *rest = attrs.evolve(race, each=each).run([*contestants, *others.values()])
            ways = {own: whole, **dict(zip(others, rest, strict=True))} if others else {}
            shares = [1 - alone / every for alone, every in zip(replay, whole, strict=True)]
            if fill is not None and not is_device(engine):
                shares = [fill.median / every for every in whole]
            times.append(
                {
                    "live": live,
                    "bucket": bucket,
                    "each": each,
                    "steps": race.steps,
                    "replay": Spread.of(replay),
                    "whole": Spread.of(whole),
                    "share": Spread.of(shares),
                    "eager": Spread.of(eager),
                    "ways": {name: Spread.of(ways[name]) for name in WAYS if name in ways},
                }
            )
    return {"rounds": effort.rounds, "device": is_device(engine), "times": times, "note": note}


def measure_prefill(engine: Engine, options: Options, requests: Sequence[Request]) -> Times | None:
    """The same for a prefill step of as many requests as fit; ratio: eager beside whole, compared round by round."""
    runner, backend, effort = engine.prefill, engine.decode.stage.backend, effort_of(engine, options)
    if isinstance(runner, EagerRunner) or not effort.rounds:
        return None
    room = options.max_prefill_tokens if is_device(engine) else CPU_TOKENS
    ends = accumulate(len(request.prompt_ids) for request in requests[: options.max_batch])
    together = _placed(engine, options, requests[: sum(end <= room for end in ends)])
    batch = prefill_batch(together, options.page_size, backend.device)
    decision = runner.decide(batch)
    if decision.bucket is None or not together:
        return None
    eagerly = EagerRunner(runner.stage.inputs, engine.steps.prefill(attend_within_requests), backend=backend)
    around = functools.partial(served, engine.steps)
    contestants: list[Contestant] = [(lambda _: eagerly(batch), around), (lambda _: runner(batch), around)]
    eager, whole = Race.of(effort, contestants, backend.synchronize).run(contestants)
    return {
        "path": decision.path,
        "requests": len(together),
        "tokens": sum(batch.lengths),
        "bucket": decision.bucket,
        "whole": Spread.of(whole),
        "eager": Spread.of(eager),
        "ratio": Spread.of([one / other for one, other in zip(eager, whole, strict=True)]),
    }


def to_time(
    engine: Engine, options: Options, requests: Sequence[Request]
) -> tuple[list[Request], list[tuple[int, int]]]:
    """Requests that have decoded, and of how many of them in which bucket a step may be timed, the largest last."""
    decoded = [request for request in requests if len(request.generated) > 1][: options.max_batch]
    report = engine.decode.report
    return decoded, _sizes(() if report is None else report.captured, len(decoded))


def is_device(engine: Engine) -> bool:
    """Whether its steps run on something else than the host."""
    return engine.decode.stage.backend.device.type != "cpu"


def effort_of(engine: Engine, options: Options) -> Effort:
    """The usual effort, but for what the options ask."""
    effort = ON_A_DEVICE if is_device(engine) else ON_A_CPU
    given: dict[str, Any] = {"rounds": options.rounds, "compare": options.compare}
    return attrs.evolve(effort, **{name: value for name, value in given.items() if value is not None})


@contextlib.contextmanager
def served(steps: Steps) -> Iterator[None]:
    """As in the engine."""
    with paged(steps.model), torch.inference_mode():
        yield


def _sizes(buckets: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Live requests and their bucket, a request less than it holds, so that there is a tail; the largest last."""
    sizes = [(min(max(bucket - 1, smaller + 1), most), smaller, bucket) for smaller, bucket in pairwise((0, *buckets))]
    filled = [(live, bucket) for live, smaller, bucket in sizes if live > smaller]
    return filled[::-1][:: max(1, -(-len(filled) // MOST_SIZES))][::-1]


def batches_of(engine: Engine, options: Options, requests: Sequence[Request]) -> list[DecodeInputs]:
    """Batches in the middle of texts, with their own tensors: a step must not find its inputs where it left them."""
    again, device = _placed(engine, options, requests), engine.decode.stage.backend.device

    def earlier(request: Request, variant: int) -> Request:
        return attrs.evolve(request, generated=request.generated[: max(1, len(request.generated) // 2 - variant)])

    variants = ([earlier(request, variant) for request in again] for variant in range(VARIANTS))
    return [decode_batch(requests, engine.width, device) for requests in variants]


def _placed(engine: Engine, options: Options, requests: Sequence[Request]) -> list[Request]:
    """The requests of a run that is over, with pages again."""
    take = PageAllocator(engine.steps.cache.pages).take
    return [attrs.evolve(request, pages=take(request.pages_needed(options.page_size))) for request in requests]


def _own_ways(engine: Engine, batches: Sequence[DecodeInputs]) -> list[Contestant]:
    """The step's graph alone (captured for this: the runner's may hold a fill), runner(batch), and no graph."""
    runner, step, backend = engine.decode, engine.step, engine.decode.stage.backend
    around = functools.partial(served, engine.steps)
    with around():
        view = runner.fill(batches[0])
        with backend.stream():
            step(view)
            backend.synchronize()
            graph = backend.capture(lambda: step(view))
    return [(lambda _: graph.replay(), around), (_each_of(runner, batches), around), (lambda _: step(view), around)]


def _each_of(runner: Callable[[Any], object], batches: Sequence[DecodeInputs]) -> Callable[[int], object]:
    return lambda number: runner(batches[number % len(batches)])


def _others(
    engine: Engine, batches: Sequence[DecodeInputs], bucket: int, race: Race, options: Options, *, compare: bool
) -> tuple[dict[str, Contestant], str]:
    """The ways beside the engine's own, by name, and what is to be said: why one cannot be timed, or made no graph."""

    def reach() -> int:
        with torch.inference_mode():
            return int(engine.decode.fill(batches[0]).page_table.shape[1]) * engine.steps.cache.page_size

    compiled = options.compile
    ways: dict[str, Callable[[], Contestant]] = {}
    if engine.steps.attention != SDPA and not compiled:
        masked = attrs.evolve(engine.steps, attention=SDPA)
        ways[MASKED] = lambda: _through_runner(engine, masked, batches, bucket, compiled=False)
    if compare:
        ways[PLAIN if compiled else COMPILED] = lambda: _through_runner(
            engine, engine.steps, batches, bucket, compiled=not compiled
        )
        ways[ALONE] = lambda: alone(engine.steps.model, batches, max(reach(), race.steps + WARMUPS + 2))
    found: dict[str, Contestant] = {}
    notes: list[str] = []
    skipped = _graphs_skipped()
    for name, make in ways.items():
        try:
            one = make()
            attrs.evolve(race, rounds=1).run([one])
        except Exception as error:  # noqa: BLE001 - torch may raise anything here, and nothing else depends on it
            said = (line.strip() for line in str(error).splitlines() if line.strip())
            notes.append(f"{name} was not timed: {type(error).__name__}: {next(said, 'no more is known')}")
        else:
            found[name] = one
    if skipped := _graphs_skipped() - skipped:
        notes.append(f"{ALONE} ran without CUDA graphs: torch skipped them ({skipped} times)")
    return found, ". ".join(notes)


def _graphs_skipped() -> int:
    """How many compiled parts torch has run without a CUDA graph so far, since it found some reason."""
    return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])  # noqa: SLF001 - it is told nowhere else


def _through_runner(
    engine: Engine, steps: Steps, batches: Sequence[DecodeInputs], bucket: int, *, compiled: bool
) -> Contestant:
    """A step that the engine does not run, as written or compiled, captured for one bucket."""
    if compiled:
        check_compiles(engine.decode.stage.backend.name)
    runner = engine.decoder(steps.decoding(compiled=compiled), [bucket], progress=False)
    around = functools.partial(served, steps)
    with around():
        runner.capture()
    return _each_of(runner, batches), around


def alone(model: Any, batches: Sequence[DecodeInputs], places: int) -> Contestant:
    """Transformers' own step with a static cache under torch.compile, warm; it raises what torch raises."""
    cache = StaticCache(config=model.config, max_cache_len=places)

    def decode(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=input_ids, position_ids=positions, past_key_values=cache, use_cache=True)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    @contextlib.contextmanager
    def emptied() -> Iterator[None]:
        """Each step takes one more place, so each turn begins with none taken; the addresses stay."""
        with torch.no_grad():
            cache.reset()
            yield

    compiled = torch.compile(decode, mode=MODE, dynamic=False)
    inputs = [(batch.input_ids[:, None], batch.positions[:, None]) for batch in batches]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what torch has to say about itself
        decode(*inputs[0])  # as written: the cache makes its tensors, and tells torch that they will not move
        for number in range(WARMUPS):
            compiled(*inputs[number % len(inputs)])
    return lambda number: compiled(*inputs[number % len(inputs)]), emptied
