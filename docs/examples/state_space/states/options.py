"""The command line."""

import argparse
from collections.abc import Sequence

import attrs

from serving.options import add_options, count, counts
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


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = "bamba"
    backend: str = "cpu-capture"
    requests: int = 12
    max_new_tokens: int = 48
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    seed: int = 0


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return options from a command line, the process's own if none is given; exit with status 2 where one is wrong."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="state_space", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=shape
    )
    text = "family of the small seeded model (default: bamba)"
    parser.add_argument("--model", choices=tuple(FAMILIES), default="bamba", help=text)
    rows = (
        ("backend", str, "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
        ("requests", count, "how many there are"),
        ("max-new-tokens", count, "tokens that a request gets at most"),
        ("buckets", counts, "batch sizes to capture; the largest is how many requests may run"),
        ("seed", int, "seed of the weights and of the requests"),
    )
    add_options(parser, Options(), rows)
    return Options(**vars(parser.parse_args(argv)))
