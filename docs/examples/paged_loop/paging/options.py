"""The command line."""

import argparse
from collections.abc import Sequence

import attrs

from serving.options import add_options, count, counts

DESCRIPTION = """\
Serve requests with a small paged engine in the manner of nano-vllm: a scheduler
with preemption, pages that requests with the same beginning share, and decode
steps that are launched ahead of the host. Every token is compared with what
transformers' own generate() makes of each prompt alone.
"""
EPILOGUE = "exit status: 0 all tokens are equal, 1 a token differs, 2 it cannot be run"


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = "random"
    backend: str = "cpu-capture"
    requests: int = 16
    max_new_tokens: int = 48
    pages: int = 40
    buckets: tuple[int, ...] = (1, 2, 4, 8)
    prefill_buckets: tuple[int, ...] = (64, 256)
    by_hand: bool = False
    ahead: int = 1
    chunk: int = 1
    rounds: int = 3
    seed: int = 0
    attention: str = "auto"

    @property
    def tokens_ahead(self) -> int:
        """How many tokens of a request launched steps may store beyond those that the host has read.

        The host reads the first step of a launch when `ahead` more were launched, and then reserves pages for the next.
        """
        return (self.ahead + 2) * self.chunk - 2


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return options from a command line; exit with status 2 where one is wrong."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="paged_loop", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=shape)
    rows = (
        ("model", str, "random (a small seeded Llama), smollm2, or what else the demo takes"),
        ("backend", str, "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
        ("requests", count, "how many there are"),
        ("max-new-tokens", count, "tokens a request gets at most"),
        ("pages", count, "pages of the cache, of 16 tokens; one belongs to padded rows"),
        ("buckets", counts, "decode batch sizes to capture; the largest is how many requests may run"),
        ("prefill-buckets", counts, "token counts of prompts to capture; the largest is how many may share a step"),
        ("ahead", count, "launches beyond the one whose tokens are read"),
        ("chunk", count, "decode steps of one launch; the host decides once for each"),
        ("rounds", count, "runs of each way, with --by-hand"),
        ("seed", int, "seed of the random model"),
    )
    add_options(parser, Options(), rows)
    ways = ("auto", "sdpa")
    text = "auto (on CUDA the demo's kernel, elsewhere sdpa), sdpa (torch's, over a copy of each request's pages)"
    parser.add_argument("--attention", choices=ways, default="auto", help=f"{text} (default: auto)")
    text = "serve the requests by the same loop without slotgraph, too, and time both in turns"
    parser.add_argument("--by-hand", action="store_true", help=text)
    return Options(**vars(parser.parse_args(argv)))
