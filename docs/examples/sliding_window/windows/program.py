"""The program: the reference, the engine, the comparison and the report, one after the other."""

import sys
from collections.abc import Sequence

import torch

from serving.comparison import FLOAT32_TOLERANCE, Bounds, compare
from serving.reference import reference_answers
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from windows.attention import windowed
from windows.engine import Engine, Prepare, unchanged
from windows.inputs import DecodeInputs
from windows.model import seeded
from windows.options import Options, parse
from windows.report import lines
from windows.requests import make_requests


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    torch.set_num_threads(1)  # the small model's operators are too short to share: threads would wait for each other
    try:
        return serve(options)
    except (BackendUnavailableError, CaptureError) as error:
        print(f"sliding_window: {error}", file=sys.stderr)
        return 2


def serve(options: Options, *, declaration: type[DecodeInputs] = DecodeInputs, prepare: Prepare = unchanged) -> int:
    """Serve the requests and print the report; 0 if all is equal to the reference, else 1. Seams: see Engine."""
    backend = backends.choose(options.backend)
    language = seeded(options.window, options.seed, backend.device)
    requests = make_requests(options.requests, options.max_new_tokens, language.tokens, options.seed)
    answers = list(reference_answers(language, requests))
    engine = Engine(language, requests, options, backend, declaration=declaration, prepare=prepare)
    with windowed(language.model):
        captured = engine.capture()
        engine.run()
    comparison = compare(requests, answers, Bounds(logits=FLOAT32_TOLERANCE))
    for line in lines(options, engine, requests, captured, comparison):
        print(line)
    return 0 if comparison.difference is None else 1
