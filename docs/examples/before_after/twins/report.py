"""The report: whether both runners are equal, and how much code each is."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from twins.comparison import TOLERANCE, Comparison, Served
from twins.lines import code_lines
from twins.options import Options

FOLDER = Path(__file__).parent
RUNNERS = ("before.py", "after.py")
SHARED = ("model.py", "attention.py", "cache.py", "sequences.py", "engine.py")


def outcome(options: Options, served: Served, comparison: Comparison) -> Iterator[str]:
    """What was run, and whether it is the same."""
    count, done = len(served.sequences), f"{served.tokens} tokens in {served.steps} engine steps"
    yield f"{count} sequences, {done} by either runner, on {options.backend}"
    if comparison.unequal is None:
        yield "equal: all tokens, and all bytes of the logits and of the caches"
    else:
        yield f"DIFFERENT: {comparison.unequal}"
    right = "right" if comparison.off <= TOLERANCE else "WRONG"
    yield f"{right}: logits differ from those of whole texts read at once by {comparison.off:.2g} at most"


def buckets(stats: Mapping[str, Any]) -> Iterator[str]:
    """What the runner with slotgraph counted by itself; the one written by hand counts nothing."""
    yield "decode steps, as slotgraph's runner counted them:"
    for rows, use in sorted(stats["buckets"].items()):
        waste = f"{use['live']} live of {use['padded']} rows, {use['waste']:.0%} waste"
        yield f"  bucket {rows}: {use['steps']} steps, {waste}"
    for why, steps in stats["eager"].items():
        yield f"  eagerly ({why}): {steps} steps"


def lines() -> Iterator[str]:
    """Code lines of both runners, part by part: what both have, and what is only in one of them."""
    before, after = (code_lines(FOLDER / name) for name in RUNNERS)
    yield f"{'code lines':28}{'before':>8}{'after':>8}"
    for name in [name for name in before if name in after]:
        yield f"{name:28}{before[name]:8}{after[name]:8}"
    for name in [name for name in before if name not in after]:
        yield f"only before: {name:15}{before[name]:8}"
    for name in [name for name in after if name not in before]:
        yield f"only after: {name:16}{'':8}{after[name]:8}"
    yield f"{'in all':28}{sum(before.values()):8}{sum(after.values()):8}"
    shared = sum(sum(code_lines(FOLDER / name).values()) for name in SHARED)
    yield f"both use the same {shared} lines of {', '.join(SHARED)}"
