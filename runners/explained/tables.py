"""An explanation of a runner as tables for a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .facts import (
    account_rows,
    bucket_rows,
    decision_rows,
    graph_rows,
    option_text,
    place_rows,
    pool_lines,
    pool_rows,
    reason_rows,
    slot_rows,
    step_rows,
)
from .fill_picture import rows_of
from .rank_facts import decision_text, forced_rows, rank_rows
from .records import RunnerExplanation


def tables(explanation: RunnerExplanation) -> RenderableType:
    """The runner, its declaration, fills, buckets, graphs, memory and decisions."""
    return Group(*_parts(explanation))


def _parts(explanation: RunnerExplanation) -> Iterator[RenderableType]:
    yield Text(f"{explanation.kind} on {explanation.backend} ({explanation.device})", style="bold")
    yield Text(f"path {explanation.path}, lowering {explanation.lowering}")
    yield Text(", ".join(f"{name}={option_text(value)}" for name, value in explanation.configuration.items()))
    if explanation.asked is not None:
        yield Text(f"this batch: {decision_text(explanation.asked)}")
    yield from _titled(f"slots of {explanation.declaration.declaration}", slot_rows(explanation.declaration))
    for row in rows_of(explanation):
        yield from _titled(f"steps of a fill, {row.label}", step_rows(row.fill))
        yield Text(str(row.fill.plan))
    yield from _titled("buckets", bucket_rows(explanation))
    yield from _titled("graphs", graph_rows(explanation))
    yield from _titled("memory layout", place_rows(explanation.memory))
    if explanation.pool is not None:
        yield from _titled("shared memory", pool_rows(explanation.pool))
        yield from map(Text, pool_lines(explanation.pool))
    yield from _titled("bytes held", account_rows(explanation))
    yield from _titled("decisions", decision_rows(explanation.decisions))
    yield from _titled("eager steps", reason_rows(explanation.decisions))
    if explanation.ranks is not None:
        yield from _titled("ranks", rank_rows(explanation.ranks))
    yield from _titled("steps that one rank forced on all", forced_rows(explanation.ranks))


def _titled(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    """A table under its title; nothing where it has no row."""
    if not rows:
        return
    yield Text(f"\n{title}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if isinstance(value, int | float) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row.values()))
    yield table


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)
