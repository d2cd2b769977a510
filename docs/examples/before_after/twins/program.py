"""The program: the same sequences through both runners, the comparison and the report."""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from slotgraph import backends
from slotgraph.backends import Backend
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from twins.after import Slotgraph
from twins.before import HandWritten
from twins.comparison import Served, compare
from twins.engine import Engine, Runner, Setting
from twins.model import Model
from twins.options import Options, parse
from twins.report import buckets, lines, outcome
from twins.sequences import make_sequences

R = TypeVar("R", bound=Runner)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if both runners are equal and right, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    logging.getLogger("slotgraph").setLevel(logging.ERROR)  # an eager step is counted in the report
    torch.set_num_threads(1)  # the small model's operators are too short to share: threads would wait for each other
    try:
        return show(options)
    except (BackendUnavailableError, CaptureError) as error:
        print(f"before_after: {error}", file=sys.stderr)
        return 2


def show(
    options: Options,
    before: Callable[[Setting], Runner] = HandWritten,
    after: Callable[[Setting], Slotgraph] = Slotgraph,
) -> int:
    """Serve the sequences with both runners and print the report; 0 if both are equal and right, else 1."""
    backend = backends.choose(options.backend)
    model = Model(options.seed).to(backend.device).eval()
    _, first = serve(options, backend, model, before)
    runner, second = serve(options, backend, model, after)
    comparison = compare(model, first, second)
    for part in (outcome(options, first, comparison), buckets(runner.graphs.stats()), lines()):
        print(*part, sep="\n", end="\n\n")
    return 0 if comparison.passed else 1


def serve(options: Options, backend: Backend, model: Model, make: Callable[[Setting], R]) -> tuple[R, Served]:
    """What one runner makes of the sequences, in a cache of its own."""
    sequences = make_sequences(options.sequences, options.max_new_tokens, options.seed)
    needs = sorted((one.pages_needed(options.page_size) for one in sequences), reverse=True)
    cache = model.new_cache(1 + sum(needs[: options.max_batch]), options.page_size)
    setting = Setting(model=model, cache=cache, backend=backend, buckets=options.buckets, max_pages=needs[0])
    runner = make(setting)
    engine = Engine(runner, cache, options.max_batch)
    engine.run(sequences)
    return runner, Served(sequences, cache.live(), engine.steps)
