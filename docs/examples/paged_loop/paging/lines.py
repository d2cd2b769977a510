"""Code lines of both ways, part by part: no blanks, no comments, no docstrings."""

from paging.by_hand import HandEngine, HandRunner
from paging.engine import LLMEngine
from paging.inputs import DecodeInputs, PrefillInputs
from paging.runner import ModelRunner
from serving.lines import code_lines


def table() -> list[str]:
    """Return a line for each part that differs. What both ways share is in neither column."""
    rows = {
        "declarations": (code_lines(DecodeInputs) + code_lines(PrefillInputs), 0),
        "model runner": (code_lines(ModelRunner), code_lines(HandRunner)),
        "the loop": (code_lines(LLMEngine), code_lines(HandEngine)),
    }
    ours, others = (sum(column) for column in zip(*rows.values(), strict=True))
    cells = [(name, str(one), str(other or "")) for name, (one, other) in rows.items()]
    whole = [("code lines", "slotgraph", "by hand"), *cells, ("in all", str(ours), str(others))]
    return [f"{name:12} {one:>10} {other:>8}".rstrip() for name, one, other in whole]
