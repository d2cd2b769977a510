"""The command line."""

import argparse
from collections.abc import Sequence

import attrs

from serving.options import add_options, count, counts

DESCRIPTION = """\
Serve a model with sliding-window layers by continuous batching, and prove that
it is right.

Layers that see all of a text and layers that see a window of it have a KV pool
each; the window's is smaller, and its pages are used in turns. So each token has
two places, and the batch brings both. The step gives the window pool its
own: graphs then write there straight, without a look-up in each layer.
Requests arrive over time and share decode batches. Every token and every logit
is compared with what transformers' own generate() makes of each prompt alone.
"""
EPILOGUE = "exit status: 0 all is equal, 1 a token or a logit differs, 2 it cannot be run"


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    backend: str = "cpu-capture"
    requests: int = 12
    max_new_tokens: int = 40
    window: int = 16
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    translate: bool = False
    seed: int = 0


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="sliding_window", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=shape
    )
    rows = (
        ("backend", str, "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
        ("requests", count, "how many there are"),
        ("max-new-tokens", count, "tokens a request gets at most"),
        ("window", _window, "tokens that a layer with a window sees, the newest among them"),
        ("buckets", counts, "batch sizes to capture; the largest is how many may run"),
        ("seed", int, "seed of the weights and of the arrivals"),
    )
    add_options(parser, Options(), rows)
    slow = "give the window pool no places, so that each of its layers looks them up"
    parser.add_argument("--translate", action="store_true", help=slow)
    return Options(**vars(parser.parse_args(argv)))


def _window(text: str) -> int:
    """At least 2: transformers' own cache keeps everything for a window of 1, and generate() would see too much."""
    number = int(text)
    if number < 2:  # noqa: PLR2004 - see above
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 2, got {text}")
    return number
