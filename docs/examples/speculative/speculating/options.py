"""The command line: one attrs field an option, from which the parser is made."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from serving.options import RANDOM, OptionsError, count, counts

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


def _says(text: str, **parser: Any) -> Mapping[str, Any]:
    """An option's help, and what argparse must know of it."""
    return {"help": text, **parser}


@attrs.frozen(kw_only=True)
class Options:
    """What one run is asked to do; every field is a command-line option of the same name."""

    model: str = attrs.field(
        default=RANDOM,
        metadata=_says(
            "the target: random (a seeded Llama, with a draft model), or with prompt lookup smollm2 "
            "(SmolLM2-135M-Instruct), a folder of a Llama-like checkpoint, or a name on the hub",
            metavar="NAME",
        ),
    )
    lookup: bool = attrs.field(
        default=False, metadata=_says("draft by prompt lookup with --model random, too", action="store_true")
    )
    backend: str = attrs.field(
        default="cpu-capture",
        metadata=_says("where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"),
    )
    one_launch: bool = attrs.field(
        default=False,
        metadata=_says("draft, verify and extend in one launch, ahead of what the host reads", action="store_true"),
    )
    ahead: int = attrs.field(
        default=1, metadata=_says("launches beyond the one that is read, with --one-launch", type=int, metavar="N")
    )
    chunk: int = attrs.field(
        default=1, metadata=_says("cycles of one launch, with --one-launch", type=count, metavar="N")
    )
    topk: int = attrs.field(
        default=3, metadata=_says("branches that a draft step goes on from", type=count, metavar="N")
    )
    steps: int = attrs.field(default=4, metadata=_says("the depth of a draft's tree", type=count, metavar="N"))
    draft_tokens: int = attrs.field(
        default=10, metadata=_says("nodes of a tree that are verified, its root among them", type=count, metavar="N")
    )
    requests: int = attrs.field(default=12, metadata=_says("how many there are", type=count, metavar="N"))
    max_new_tokens: int = attrs.field(
        default=48, metadata=_says("tokens that a request gets at most", type=count, metavar="N")
    )
    buckets: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 6),
        metadata=_says(
            "batch sizes to capture; the largest is how many requests may run", type=counts, metavar="N,N,.."
        ),
    )
    seed: int = attrs.field(default=0, metadata=_says("seed of the weights and of the requests", type=int, metavar="N"))
    time: bool = attrs.field(
        default=False, metadata=_says("say what the inputs of a cycle take on the host", action="store_true")
    )

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
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="speculative",
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
    details["help"] += "" if default is False else f" (default: {shown})"
    parser.add_argument("--" + field.name.replace("_", "-"), default=default, **details)
