"""The command line."""

import argparse
from collections.abc import Sequence

import attrs

from serving.options import DTYPES, add_options, count, counts

DESCRIPTION = """\
Serve requests by transformers' continuous batching, with its scheduler, cache,
attention and sampling as they are, and with slotgraph in place of what prepares
inputs, captures graphs and carries tokens from step to step. Every token is
compared with what transformers makes by itself.
"""
EPILOGUE = "exit status: 0 all tokens are equal, 1 a token differs, 2 it cannot be run"


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = "llama"
    backend: str = "cpu-capture"
    requests: int = 16
    max_new_tokens: int = 24
    layers: int = 2
    hidden: int = 128
    max_requests: int = 16
    max_tokens: int = 64
    cache_tokens: int = 1024
    tokens: tuple[int, ...] = (4, 16, 64)
    keys: tuple[int, ...] = (256, 1024)
    rounds: int = 1
    dtype: str = "float32"
    seed: int = 0


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return options from a command line; exit with status 2 where one is wrong."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="continuous_batching", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=shape
    )
    rows = (
        ("model", str, "llama, or gemma3, half of whose layers see a window; both with seeded weights"),
        ("backend", str, "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, auto"),
        ("requests", count, "how many there are"),
        ("max-new-tokens", count, "tokens that a request gets"),
        ("layers", count, "layers of the model"),
        ("hidden", count, "its hidden size, in multiples of 64"),
        ("max-requests", count, "requests that may share a step"),
        ("max-tokens", count, "tokens that may share a step"),
        ("cache-tokens", count, "tokens that the cache holds"),
        ("tokens", counts, "token counts to capture"),
        ("keys", counts, "key counts to capture for each of them"),
        ("rounds", count, "how often each way serves all requests, in turns"),
        ("dtype", str, f"{', '.join(DTYPES)}; below float32 tokens depend on who shares a step, and are only counted"),
        ("seed", int, "seed of the model and of the prompts"),
    )
    add_options(parser, Options(), rows)
    return Options(**vars(parser.parse_args(argv)))
