"""Tables of any records, printed by rich, for explanations and for commands; and the diagram of an explanation."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ...dataflow.explain import Explanation, SlotFacts, mermaid
from ..statistics import Decision
from .explanation import RunnerExplanation

WIDE: Final = 200
"""Columns in a pipe or file, where nothing needs to fit a screen and a folded name could not be searched for."""
_LARGE: Final = 1000
_NO_FIELDS: Final = ("histogram", "every")
Row = Mapping[str, Any]
"""Cells by their column. A number stands as one, None for what is not there."""


@attrs.frozen
class Table:
    """Rows of the same columns under a title, and text below them, such as a plan."""

    title: str
    rows: Sequence[Row] = ()
    text: object = ""

    def __rich__(self) -> Group:
        """The table for a console. Cells fold, and nothing in them commands a terminal."""
        parts: list[RenderableType] = [Text(printable(self.title), style="bold")]
        if self.rows:
            shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
            for name in self.rows[0]:
                is_number = any(type(row[name]) in (int, float) for row in self.rows)
                shown.add_column(printable(name), justify="right" if is_number else "left", overflow="fold")
            for row in self.rows:
                shown.add_row(*(Text(cell(value)) for value in row.values()))
            parts.append(shown)
        return Group(*parts, *([Text(f"{printable(str(self.text))}\n")] if self.text else ()))


def rows_of(records: Sequence[Any], **first: Any) -> list[Row]:
    """A row for each record, with a column for each field. first: columns before them."""
    return [{**first, **attrs.asdict(one, recurse=False)} for one in records]


def printable(text: str) -> str:
    """Text without what would command a terminal, or cannot stand in a page."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def cell(value: Any) -> str:
    """What stands in a cell: text, numbers, names, or names with values."""
    if isinstance(value, Decision):
        bucket = "" if value.bucket is None else f", bucket {value.bucket}"
        forced = "" if value.rank is None else f", forced by rank {value.rank}"
        return printable(f"{value.path}{bucket}{forced}: {value.reason}")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.4g}"
    if isinstance(value, Mapping):
        value = [f"{name}={cell(one)}" for name, one in value.items()]
    text = ", ".join(map(cell, value)) if isinstance(value, list | tuple) else str(value or "")
    return printable(text) or "-"


def printed(shown: RenderableType, width: int = WIDE) -> str:
    """What a console without colours prints."""
    paper = io.StringIO()
    Console(file=paper, width=width, highlight=False).print(shown)
    return paper.getvalue()


def tables(explanation: Explanation | RunnerExplanation) -> Group:
    """All tables of a declaration or of a runner, for a rich console."""
    made = _of_declaration(explanation) if isinstance(explanation, Explanation) else _of_runner(explanation)
    return Group(*(table for table in made if table.rows or table.text))


def diagram(explanation: Explanation | RunnerExplanation) -> str:
    """The dependencies as a mermaid diagram. A runner's has its kind, graphs and rank on the captured step."""
    if isinstance(explanation, Explanation):
        return mermaid(explanation)
    rows = [bucket.rows for bucket in explanation.buckets if any(not graph.why for graph in bucket.graphs)]
    graphs = f"{len(rows)} buckets, {rows[0]} to {rows[-1]}" if rows else "nothing captured"
    lines = [explanation.kind, graphs, f"filled {explanation.lowering}"]
    if explanation.ranks is not None:
        lines.append(f"rank {explanation.ranks.rank} of {explanation.ranks.size}")
    return mermaid(explanation.declaration, lines)


def _of_declaration(one: Explanation) -> Iterator[Table]:
    yield _slots(f"{one.declaration} on {one.backend}", one)
    if one.plan is None:
        yield Table("plan", text="Give the size of every axis to see the plan and its bytes.")
        return
    sizes = (f"{a.name}={a.padded}" if a.fixed else f"{a.name}={a.live}/{a.padded}" for a in one.axes)
    told = f"{one.plan}\n{one.nbytes or 0:,} bytes of buffers for this bucket; this step copies {one.copied or 0:,}"
    yield Table(f"plan for {', '.join(sizes)}", text=told)


def _slots(title: str, one: Explanation) -> Table:
    remarks = {
        "carried from the batch as they are": one.fields,
        "switched off by the settings": one.disabled,
        "computed in this order": one.order,
    }
    text = "\n".join(f"{what}: {', '.join(names)}" for what, names in remarks.items() if names)
    return Table(title, [_slot(slot) for slot in one.slots], text)


def _slot(slot: SlotFacts) -> Row:
    kind = [
        slot.kind if slot.runs_on is None else f"{slot.kind} on the {slot.runs_on}",
        "" if slot.parameter is None else f"argument {slot.parameter}",
        "optional" if slot.optional else "",
        "" if slot.when is None else f"when {slot.when}",
    ]
    origin = {"staged": "a producer", "output": "the step writes it"}.get(slot.kind)
    if slot.function is not None:
        origin = f"{slot.function}({', '.join(slot.needs)})"
    elif slot.value is not None:
        origin = f"set once: {slot.value}"
    elif slot.source is not None:
        origin = "batch" if slot.source == f"batch.{slot.name}" else slot.source
        origin += "" if slot.limit is None else f", at most {slot.limit}"
    row = {
        "slot": slot.name,
        "kind": ", ".join(filter(None, kind)),
        "shape": f"[{', '.join(slot.shape)}]",
        "dtype": f"{slot.dtype} ({slot.role})" if slot.role else slot.dtype,
        "on": slot.placement,
        "tail": slot.tail,
        "comes from": origin,
    }
    return row if slot.padded is None else {**row, "padded to": str([*slot.padded]), "bytes": slot.nbytes}


def _of_runner(one: RunnerExplanation) -> Iterator[Table]:
    lines = [f"path {one.path}, lowering {one.lowering}", cell(one.configuration)]
    if one.asked is not None:
        alone = one.ranks is not None and one.ranks.on is not None
        told = "; what this rank would do alone: the others were not asked" if alone else ""
        lines.append(f"this batch: {cell(one.asked)}{told}")
    yield Table(f"{one.kind} on {one.backend} ({one.device})", text="\n".join(lines))
    yield _slots(f"slots of {one.declaration.declaration}", one.declaration)
    for name, fill in one.fills:
        steps = [{"step": number, **row} for number, row in enumerate(rows_of(fill.steps), 1)]
        yield Table(f"steps of a fill, {name}", steps, fill.plan)
    buckets: list[Row] = [
        {"bucket": one.rows, "sizes": dict(one.fill.plan.sizes), "copied": one.fill.plan.nbytes, **one.fill.calls}
        for one in one.buckets
    ]
    yield Table("buckets, and calls of a step", buckets)
    yield Table("graphs", [row for one in one.buckets for row in rows_of(one.graphs, bucket=one.rows)])
    yield Table("memory layout", rows_of(one.memory.places))
    yield Table("allocations", rows_of(one.memory.allocations))
    if one.pool is not None:
        yield Table("shared memory", text=printed(one.pool).rstrip())
    yield Table("statistics", [{"what": what, "": value} for what, value in _counted(one.statistics)])
    if one.ranks is not None:
        facts = attrs.asdict(one.ranks, recurse=False)
        yield Table("ranks", [{"ranks": what, "": cell(told)} for what, told in facts.items()])


def _counted(counts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """What the runner has counted that is not zero, with dots between a count's names."""
    for name, value in counts.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{within}{name}.")
        elif value and name not in _NO_FIELDS:
            yield f"{within}{name}", value
