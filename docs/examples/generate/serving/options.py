"""The command line: one attrs field an option, from which the parser is made."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

PROMPTS = Path(__file__).resolve().parent.parent / "prompts.txt"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCES = {"float32": 1e-3, "float16": 0.1, "bfloat16": 1.0}
DESCRIPTION = """\
Generate text for many prompts at once and prove that it is right.

Requests arrive over time, share decode batches and leave when they are done. Prompts run through an eager runner, decode
steps through captured graphs of a few batch sizes (buckets). Afterwards every token and every logit is compared with what
transformers' own generate() says for each prompt alone.
"""
EPILOGUE = "exit status: 0 all tokens and logits are equal, 1 one differs, 2 the options make no sense"


class OptionsError(ValueError):
    """The options, or the model and the prompts that they name, cannot be run; the message says what to change."""


def _buckets(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        message = f"expected a whole number of at least 1, got {text}"
        raise argparse.ArgumentTypeError(message)
    return number


def _option(default: Any, convert: Any, text: str, **more: Any) -> Any:
    return attrs.field(default=default, metadata={"type": convert, "help": text, **more})


@attrs.frozen(kw_only=True)
class Options:
    """What one run of the demo is asked to do; every field is a command-line option of the same name."""

    model: Path | None = _option(
        None, Path, "folder of a Llama-family checkpoint (default: a small seeded Llama made on the spot)", metavar="FOLDER"
    )
    prompts: str = _option(
        "", str, "file with one prompt a line, or - for standard input (default: the 16 prompts beside this program)",
        metavar="FILE",
    )
    backend: str = _option(
        "cpu-capture", str, "where decode steps are captured: cpu-capture (true graph rules on a CPU), cpu, cuda, auto"
    )
    dtype: str = _option("float32", str, "the model's dtype", choices=tuple(DTYPES))
    max_new_tokens: int = _option(48, _count, "tokens that a request may get; it leaves earlier at an end-of-text token")
    max_batch: int = _option(8, _count, "requests that may decode in one step")
    buckets: tuple[int, ...] = _option(
        (), _buckets, "batch sizes to capture, as in 1,2,4,8 (default: doubling up to --max-batch)", metavar="N,N,..."
    )
    page_size: int = _option(16, _count, "tokens that one page of the KV cache holds")
    arrival_gap: float = _option(3.0, float, "mean number of steps between the arrivals of two requests; 0: all at once")
    seed: int = _option(0, int, "seed of the small Llama's weights and of the arrivals")
    tolerance: float | None = _option(
        None, float, "largest difference of a logit that counts as equal (default: by dtype, "
        + ", ".join(f"{name} {value:g}" for name, value in TOLERANCES.items()) + ")",
    )
    json: Path | None = _option(None, Path, "write the report to this file as JSON too", metavar="FILE")
    verbose: bool = attrs.field(
        default=False, metadata={"action": "store_true", "help": "show the library's events: captures, growth, fallbacks"}
    )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        return DTYPES[self.dtype]

    @property
    def logits_tolerance(self) -> float:
        """The given tolerance, or the dtype's."""
        return TOLERANCES[self.dtype] if self.tolerance is None else self.tolerance

    @property
    def ladder(self) -> tuple[int, ...]:
        """The given buckets, or powers of two up to the largest batch."""
        doubling = (2**power for power in range(self.max_batch.bit_length()) if 2**power < self.max_batch)
        return self.buckets or (*doubling, self.max_batch)


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options from a command line, the process's own if none is given; exits with status 2 where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="generate", description=DESCRIPTION, epilog=EPILOGUE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in attrs.fields(Options):
        _add(parser, field)
    return Options(**vars(parser.parse_args(argv)))


def _add(parser: argparse.ArgumentParser, field: "attrs.Attribute[Any]") -> None:
    details = dict(field.metadata)
    if "(default" not in details["help"] and field.default is not None:
        details["help"] += f" (default: {field.default})"
    parser.add_argument("--" + field.name.replace("_", "-"), default=field.default, **details)
