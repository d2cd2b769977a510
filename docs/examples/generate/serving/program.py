"""The program: the reference, the engine, the comparison and the report, one after the other."""

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from rich.console import Console
from rich.progress import Progress
from transformers.utils import logging as transformers_logging

from serving.ahead import AheadEngine
from serving.attention import SDPA, paged
from serving.by_hand import forget, fresh, time_fills
from serving.comparison import Judge
from serving.engine import Engine, Prepare, unchanged
from serving.inputs import DecodeInputs, PrefillInputs
from serving.measuring import measure, measure_prefill
from serving.model import Language, config_of, load_language
from serving.options import RANDOM, Options, OptionsError, parse
from serving.ranks import ALONE, World, crew_of, joined
from serving.reference import continuous_batching
from serving.report import Report, part_of, passed, summarise, write_json
from serving.request import Request, read_requests
from serving.shares import check_even, check_layers, sharded, staged
from serving.steps import check_compiles
from serving.tables import show, show_reasons, show_start
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError

TURNS: Final = 3
"""Runs of each way, where some are compared."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    if options.verbose:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("slotgraph").setLevel(logging.INFO)
    else:
        transformers_logging.disable_progress_bar()  # of weights that are read within a second
        transformers_logging.set_verbosity_error()
    if options.model == RANDOM:
        torch.set_num_threads(1)  # its operators are too short to share: threads would wait for each other
    try:
        return generate(options)
    except (OptionsError, BackendUnavailableError, CaptureError) as error:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""  # who fails first has the others killed
        Console(stderr=True).print(f"generate: {rank}{error}", style="red", markup=False, soft_wrap=True)
        return 2


def generate(
    options: Options,
    *,
    declaration: type[DecodeInputs] = DecodeInputs,
    prompts: type[PrefillInputs] = PrefillInputs,
    prepare: Prepare = unchanged,
) -> int:
    """Run the demo and print its report; 1 if a token or a logit differs from the reference, else 0.

    declaration, prompts, prepare: see Engine. Over several ranks each does its part, and the first one prints.
    """
    if options.json is not None and not options.json.parent.is_dir():
        raise OptionsError(f"--json {options.json}: there is no folder {options.json.parent}")
    if options.compile:
        check_compiles(backends.choose(options.backend).name)
        if options.tp * options.dp * options.pp > 1:
            raise OptionsError("--compile is for one process: leave out --tp, --dp and --pp")
    if options.ahead is not None and (options.sync or options.dp * options.pp > 1):
        raise OptionsError(f"--ahead {options.ahead} is for one process or --tp: leave out --sync, --dp and --pp")
    if options.chunk > 1 and (options.sync or options.tp * options.dp * options.pp > 1):
        raise OptionsError(f"--chunk {options.chunk} is for one process: leave out --sync, --tp, --dp and --pp")
    if options.tp > 1:
        check_even(config_of(options), options.tp)
    if options.pp > 1:
        check_layers(config_of(options), options.pp)
    with joined(options) as world:
        report = _report(options, world, declaration=declaration, prompts=prompts, prepare=prepare)
    if world.rank == 0:
        show(report, Console())
        if options.json is not None:
            write_json(report, options.json)
    return 0 if passed(report) else 1


def _report(options: Options, world: World, **seams: Any) -> Report:
    """Answer, serve, compare, and time; the same report in every rank."""
    device = backends.choose(options.backend).device
    options = _settled(options, world, device)
    whole = load_language(options, device)
    every = read_requests(options, whole)
    requests = world.share(every)
    console = Console(quiet=world.rank != 0)
    show_start(whole, len(every), options, console)
    language, judged, judge, alone = whole, whole, None, None
    if world.way == "pp":
        language = staged(whole, world)
    if world.way == "tp":
        language = judged = sharded(whole, world)
    if options.verify:
        alone = _ask(options, world, whole, requests) if world.way == "tp" else None
        judge = _ask(options, world, judged, requests)
        judge = attrs.evolve(judge, bounds=max(world.gathered(judge.bounds), key=lambda bounds: bounds.logits))
    batched = continuous_batching(whole, requests, options, world.size)

    kind = Engine if options.ahead is None else AheadEngine
    engine = kind(language, requests, options, crew=crew_of(world, language, every), **seams)
    with paged(language.model), _bar(world) as progress:
        captured = engine.capture()
        task = progress.add_task("serving, in batches", total=len(requests))
        for work in engine.run():
            progress.update(task, completed=work.done)

    part = part_of(
        engine,
        captured,
        requests,
        comparison=judge.compare(requests) if judge is not None and world.ends else None,
        alone=alone.beside(judge).compare(requests) if judge is not None and alone is not None else None,
        reference_seconds=0.0 if judge is None else judge.seconds,
    )
    report = summarise(options, world, whole, world.gathered(part), batched)
    if passed(report):  # what a wrong step takes is of no interest
        if world.size == 1:
            _compare_by_hand(report, engine, language, requests, options)
            show_reasons(report, console)
        ways = _ways(options, report["attention"])
        if ways and report["fills"] and not options.compile:
            report["turns"] = _in_turns(kind, whole, requests, ways, **seams)
        if report["pairs"] and report["fills"] and not options.compile:  # compiling once more takes too long
            report["pairs"].append(_once_more(engine, whole, requests, options))
        if world.way in {"", "tp"}:  # a step can be timed by itself where each rank runs all that it is
            _time_steps(report, engine, options, requests, world)
    return report


def _settled(options: Options, world: World, device: torch.device) -> Options:
    """The options, with what depends on the device if they do not say."""
    if options.prefill == "auto":
        options = attrs.evolve(options, prefill="eager" if device.type == "cpu" else "breakable")
    if options.ahead is None and not options.sync and device.type != "cpu" and world.size == 1:
        options = attrs.evolve(options, ahead=1)
    if options.ahead is None and options.chunk > 1:
        options = attrs.evolve(options, ahead=0)
    return options


def _time_steps(report: Report, engine: Engine, options: Options, requests: Sequence[Request], world: World) -> None:
    options = attrs.evolve(options, compare=False) if world.size > 1 else options
    fills = report["fills"]
    with _bar(world) as progress:
        progress.add_task("timing steps", total=None)
        report["prefill_times"] = measure_prefill(engine, options, requests)
        report["measured"] = measure(engine, options, requests, fills and fills["after_a_step"]["runner"])


def _compare_by_hand(
    report: Report, engine: Engine, language: Language, requests: Sequence[Request], options: Options
) -> None:
    with _bar(ALONE) as progress:
        progress.add_task("the same by hand", total=None)
        report["fills"] = time_fills(engine, options, requests)
        if options.model != RANDOM and not options.compile:  # whose texts mean nothing, or are other ones not compiled
            report["forgotten"] = forget(language, requests, options)


def _once_more(
    engine: Engine, language: Language, requests: Sequence[Request], options: Options
) -> tuple[float, float | None]:
    """Tokens a second of another run, and of another one of transformers' continuous batching."""
    speed = _again(engine, language, requests)
    other, _ = continuous_batching(language, requests, options, 1)
    return speed, other


def _again(engine: Engine, language: Language, requests: Sequence[Request]) -> float:
    """Tokens a second of another run of an engine that is captured."""
    again = fresh(requests)
    engine.take(again)
    with _bar(ALONE) as progress, paged(language.model):
        progress.add_task("serving, once more", total=None)
        for _ in engine.run():
            pass
    return sum(len(request.generated) for request in again) / engine.work.seconds


def _ways(options: Options, attention: str) -> dict[str, Options]:
    """Options to compare with one another, by name: torch's own attention, the kernel, several steps in one launch."""
    ways, steps = dict[str, Options](), "single steps" if options.ahead is None else f"--ahead {options.ahead}"
    if attention != SDPA:
        ways[f"sdpa, {steps}"] = attrs.evolve(options, attention=SDPA, chunk=1)
    if attention != SDPA or options.chunk > 1:
        ways[f"{attention}, {steps}"] = attrs.evolve(options, chunk=1)
    if options.chunk > 1:
        ways[f"{attention}, {steps}, --chunk {options.chunk}"] = options
    return ways


def _in_turns(
    kind: type[Engine], language: Language, requests: Sequence[Request], ways: dict[str, Options], **seams: Any
) -> dict[str, list[float]]:
    """Tokens a second of runs that take turns, by the way of their decode steps."""
    engines = dict[str, Engine]()
    for way, options in ways.items():
        engines[way] = kind(language, fresh(requests), attrs.evolve(options, verify=False), **seams)
        with paged(language.model):
            engines[way].capture()
    speeds: dict[str, list[float]] = {way: [] for way in engines}
    for _ in range(TURNS):
        for way, engine in engines.items():
            speeds[way].append(_again(engine, language, requests))
    return speeds


def _ask(options: Options, world: World, language: Language, requests: Sequence[Request]) -> Judge:
    with _bar(world) as progress:
        watch = functools.partial(progress.track, total=len(requests), description="generate(), one at a time")
        return Judge.asked(options, language, requests, watch)


def _bar(world: World) -> Progress:
    """A progress bar, on a terminal only, and of one rank."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not (world.rank == 0 and console.is_terminal))
