"""Prompts: one a line, from a file or from standard input, as requests that arrive over time."""

import sys
from pathlib import Path

from serving.model import Language
from serving.options import Options, OptionsError
from serving.request import Request, arrivals


def read_requests(options: Options, language: Language) -> list[Request]:
    """A request a line that is not blank; OptionsError where there is none, or one that the model cannot hold."""
    prompts = [line.rstrip("\r") for line in _lines(options.prompts_file) if line.strip()]
    if not prompts:
        raise OptionsError("no prompts: give at least one line that is not blank")
    steps = arrivals(len(prompts), options.arrival_gap, options.seed)
    requests = [
        Request(
            number=number,
            prompt=prompt,
            prompt_ids=language.tokens.encode(prompt),
            arrival=step,
            limit=options.max_new_tokens,
        )
        for number, (prompt, step) in enumerate(zip(prompts, steps, strict=True))
    ]
    _check_lengths(requests, language)
    return requests


def _lines(source: str) -> list[str]:
    if source == "-":
        return sys.stdin.read().split("\n")
    path = Path(source)
    if not path.is_file():
        raise OptionsError(f"--prompts {path}: no such file; give one, or - for standard input")
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise OptionsError(f"--prompts {path}: this is no UTF-8 text: {error}") from error


def _check_lengths(requests: list[Request], language: Language) -> None:
    room = language.model.config.max_position_embeddings
    for request in requests:
        if not request.prompt_ids:
            raise OptionsError(f"prompt {request.number}: the model's tokenizer makes no token of {request.prompt!r}")
        if request.longest > room:
            tokens = f"{len(request.prompt_ids)} tokens and {request.limit} new ones"
            raise OptionsError(
                f"prompt {request.number}: {tokens} exceed the model's {room} positions: lower --max-new-tokens"
            )
