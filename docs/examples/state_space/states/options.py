"""The command line: one attrs field an option, from which the parser is made."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from serving.options import count, counts
from states.models import FAMILIES

DESCRIPTION = """\
Serve a hybrid of state space and attention by continuous batching, and prove
that it is right.

Requests arrive over time, share decode batches and leave when they are done.
Each owns a row of pools: a convolution's newest inputs, a recurrent state, keys
and values. Prompts run one by one through an eager runner, decode steps through
graphs captured for a few batch sizes (buckets), in which the slot
req_pool_indices says which rows a step works on. Every token and every logit is
then compared with what transformers' own generate() makes of each prompt alone.
"""
EPILOGUE = "exit status: 0 all is equal, 1 a token or a logit differs, 2 it cannot be run"


def _says(text: str, **parser: Any) -> Mapping[str, Any]:
    """An option's help, and what argparse must know of it."""
    return {"help": text, **parser}


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = attrs.field(
        default="bamba", metadata=_says("family of the small seeded model", choices=tuple(FAMILIES))
    )
    backend: str = attrs.field(
        default="cpu-capture",
        metadata=_says("where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
    )
    requests: int = attrs.field(default=12, metadata=_says("how many there are", type=count, metavar="N"))
    max_new_tokens: int = attrs.field(
        default=48, metadata=_says("tokens that a request gets at most", type=count, metavar="N")
    )
    buckets: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8),
        metadata=_says(
            "batch sizes to capture; the largest is how many requests may run", type=counts, metavar="N,N,.."
        ),
    )
    seed: int = attrs.field(default=0, metadata=_says("seed of the weights and of the requests", type=int, metavar="N"))


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="state_space",
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
