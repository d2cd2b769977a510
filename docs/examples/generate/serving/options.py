"""The command line: one attrs field an option, from which the parser is made."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from serving.sampling import Sampler

FOLDER = Path(__file__).resolve().parents[1]
PROMPTS = FOLDER / "prompts.txt"
Number = TypeVar("Number", int, float)
RANDOM = "random"
"""The --model that needs no download."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DESCRIPTION = """\
Generate text for many prompts at once, and prove that it is right.

Requests arrive over time, share decode batches and leave when they are done.
Decode steps run through graphs captured for a few batch sizes (buckets), the
prompts of several requests through graphs of the model's layers for a few token
counts, between which attention runs eagerly. Every token and every logit is
then compared with what transformers' own generate() makes of each prompt alone;
below float32, where rounding decides between nearly equal logits, with what the
model itself makes of each text. At last the steps are timed, with and without
their inputs.
"""
EPILOGUE = "exit status: 0 all is equal, 1 a token or a logit differs, 2 it cannot be run"


class OptionsError(ValueError):
    """The options, or the model and prompts that they name, cannot be run; the message says what to change."""


def _checked(kind: type[Number], fits: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        read = kind(text)
        if not fits(read):
            raise argparse.ArgumentTypeError(f"expected {words}, got {text}")
        return read

    return number


count = _checked(int, lambda number: number >= 1, "a whole number of at least 1")
"""Reads a whole number of at least 1."""
_rounds = _checked(int, lambda number: number >= 0, "a whole number of at least 0")
_amount = _checked(float, lambda number: number >= 0, "a number of at least 0")
_share = _checked(float, lambda number: 0 < number <= 1, "a number above 0 and at most 1")


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas between them, each once, from small to large."""
    return tuple(sorted({count(part) for part in text.split(",")}))


def add_options(parser: argparse.ArgumentParser, defaults: Any, rows: Iterable[tuple[str, Any, str]]) -> None:
    """Add options to a parser: the name of each, what reads it, and its help. `defaults` has an attribute for each."""
    for name, kind, text in rows:
        default = getattr(defaults, name.replace("-", "_"))
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        metavar = {str: "NAME", counts: "N,N,.."}.get(kind, "N")
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=f"{text} (default: {shown})")


def _option(default: Any, text: str, **parser: Any) -> Any:
    """An option's default, its help, and what argparse must know of it."""
    return attrs.field(default=default, metadata={"help": text, **parser})


def _number(default: int, text: str) -> Any:
    """An option that is a whole number of at least 1."""
    return _option(default, text, type=count, metavar="N")


@attrs.frozen(kw_only=True)
class Options:
    """What one run of the demo is asked to do; every field is a command-line option of the same name."""

    model: str = _option(
        "smollm2",
        "smollm2 (SmolLM2-135M-Instruct from the package index), random (a small Llama with seeded weights), a "
        "folder of a Llama-like checkpoint, or a name on the hub, as in org/name",
        metavar="NAME",
    )
    prompts: str = _option(
        "",
        "file with a prompt a line, or - for standard input (default: prompts.txt beside this program; texts.txt "
        "with --model random)",
        metavar="FILE",
    )
    backend: str = _option(
        "cpu-capture", "where steps are captured: cpu-capture (a graph's rules, on a CPU), cpu, cuda, npu, auto"
    )
    dtype: str = _option("float32", "the model's dtype", choices=tuple(DTYPES))
    max_new_tokens: int = _number(48, "tokens that a request gets, unless its text ends earlier")
    max_batch: int = _number(16, "requests that may decode in one step")
    buckets: tuple[int, ...] = _option(
        (),
        "batch sizes to capture, as in 1,2,4,8 (default: doubling up to --max-batch; with --compile "
        "--max-batch alone, since torch takes up to a minute to compile for a size)",
        type=counts,
        metavar="N,N,..",
    )
    ahead: int | None = _option(
        None,
        "steps that are launched before the host has read the tokens of the one before (default: 1 on a device; on a "
        "CPU and over several processes the host reads each step's tokens first, as with --sync)",
        type=_rounds,
        metavar="N",
    )
    chunk: int = _number(1, "steps of one launch, with --ahead; it then counts launches")
    sync: bool = _option(
        False,  # noqa: FBT003 - a flag's default
        "build each batch on the host, from the tokens of the step before",
        action="store_true",
    )
    attention: str = _option(
        "auto",
        "how decode steps attend: auto (on CUDA a Triton kernel over the pages, else as sdpa), sdpa (torch's "
        "scaled_dot_product_attention over a copy of all pages, with a mask)",
        choices=("auto", "sdpa"),
    )
    temperature: float = _option(
        0.0, "draw tokens at this temperature, by --seed; 0 takes the likeliest", type=_amount, metavar="T"
    )
    top_p: float = _option(1.0, "draw from the likeliest tokens of this share alone", type=_share, metavar="P")
    prefill: str = _option(
        "auto",
        "how prompts run: breakable (graphs between marks in the attention's code), piecewise (the layers are "
        "traced and cut at the attention's operator), eager (no graphs), auto (eager on a CPU, where captures take "
        "long and gain nothing; else breakable)",
        choices=("auto", "breakable", "piecewise", "eager"),
    )
    max_prefill_tokens: int = _number(
        512, "tokens of prompts that may share one step; a longer prompt runs alone, and eagerly"
    )
    page_size: int = _number(16, "tokens that one page of the KV cache holds")
    arrival_gap: float = _option(
        0.0, "mean number of steps between two arrivals, 0 for all at once", type=_amount, metavar="N"
    )
    seed: int = _option(0, "seed of arrivals, of draws, and of the weights of --model random", type=int, metavar="N")
    tolerance: float | None = _option(
        None,
        "largest difference of a logit that counts as equal (default: 0.001 for float32, else twice what the model "
        "differs from itself in other batches)",
        type=_amount,
        metavar="X",
    )
    tp: int = _number(
        1,
        "processes that run each request together, a share of the model's heads and columns each; torchrun starts them",
    )
    dp: int = _number(
        1, "processes that serve a share of the requests each, with the whole model; torchrun starts them"
    )
    pp: int = _number(
        1, "processes that run each request one after another, a part of the model's layers each; torchrun starts them"
    )
    rounds: int | None = _option(
        None,
        "rounds in which decode steps are timed, 0 for none (default: 5 on a CPU, 11 on a device)",
        type=_rounds,
        metavar="N",
    )
    compile: bool = _option(
        False,  # noqa: FBT003 - a flag's default
        "capture torch.compile(step) as the decode step, on cuda, or on cpu with a C++ compiler",
        action="store_true",
    )
    verify: bool = _option(
        True,  # noqa: FBT003 - a flag's default
        "compare all with generate(); without it no logits leave the device",
        action=argparse.BooleanOptionalAction,
    )
    compare: bool | None = _option(
        None,
        "time what transformers does, too: its continuous batching (default: unless --model random), its own step "
        "under torch.compile, and torch.compile(step) through DecodeRunner (default: on a device; on a CPU "
        "compiling takes a minute)",
        action=argparse.BooleanOptionalAction,
    )
    json: Path | None = _option(  # noqa: RUF009 - an attrs.field
        None, "write the report to this file too", type=Path, metavar="FILE"
    )
    verbose: bool = _option(
        False,  # noqa: FBT003 - a flag's default
        "show the library's events: captures, growth",
        action="store_true",
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        return DTYPES[self.dtype]

    @property
    def sampler(self) -> Sampler:
        """What chooses tokens."""
        return Sampler(self.temperature, self.top_p, self.seed)

    @property
    def ladder(self) -> tuple[int, ...]:
        """The given buckets, or powers of two up to the largest batch, and that itself; compiled, that alone."""
        powers = () if self.compile else (1 << power for power in range(self.max_batch.bit_length()))
        return self.buckets or (*(size for size in powers if size < self.max_batch), self.max_batch)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="generate", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in attrs.fields(Options):
        details = dict(field.metadata)
        if field.default not in {None, "", ()} and "action" not in details:
            details["help"] += f" (default: {field.default})"
        parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **details)
    return Options(**vars(parser.parse_args(argv)))
