"""The program: the reference, the engine, the comparison and the report, one after the other."""

import sys
from collections.abc import Sequence

import torch

from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from speculating.comparison import ask, first_difference
from speculating.engine import Engine
from speculating.inputs import VerifyInputs
from speculating.models import seeded
from speculating.options import Options, OptionsError, parse
from speculating.report import lines
from speculating.request import make_requests


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    torch.set_num_threads(1)  # the small models' operators are too short to share: threads would wait for each other
    try:
        return serve(parse(argv))
    except (OptionsError, BackendUnavailableError, CaptureError) as error:
        print(f"speculative: {error}", file=sys.stderr)
        return 2


def serve(options: Options, verify: type[VerifyInputs] = VerifyInputs) -> int:
    """Serve the requests and print the report; 0 if all is equal to the reference, else 1. verify: see Engine."""
    backend = backends.choose(options.backend)
    models = seeded(options.seed, backend.device)
    requests = make_requests(options.requests, options.max_new_tokens, options.seed)
    answers = [ask(models[0], request) for request in requests]
    engine = Engine(models, requests, options, backend, verify)
    engine.capture()
    engine.run()
    difference = first_difference(requests, answers)
    for line in lines(options, engine, requests, difference):
        print(line)
    return 0 if difference is None else 1
