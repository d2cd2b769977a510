"""The program: requests that begin alike, the engine, the comparison with generate(), and the report."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from paging.by_hand import HandEngine, HandRunner
from paging.engine import LLMEngine
from paging.lines import table
from paging.model import PagedModel
from paging.options import Options, parse
from paging.request import Request, pages_for
from paging.runner import ModelRunner
from paging.scheduler import Scheduler
from serving.model import Language, load_language
from serving.options import PROMPTS, OptionsError
from serving.options import Options as LanguageOptions
from serving.reference import reference_answers
from slotgraph import backends
from slotgraph.backends import Backend
from slotgraph.errors import BackendUnavailableError, CaptureError

RULES = (
    "You are a clerk of the harbour. Answer in one sentence, and name the ship. ",
    "You are the cook of a small inn. Answer as if it were raining outside. ",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    if options.model == "random":
        torch.set_num_threads(1)  # its operators are too short to share: threads would wait for each other
    try:
        return serve(options)
    except (BackendUnavailableError, CaptureError, OptionsError) as error:
        print(f"paged_loop: {error}", file=sys.stderr)
        return 2


def make_requests(options: Options, language: Language) -> list[Request]:
    """Return requests over the demo's questions. Every second one begins with the same rules."""
    questions = PROMPTS.read_text(encoding="utf-8").splitlines()
    texts = [RULES[number % 2] + questions[number % len(questions)][:60] for number in range(options.requests)]
    return [
        Request(number=number, prompt_ids=language.tokens.encode(text), limit=options.max_new_tokens)
        for number, text in enumerate(texts)
    ]


@attrs.frozen(kw_only=True)
class Way:
    """One way to run the loop. Tests hand in parts with a fault."""

    name: str
    runner: Any
    engine: type[LLMEngine]
    scheduler: type[Scheduler] = Scheduler
    runs_ahead: bool


OURS = Way(name="slotgraph", runner=ModelRunner, engine=LLMEngine, runs_ahead=True)
BY_HAND = Way(name="by hand", runner=HandRunner, engine=HandEngine, runs_ahead=False)


@attrs.define(kw_only=True)
class Served:
    """A way with its captured runner, and what its runs came to. rates: tokens a second of each run."""

    way: Way
    runner: Any
    attention: str
    requests: list[Request] = attrs.field(factory=list)
    scheduler: Scheduler = attrs.field(init=False)
    steps: int = 0
    rates: list[float] = attrs.field(factory=list)


@torch.inference_mode()
def run(served: Served, options: Options, language: Language) -> None:
    """Serve all requests once, with an empty cache."""
    served.requests = make_requests(options, language)
    served.scheduler = served.way.scheduler(
        pages=options.pages,
        most_running=options.buckets[-1],
        most_tokens=options.prefill_buckets[-1],
        ahead=options.tokens_ahead if served.way.runs_ahead else 0,
        eos=language.eos,
    )
    try:
        for request in served.requests:
            served.scheduler.add(request)
    except ValueError as error:
        raise OptionsError(str(error)) from error
    engine = served.way.engine(served.runner, served.scheduler)
    begin = time.perf_counter()
    engine.run()
    took = time.perf_counter() - begin
    served.steps = engine.done
    served.rates.append(sum(len(request.generated) for request in served.requests) / took)


def serve(options: Options, *, ours: Way = OURS) -> int:
    """Serve the requests, compare all tokens and print the report; return 0 if they are equal, else 1."""
    backend = backends.choose(options.backend)
    language = load_language(LanguageOptions(model=options.model, seed=options.seed), backend.device)
    expected = [answer.tokens for answer in reference_answers(language, make_requests(options, language))]
    ways = [captured(way, options, language, backend) for way in (ours, BY_HAND)[: 1 + options.by_hand]]
    for _ in range(options.rounds if options.by_hand else 1):
        for served in ways:
            run(served, options, language)
    for served in ways:
        print(*report(served), sep="\n", end="\n\n")
    if options.by_hand:
        print(*table(), sep="\n", end="\n\n")
    return verdict(ways, expected)


def captured(way: Way, options: Options, language: Language, backend: Backend) -> Served:
    """Return a way with a runner whose graphs are captured, over a cache of its own."""
    longest = max(map(len, make_requests(options, language)))
    width = pages_for(longest + options.max_new_tokens + options.tokens_ahead)
    model = PagedModel(language.model, options.pages, options.attention)
    runner = way.runner(model, options, backend, width)
    with torch.inference_mode():
        runner.capture()
    return Served(way=way, runner=runner, attention=model.attention)


def report(served: Served) -> list[str]:
    """Return what a way's last run came to, and how fast each run was."""
    scheduler, tokens = served.scheduler, sum(len(request.generated) for request in served.requests)
    return [
        f"{served.way.name}, {served.attention} attention",
        f"  requests     {len(served.requests)}, {tokens} tokens",
        f"  preemptions  {scheduler.preemptions}",
        f"  pages        {len(scheduler.pages.users) - 1}",
        f"  shared       {scheduler.pages.shared} pages that were found and not computed again",
        f"  decode steps {served.steps}",
        f"  tokens/s     {', '.join(f'{rate:.0f}' for rate in served.rates)}",
    ]


def verdict(ways: Sequence[Served], expected: Sequence[Sequence[int]]) -> int:
    """Print whether all tokens are those of generate(); return the exit status."""
    for served in ways:
        for request, tokens in zip(served.requests, expected, strict=True):
            if request.generated != tokens:
                pairs = zip(request.generated, tokens, strict=False)
                place = next((place for place, (one, other) in enumerate(pairs) if one != other), "at its end")
                print(f"DIFFERENT from generate(): {served.way.name}, request {request.number}, token {place}")
                return 1
    print(f"equal: generate() chose the same tokens for all {len(expected)} requests")
    return 0
