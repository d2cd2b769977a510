"""The command line: one attrs field an option, from which the parser is made."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from twins.model import LONGEST
from twins.sequences import LONGEST_PROMPT

DESCRIPTION = """\
One small engine with two model runners: one that is written by hand, in the
manner of nano-vllm, and one with slotgraph.

Both serve the same sequences on the same model: prompts eagerly, decode steps
from graphs captured for a few batch sizes (buckets). Their tokens, the bytes of
all logits and of their caches are compared, and each text is read once more at
once, without a cache. At last the code lines of both runners are counted.
"""
EPILOGUE = "exit status: 0 all is equal, 1 something differs, 2 it cannot be run"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return number


def _new_tokens(text: str) -> int:
    number, most = _count(text), LONGEST - LONGEST_PROMPT
    if number > most:
        raise argparse.ArgumentTypeError(
            f"the model knows {LONGEST} positions, {LONGEST_PROMPT} of them for a prompt: at most {most}, got {text}"
        )
    return number


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _says(text: str, **parser: Any) -> Mapping[str, Any]:
    """An option's help, and what argparse must know of it."""
    return {"help": text, **parser}


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    backend: str = attrs.field(
        default="cpu-capture",
        metadata=_says("where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
    )
    sequences: int = attrs.field(default=16, metadata=_says("how many texts there are", type=_count, metavar="N"))
    max_new_tokens: int = attrs.field(
        default=48, metadata=_says("tokens that a text gets at most", type=_new_tokens, metavar="N")
    )
    max_batch: int = attrs.field(
        default=8,
        metadata=_says(
            "texts that may decode in one step; those beyond the largest bucket do so eagerly", type=_count, metavar="N"
        ),
    )
    buckets: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8), metadata=_says("batch sizes to capture", type=_counts, metavar="N,N,..")
    )
    page_size: int = attrs.field(
        default=8, metadata=_says("tokens that one page of the cache holds", type=_count, metavar="N")
    )
    seed: int = attrs.field(default=0, metadata=_says("seed of the weights and of the texts", type=int, metavar="N"))


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="before_after",
        description=DESCRIPTION,
        epilog=EPILOGUE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for field in attrs.fields(Options):
        _add(parser, field)
    return Options(**vars(parser.parse_args(argv)))


def _add(parser: argparse.ArgumentParser, field: "attrs.Attribute[Any]") -> None:
    details, default = dict(field.metadata), field.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    details["help"] += f" (default: {shown})"
    parser.add_argument("--" + field.name.replace("_", "-"), default=default, **details)
