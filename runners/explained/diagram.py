"""An explanation of a runner as a mermaid diagram: its declaration's, with the runner in the captured step's place."""

from typing import Final

from ...dataflow.mermaid import mermaid as declaration_mermaid
from .records import RunnerExplanation

_MOST: Final = 8
"""Buckets that are named; of more the first and the last."""


def mermaid(explanation: RunnerExplanation) -> str:
    """The diagram as text, for a Markdown block or mermaid's own tools; the same for equal explanations."""
    return declaration_mermaid(explanation.declaration, step_lines(explanation))


def step_lines(explanation: RunnerExplanation) -> list[str]:
    """The runner in a few short lines: its kind, its graphs, how it is filled, and which rank it is, if it is one."""
    rows = [bucket.rows for bucket in explanation.buckets if any(not graph.why for graph in bucket.graphs)]
    if explanation.path == "eager":
        graphs = "without graphs"
    elif not rows:
        graphs = "nothing captured"
    else:
        named = ", ".join(map(str, rows)) if len(rows) <= _MOST else f"{rows[0]} to {rows[-1]}"
        graphs = f"{len(rows)} buckets: {named}" if len(rows) > 1 else f"bucket {named}"
    ranks = explanation.ranks
    together = [] if ranks is None else [f"rank {ranks.rank} of {ranks.size}"]
    return [explanation.kind, graphs, f"filled {explanation.lowering}", *together]
