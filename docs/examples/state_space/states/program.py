"""The program: the reference, the engine, the comparison and the report, one after the other."""

import sys
from collections.abc import Sequence

import torch
import transformers
from transformers import Cache

from serving.comparison import FLOAT32_TOLERANCE, Bounds, compare
from serving.reference import reference_answers
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from states.engine import Engine
from states.inputs import DecodeInputs
from states.models import seeded
from states.options import Options, parse
from states.report import lines
from states.requests import make_requests

NEEDS = "transformers' caches must hand out states by get_conv_state, as those of 5.23 do: install a newer one"


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    transformers.logging.set_verbosity_error()  # that kernels for a device are missing on a CPU is no news
    if not hasattr(Cache, "get_conv_state"):
        return _cannot(NEEDS)
    torch.set_num_threads(1)  # the small model's operators are too short to share: threads would wait for each other
    try:
        return serve(options)
    except (BackendUnavailableError, CaptureError) as error:
        return _cannot(error)


def _cannot(why: object) -> int:
    print(f"state_space: {why}", file=sys.stderr)
    return 2


def serve(options: Options, declaration: type[DecodeInputs] = DecodeInputs) -> int:
    """Serve the requests and print the report; 0 if all is equal to the reference, else 1. declaration: see Engine."""
    backend = backends.choose(options.backend)
    language = seeded(options.model, options.seed, backend.device)
    requests = make_requests(options.requests, options.max_new_tokens, options.seed)
    answers = list(reference_answers(language, requests))
    engine = Engine(language, requests, options.buckets, backend, declaration)
    captured = engine.capture()
    engine.run()
    comparison = compare(requests, answers, Bounds(logits=FLOAT32_TOLERANCE))
    for line in lines(options, engine, requests, captured, comparison):
        print(line)
    return 0 if comparison.difference is None else 1
