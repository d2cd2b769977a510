"""The program: the reference, the engine, the comparison and the report, one after the other."""

import logging
import sys
import time
from collections.abc import Sequence

import attrs
import structlog
import torch
from rich.console import Console
from rich.progress import Progress

from serving.attention import paged
from serving.bounds import Bounds, bounds_for
from serving.comparison import Comparison, compare
from serving.engine import Engine, Prepare, unchanged
from serving.forcing import answer_to
from serving.inputs import DecodeInputs, PrefillInputs
from serving.measuring import measure
from serving.model import Language, load_language
from serving.options import Options, OptionsError, parse
from serving.prefill_times import prefill_times
from serving.prompts import read_requests
from serving.reference import Answer, reference_answers
from serving.report import Report, write_json
from serving.request import Request
from serving.summary import Run, summarise
from serving.tables import show
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from slotgraph.runners.capture import CaptureReport


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    _hear_events(logging.INFO if options.verbose else logging.WARNING)
    if options.model is None:
        torch.set_num_threads(
            1
        )  # the small model's operators are too short to share: threads would wait for each other
    try:
        return generate(options)
    except (OptionsError, BackendUnavailableError, CaptureError) as error:
        Console(stderr=True).print(f"generate: {error}", style="red", markup=False, soft_wrap=True)
        return 2


def generate(
    options: Options,
    *,
    declaration: type[DecodeInputs] = DecodeInputs,
    prompts: type[PrefillInputs] = PrefillInputs,
    prepare: Prepare = unchanged,
) -> int:
    """Run the demo and print its report; 0 if all tokens and logits count as equal to the reference, else 1.

    declaration, prompts, prepare: see Engine.
    """
    if options.json is not None and not options.json.parent.is_dir():
        message = f"--json {options.json}: there is no folder {options.json.parent}"
        raise OptionsError(message)
    language = load_language(options, backends.choose(options.backend).device)
    requests = read_requests(options, language)
    begin = time.perf_counter()
    answers = _ask(language, requests)
    seconds = time.perf_counter() - begin
    bounds = bounds_for(options, language, requests, answers)
    engine = Engine(language, requests, options, declaration=declaration, prompts=prompts, prepare=prepare)
    with paged(language.model):
        captured = _serve(engine, len(requests))
    comparison = _judge(language, requests, answers, bounds)
    report = summarise(Run(options, language, requests, engine, captured, comparison, seconds))
    if report.passed:  # what a wrong step takes is of no interest
        report = _timed(report, engine, options, requests)
    show(report, Console())
    if options.json is not None:
        write_json(report, options.json)
    return 0 if report.passed else 1


def _hear_events(level: int) -> None:
    """The library logs through structlog and configures nothing; a program says what it wants to hear, and where."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
    )


def _ask(language: Language, requests: Sequence[Request]) -> list[Answer]:
    """The reference comes first: whatever the engine might do to the weights does not reach it."""
    with _bar() as progress:
        answers = reference_answers(language, requests)
        return list(progress.track(answers, len(requests), description="generate(), one at a time"))


def _serve(engine: Engine, count: int) -> CaptureReport:
    """Capture, then run until every request is done."""
    captured = engine.capture()
    with _bar() as progress:
        task = progress.add_task("serving, in batches", total=count)
        for work in engine.run():
            progress.update(task, completed=work.done)
    return captured


def _judge(language: Language, requests: Sequence[Request], answers: Sequence[Answer], bounds: Bounds) -> Comparison:
    """Compare with generate(), and after a near-tie with what the reference makes of the request's own text."""
    if bounds.tie:
        pairs = zip(requests, answers, strict=True)
        answers = [answer_to(language, request, answer) for request, answer in pairs]
    return compare(requests, answers, bounds)


def _timed(report: Report, engine: Engine, options: Options, requests: Sequence[Request]) -> Report:
    with _bar() as progress:
        progress.add_task("timing steps", total=None)
        prefill = prefill_times(engine, options, requests)
        return attrs.evolve(report, prefill_times=prefill, measured=measure(engine, options, requests))


def _bar() -> Progress:
    """A progress bar, on a terminal only."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)
