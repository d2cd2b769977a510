"""The command line."""

import argparse
from collections.abc import Sequence

import attrs

from serving.options import RANDOM, OptionsError, add_options, count, counts

DESCRIPTION = """\
Decode by speculation, and prove that it changes nothing.

A small draft model proposes a tree of tokens for each request, the target model
verifies the whole tree in one step, and the draft takes in what was accepted.
With prompt lookup there is no draft model: a chain of tokens comes from where
the text so far has its last tokens already. Each step is captured once for each
batch size (bucket); requests arrive over time and share the batches. Every
token is then compared with what transformers' own generate() makes of each
prompt alone with the target.
"""
EPILOGUE = "exit status: 0 all tokens are equal, 1 one differs, 2 it cannot be run"


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = RANDOM
    lookup: bool = False
    backend: str = "cpu-capture"
    one_launch: bool = False
    ahead: int = 1
    chunk: int = 1
    topk: int = 3
    steps: int = 4
    draft_tokens: int = 10
    requests: int = 12
    max_new_tokens: int = 48
    buckets: tuple[int, ...] = (1, 2, 4, 6)
    seed: int = 0
    time: bool = False

    def __attrs_post_init__(self) -> None:
        """Refuse a tree that no draft fills, and options that are of no use."""
        if not self.one_launch and (self.ahead, self.chunk) != (1, 1):
            raise OptionsError("--ahead and --chunk are for --one-launch: give it, too, or leave them out")
        if self.one_launch and (self.time or self.ahead < 0):
            raise OptionsError("--one-launch takes --ahead 0 or more, and not --time: its later cycles have no batch")
        topk, steps = self.tree
        most = 1 + topk + (steps - 1) * topk**2
        if self.draft_tokens > most:
            raise OptionsError(
                f"--draft-tokens {self.draft_tokens}: --topk {topk} and --steps {steps} draft {most} nodes"
            )

    @property
    def tree(self) -> tuple[int, int]:
        """Branches and depth of a draft's tree; that of prompt lookup is a chain, as long as what is verified."""
        chain = self.lookup or self.model != RANDOM
        return (1, self.draft_tokens - 1) if chain else (self.topk, self.steps)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Return options from a command line, the process's own if none is given; exit with status 2 where one is wrong."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="speculative", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=shape
    )
    model = (
        "the target: random (a seeded Llama, with a draft model), or with prompt lookup smollm2 "
        "(SmolLM2-135M-Instruct), a folder of a Llama-like checkpoint, or a name on the hub"
    )
    rows = (
        ("model", str, model),
        ("backend", str, "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
        ("ahead", int, "launches beyond the one that is read, with --one-launch"),
        ("chunk", count, "cycles of one launch, with --one-launch"),
        ("topk", count, "branches that a draft step goes on from"),
        ("steps", count, "the depth of a draft's tree"),
        ("draft-tokens", count, "nodes of a tree that are verified, its root among them"),
        ("requests", count, "how many there are"),
        ("max-new-tokens", count, "tokens that a request gets at most"),
        ("buckets", counts, "batch sizes to capture; the largest is how many requests may run"),
        ("seed", int, "seed of the weights and of the requests"),
    )
    add_options(parser, Options(), rows)
    flags = {
        "--lookup": "draft by prompt lookup with --model random, too",
        "--one-launch": "draft, verify and extend in one launch, ahead of what the host reads",
        "--time": "say what the inputs of a cycle take on the host",
    }
    for flag, text in flags.items():
        parser.add_argument(flag, action="store_true", help=text)
    return Options(**vars(parser.parse_args(argv)))
