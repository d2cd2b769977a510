"""The program: the reference, the engine, the comparison and the report, one after the other."""

import time
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.progress import Progress, track

from serving.attention import paged
from serving.comparison import compare
from serving.engine import Engine, Prepare, unchanged
from serving.inputs import DecodeInputs
from serving.model import Language, load_language
from serving.options import Options, OptionsError, parse
from serving.prompts import read_requests
from serving.reference import Answer, reference_answers
from serving.report import Report, write_json
from serving.request import Request
from serving.summary import summarise
from serving.tables import show
from slotgraph import backends
from slotgraph.dataflow.errors import BackendUnavailableError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo on a command line; the exit status is 0 if all is equal, 1 if not, 2 if it cannot run."""
    options = parse(argv)
    try:
        return generate(options)
    except (OptionsError, BackendUnavailableError) as error:
        Console(stderr=True).print(f"generate: {error}", style="red", markup=False, soft_wrap=True)
        return 2


def generate(options: Options, *, declaration: type[DecodeInputs] = DecodeInputs, prepare: Prepare = unchanged) -> int:
    """Run the demo and print its report; 0 if all tokens and logits are equal to the reference, else 1.

    declaration, prepare: see Engine.
    """
    language = load_language(options, backends.load(options.backend)().device)
    requests = read_requests(options, language)
    answers = ...
