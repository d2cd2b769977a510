"""An explanation for readers: tables and two pictures, printed by rich, and one HTML page that opens offline."""

import io
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from string import Template
from typing import Any, Final

import attrs
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement, measure_renderables
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from ..statistics import human_bytes
from .declared import Explanation, SlotFacts
from .explanation import RunnerExplanation

WIDE: Final = 200
"""Columns in a pipe or file, where nothing needs to fit a screen and a folded name could not be searched for."""
_LARGE: Final = 1000
_GAP, _FOLDED = 2, 24
"""Columns between two of a table, and those that longer text is folded to before others move below."""
_PICTURE, _UNIT, _MOST = 110, 6, 60
"""Columns of a picture, those that a call takes, and the most that a step takes for its calls."""
Row = Mapping[str, Any]
"""Cells by their column. A number stands as one, None for what is not there."""
COLOURS: Final = {
    "copied": "#3b78b5",
    "computed": "#5a9a3a",
    "constant": "#8a7a20",
    "staged": "#c2703d",
    "output": "#8a4fa8",
    "upload": "#b64a72",
    "kernel": "#946a08",
    "graph": "#6a6fd8",
    "other": "#76808e",
}
"""What is behind a box, by the kind of slot or of step."""
_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
body{max-width:1440px;margin:0 auto;padding:16px 24px;font:15px/1.5 system-ui,sans-serif}h1{overflow-wrap:anywhere}
pre{overflow-x:auto;font:12px/1.35 ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}
</style>
</head>
<body>
<h1>$title</h1>
<h2 id="fills">What a step does</h2>
<p>A box for each step, in the plan's order, as wide as it has calls; a pale one has none of its own in most steps.
A bar behind a box marks the graph and what it does. It is not measured time.</p>
<pre>$fills</pre>
<h2 id="memory">Memory over a step</h2>
<p>Offsets run downwards, phases of one step to the right. A slot is coloured while its value counts, and pale where
its bytes are only held.</p>
<pre>$memory</pre>
<h2 id="tables">Tables</h2>
<pre>$tables</pre>
</body>
</html>
""")
_SVG: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}">
<style>
.{unique_id}-matrix {{font:{char_height}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}}
{styles}
</style>
<defs>
{lines}
</defs>
<rect width="100%" height="100%" fill="#ffffff"/>
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</svg>
"""
"""A picture without the frame and the fonts, from elsewhere, that rich has."""


@attrs.frozen
class Table:
    """Rows of the same columns under a title, and text below them, such as a plan."""

    title: str
    rows: Sequence[Row] = ()
    text: object = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The table for a console. Columns without room follow below; words stay whole; no cell commands a terminal."""
        yield Text(printable(self.title), style="bold")
        cells = {name: [Text(printable(name)), *(Text(cell(row[name])) for row in self.rows)] for name in self.names}
        sizes = {name: measure_renderables(console, options, column) for name, column in cells.items()}
        for names in _parts(sizes, options.max_width):
            widths = _widths({name: sizes[name] for name in names}, options.max_width)
            shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            for name in names:
                is_number = any(type(row[name]) in (int, float) for row in self.rows)
                justify: Any = "right" if is_number else "left"
                shown.add_column(cells[name][0], justify=justify, overflow="fold", width=widths[name])
            for row in zip(*(cells[name][1:] for name in names), strict=True):
                shown.add_row(*row)
            yield from (shown, "")
        if self.text:
            yield Text(f"{printable(str(self.text))}\n")

    @property
    def names(self) -> list[str]:
        """The columns, of which the first says what a row is of."""
        return [*self.rows[0]] if self.rows else []


def _parts(sizes: Mapping[str, Measurement], room: int) -> list[list[str]]:
    """The columns that stand beside one another, part below part; each begins with the first column."""
    parts = [[*sizes][:1]] if sizes else []
    for name in [*sizes][1:]:
        wanted = sum(min(sizes[n].maximum, max(sizes[n].minimum, _FOLDED)) + _GAP for n in (*parts[-1], name)) - _GAP
        if wanted > room and len(parts[-1]) > 1:
            parts.append(parts[0][:1])
        parts[-1].append(name)
    return parts


def _widths(sizes: Mapping[str, Measurement], room: int) -> dict[str, int]:
    """A width for each column: the widest give way first, and none breaks a word while another has room."""
    widths = {name: size.maximum for name, size in sizes.items()}
    over = sum(widths.values()) + _GAP * (len(widths) - 1) - room
    for _ in range(over):
        spare = [name for name, size in sizes.items() if widths[name] > size.minimum]
        if not spare:
            break
        widths[max(spare, key=lambda name: widths[name])] -= 1
    return widths


def rows_of(records: Sequence[Any], **first: Any) -> list[Row]:
    """A row for each record, with a column for each field. first: columns before them."""
    return [{**first, **attrs.asdict(one, recurse=False)} for one in records]


def printable(text: str) -> str:
    """Text without what would command a terminal, or cannot stand in a page."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def cell(value: Any) -> str:
    """What stands in a cell: text, numbers, names, or names with values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.4g}"
    if attrs.has(type(value)):
        value = attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        value = [f"{name}={cell(one)}" for name, one in value.items()]
    text = ", ".join(map(cell, value)) if isinstance(value, list | tuple) else str(value or "")
    return printable(text) or "-"


def tables(explanation: Explanation | RunnerExplanation) -> Group:
    """All tables of a declaration or of a runner, for a rich console."""
    made = _of_declaration(explanation) if isinstance(explanation, Explanation) else _of_runner(explanation)
    return Group(*(table for table in made if table.rows or table.text))


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
    kind = [slot.kind if slot.runs_on is None else f"{slot.kind} on the {slot.runs_on}"]
    kind += [f"argument {slot.parameter}" if slot.parameter else "", "optional" if slot.optional else ""]
    kind += [f"when {slot.when}" if slot.when else ""]
    origin = "batch" if slot.source == f"batch.{slot.name}" else slot.source
    if slot.function is not None:
        origin = f"{slot.function}({', '.join(slot.needs)})"
    elif slot.value is not None:
        origin = f"set once: {slot.value}"
    elif slot.limit is not None:
        origin = f"{origin}, at most {slot.limit}"
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
    told = f"path {one.path}, lowering {one.lowering}\n{cell(one.configuration)}"
    yield Table(f"{one.kind} on {one.backend} ({one.device})", text=told)
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
    yield Table("shared memory", text=one.pool or "")
    yield Table("statistics", [{"what": what, "": value} for what, value in _counted(one.statistics)])
    yield Table("ranks", rows_of([one.ranks] if one.ranks else []))


def _counted(counts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """What the runner has counted that is not zero, with dots between a count's names."""
    for name, value in counts.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{within}{name}.")
        elif value and name != "every":  # how often fills are timed, which is no figure of the run
            yield f"{within}{name}", value


def html(explanation: RunnerExplanation) -> str:
    """The page, light or dark as its reader prefers."""
    parts = {"fills": _fills(explanation), "memory": _memory(explanation), "tables": tables(explanation)}
    pages = {name: _on_paper(one).export_html(inline_styles=True, code_format="{code}") for name, one in parts.items()}
    title = escape(printable(f"{explanation.kind} over {explanation.declaration.declaration}"))
    return _PAGE.substitute(pages, title=title)


def pictures(explanation: RunnerExplanation) -> Mapping[str, str]:
    """The SVG of each picture: "fills", what a step does, and "memory", where slots lie over the phases of a step."""
    parts = {"fills": _fills(explanation), "memory": _memory(explanation)}
    theme: dict[str, Any] = {"theme": DEFAULT_TERMINAL_THEME, "code_format": _SVG}
    return {name: _on_paper(one, _PICTURE).export_svg(**theme, unique_id=name) for name, one in parts.items()}


def _on_paper(shown: RenderableType, width: int = WIDE) -> Console:
    """A console that keeps what it printed, for export."""
    console = Console(file=io.StringIO(), width=width, highlight=False, record=True, color_system="truecolor")
    console.print(shown)
    return console


def _colour(kind: str, *, pale: bool) -> str:
    """The style of a kind of slot or of step. Kinds of the user's own have none of theirs."""
    known = {"copy": "copied", "compute": "computed"}.get(kind, kind)
    colour = COLOURS.get(known, COLOURS["other"])
    return f"{colour} on #e4e7ec" if pale else f"#ffffff on {colour}"


def _fills(explanation: RunnerExplanation) -> Group:
    """A row for all buckets that do the same, with a box for each step, as wide as its calls."""
    shown = list[RenderableType]()
    for name, fill in explanation.fills:
        told = ", ".join(f"{kind} {calls}" for kind, calls in fill.calls.items() if calls)
        shown.append(Text(f"{name}: calls of {told}", style="bold"))
        boxes = Text()
        for number, step in enumerate(fill.steps, 1):
            size = "" if step.nbytes is None else f" {human_bytes(step.nbytes)}"
            label = f" {number} {step.kind}{size} ".ljust(min(_UNIT * step.calls, _MOST))
            if len(boxes.plain.rpartition("\n")[2] + label) > _PICTURE - 2:
                boxes.append("\n")
            boxes.append(label, style=_colour(step.kind, pale=step.maybe or not step.calls))
            boxes.append("▕ " if step.inside or step.kind == "graph" else "  ", style=COLOURS["graph"])
        shown += [boxes, Text()]
    return Group(*shown)


def _memory(explanation: RunnerExplanation) -> Group:
    """Offsets downwards, phases to the right: a slot is coloured while its value counts, and pale otherwise."""
    memory, kinds = explanation.memory, {slot.name: slot.kind for slot in explanation.declaration.slots}
    shown = list[RenderableType]()
    for one in memory.allocations:
        shown.append(Text(f"{one.name}{', handed in' if one.adopted else ''}: {one.nbytes:,} bytes", style="bold"))
        grid = RichTable(box=None, expand=True, pad_edge=False)
        for name in ("offset", *memory.phases, "bytes"):
            is_phase = name in memory.phases
            grid.add_column(name, justify="left" if is_phase else "right", ratio=1 if is_phase else None)
        for place in (place for place in memory.places if place.allocation == one.name):
            since, until = memory.phases.index(place.since), memory.phases.index(place.until)
            cells = list[RenderableType]()
            for at in range(len(memory.phases)):
                label = Text(printable(f"{place.slot}, {kinds[place.slot]}") if at == since else "", no_wrap=True)
                cells.append(Padding(label, style=_colour(kinds[place.slot], pale=not since <= at <= until)))
            grid.add_row(f"{place.offset:,}", *cells, f"{place.nbytes:,}")
        shown += [grid, Text()]
    return Group(*shown)
