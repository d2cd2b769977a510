"""The program: the reference, the engine, the comparison and the report, one after the other."""

import sys
import time
from collections.abc import Sequence

import torch

from serving.options import RANDOM, OptionsError
from serving.reference import reference_answers
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from speculating.engine import LaunchesEngine
from speculating.inputs import CycleInputs, VerifyInputs
from speculating.launch import LaunchEngine
from speculating.models import load
from speculating.options import Options, parse
from speculating.report import lines
from speculating.request import SpeculativeRequest, make_requests


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    try:
        options = parse(argv)
        if options.model == RANDOM:
            torch.set_num_threads(1)  # its operators are too short to share: threads would wait for each other
        return serve(options)
    except (OptionsError, BackendUnavailableError, CaptureError) as error:
        print(f"speculative: {error}", file=sys.stderr)
        return 2


def serve(options: Options, verify: type[VerifyInputs] = VerifyInputs, cycle: type[CycleInputs] | None = None) -> int:
    """Serve the requests and print the report; 0 if all is equal to the reference, else 1.

    verify: see LaunchesEngine. cycle: see LaunchEngine.
    """
    backend = backends.choose(options.backend)
    language, draft = load(options, backend.device)
    requests = make_requests(options, language)
    begin = time.perf_counter()
    answers = [answer.tokens for answer in reference_answers(language, requests)]
    alone = time.perf_counter() - begin
    given = language, draft, requests, options, backend
    engine = LaunchEngine(*given, cycle=cycle) if options.one_launch else LaunchesEngine(*given, verify=verify)
    engine.capture()
    engine.run()
    difference = first_difference(requests, answers)
    for line in lines(options, engine, language.name, requests, alone):
        print(line)
    if difference is None:
        print("equality         generate() chose the same tokens")
    else:
        print(f"DIFFERENT from generate(): {difference}")
    return 0 if difference is None else 1


def first_difference(requests: Sequence[SpeculativeRequest], answers: Sequence[Sequence[int]]) -> str | None:
    """Where a request first goes another way than generate() of its prompt alone; None where all are equal."""
    for request, answer in zip(requests, answers, strict=True):
        if request.generated != list(answer):
            pairs = zip(request.generated, answer, strict=False)
            place = next((at for at, (got, due) in enumerate(pairs) if got != due), len(request.generated))
            got, due = request.generated[place : place + 1], list(answer[place : place + 1])
            return f"request {request.number}, generated token {place}: expected {due}, got {got}"
    return None
