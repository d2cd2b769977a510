"""An explanation for readers: tables, printed by rich, and one HTML page that opens offline, with two pictures."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from string import Template
from typing import Any, Final

import attrs
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ...dataflow.explain import Explanation, SlotFacts
from ..statistics import human_bytes
from .explanation import RunnerExplanation

WIDE: Final = 200
"""Columns in a pipe or file, where nothing needs to fit a screen and a folded name could not be searched for."""
_LARGE: Final = 1000
Row = Mapping[str, Any]
"""Cells by their column. A number stands as one, None for what is not there."""
COLOURS: Final = {
    "copied": "#3b78b5",
    "computed": "#5a9a3a",
    "constant": "#b09a3c",
    "staged": "#c2703d",
    "output": "#8a4fa8",
    "upload": "#b64a72",
    "kernel": "#b58414",
    "graph": "#6a6fd8",
    "other": "#76808e",
}
"""The edge of a box, by the kind of slot or of step. Inside it is the same colour, nearly transparent."""
LIGHT: Final = "--ink:#1b2330;--muted:#525d6b;--rule:#d3d9e1;--panel:#f2f5f8;--page:#ffffff"
DARK: Final = "--ink:#e7ebf1;--muted:#a3afbe;--rule:#333d4a;--panel:#1a212b;--page:#11161d"
FONT: Final = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"
_STYLE: Final = (
    f":root{{{LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    f"svg.slotgraph{{background:var(--page);font:12px {FONT}}}svg.slotgraph text{{fill:var(--ink)}}"
    "svg.slotgraph text.faint{fill:var(--muted);font-size:10.5px}svg.slotgraph text.title{font-weight:600}"
    "rect.held{fill:var(--panel);stroke:var(--rule)}rect.node{fill-opacity:.2}rect.riding{stroke-dasharray:4 3}"
    + "".join(f"rect.{kind}{{fill:{colour};stroke:{colour}}}" for kind, colour in COLOURS.items())
)
"""What a picture brings along, light and dark."""
_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style
body{max-width:1440px;margin:0 auto;padding:16px 24px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,'Segoe UI',Roboto,'Liberation Sans',sans-serif}
h1{overflow-wrap:anywhere}h2{font-size:18px;margin:32px 0 4px}p{max-width:90ch;color:var(--muted)}
.wide{overflow-x:auto}.wide svg{display:block;max-width:100%;min-width:860px;height:auto}
pre{background:var(--panel);padding:10px 14px;overflow-x:auto;font:12px/1.4 $font}
@media print{body{font-size:11px;max-width:none}.wide,pre{overflow:visible}.wide svg{min-width:0}pre{font-size:6px}}
</style>
</head>
<body>
<h1>$title</h1>
<h2 id="fills">What a step does</h2>
<p>A box for each step, in the plan's order, as wide as it has calls; a dashed one has none of its own in most steps.
A bar below marks the graph and what it does. It is not measured time.</p>
<div class="wide">$fills</div>
<h2 id="memory">Memory over a step</h2>
<p>Addresses run downwards, phases of one step to the right. A slot is coloured while its value counts, and pale where
its bytes are only held. Heights grow with the logarithm of bytes.</p>
<div class="wide">$memory</div>
<h2 id="tables">Tables</h2>
<pre>$tables</pre>
</body>
</html>
""")
_EDGE, _AREA, _LEFT, _RIGHT = 10.0, 760.0, 110.0, 150.0
"""Space around a picture, its width, and room for offsets and for bytes beside the memory picture."""


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


def printed(shown: RenderableType, width: int = WIDE) -> str:
    """What a console without colours prints."""
    paper = io.StringIO()
    Console(file=paper, width=width, highlight=False).print(shown)
    return paper.getvalue()


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
    kind += [f"argument {slot.parameter}"] if slot.parameter else []
    kind += ["optional"] if slot.optional else []
    kind += [f"when {slot.when}"] if slot.when else []
    origin = "batch" if slot.source == f"batch.{slot.name}" else slot.source
    if slot.function is not None:
        origin = f"{slot.function}({', '.join(slot.needs)})"
    elif slot.value is not None:
        origin = f"set once: {slot.value}"
    elif slot.limit is not None:
        origin = f"{origin}, at most {slot.limit}"
    row = {
        "slot": slot.name,
        "kind": ", ".join(kind),
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
    if one.pool is not None:
        yield Table("shared memory", text=one.pool)
    yield Table("statistics", [{"what": what, "": value} for what, value in _counted(one.statistics)])
    if one.ranks is not None:
        yield Table("ranks", rows_of([one.ranks]))


def _counted(counts: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """What the runner has counted that is not zero, with dots between a count's names."""
    for name, value in counts.items():
        if isinstance(value, Mapping):
            yield from _counted(value, f"{within}{name}.")
        elif value and name != "every":  # how often fills are timed, which is no figure of the run
            yield f"{within}{name}", value


def html(explanation: RunnerExplanation) -> str:
    """The page, light or dark as its reader prefers."""
    return _PAGE.substitute(
        title=_escaped(f"{explanation.kind} over {explanation.declaration.declaration}"),
        style=_STYLE,
        font=FONT,
        tables=escape(printed(tables(explanation))),
        **pictures(explanation),
    )


def pictures(explanation: RunnerExplanation) -> Mapping[str, str]:
    """The SVG of each picture: "fills", what a step does, and "memory", where slots lie over the phases of a step."""
    return {"fills": _fills(explanation), "memory": _memory(explanation)}


def _escaped(text: str) -> str:
    return escape(printable(text))


def _svg(title: str, width: float, height: float, shapes: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="slotgraph" role="img" aria-label="{_escaped(title)}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"<style>{_STYLE}</style>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def _text(text: str, x: float, y: float, class_: str = "", anchor: str = "start", room: float = _AREA) -> str:
    """A line of text from its base line, cut to a room with dots where it is cut."""
    line = Text(printable(text))
    line.truncate(max(int(room / (6.5 if class_ == "faint" else 7.4)), 0), overflow="ellipsis")
    return f'<text x="{x:.6g}" y="{y:.6g}" text-anchor="{anchor}" class="{class_}">{escape(line.plain)}</text>'


def _box(at: tuple[float, ...], class_: str, lines: tuple[str, ...] = (), record: Any = None) -> str:
    """A box at x and y, of a width and a height, with lines in it, and what a browser shows over it: a record."""
    x, y, width, height = at
    facts = {} if record is None else attrs.asdict(record, recurse=False)
    hint = _escaped("\n".join(f"{name}: {cell(value)}" for name, value in facts.items() if value))
    top = y + height / 2 + 11.5 - 7.5 * len(lines)
    texts = (
        _text(line, x + 4, top + 15 * row, "faint" if row else "", room=width - 6) for row, line in enumerate(lines)
    )
    rect = f'<rect x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}" rx="4" class="{class_}"/>'
    return f"<g><title>{hint}</title>{rect}{''.join(texts)}</g>"


def _colour(kind: str) -> str:
    """The colour of a kind of slot or of step. Kinds of the user's own have none of theirs."""
    known = {"copy": "copied", "compute": "computed"}.get(kind, kind)
    return f"node {known if known in COLOURS else 'other'}"


def _fills(explanation: RunnerExplanation) -> str:
    """A row for all buckets that do the same, with a box for each step, as wide as its calls."""
    fills = explanation.fills
    unit = min(96.0, _AREA / max((sum(step.calls or 1 for step in fill.steps) for _, fill in fills), default=1))
    shapes, widest, top = list[str](), _AREA, _EDGE
    for name, fill in fills:
        told = ", ".join(f"{kind} {calls}" for kind, calls in fill.calls.items() if calls)
        shapes.append(_text(f"{name}: calls of {told}", _EDGE, top + 12, "title"))
        x = _EDGE
        for number, step in enumerate(fill.steps, 1):
            width = max(20.0, unit * (step.calls or 1))
            lines = (f"{number} {step.kind}", *(() if step.nbytes is None else (human_bytes(step.nbytes),)))
            lines = lines if width > 8 * len(lines[0]) else (str(number),)
            riding = " riding" if step.maybe or not step.calls else ""
            shapes.append(_box((x, top + 26, width, 44), f"{_colour(step.kind)}{riding}", lines, step))
            if step.inside or step.kind == "graph":
                shapes.append(_box((x, top + 73, width, 3), "graph"))
            x += width + 4
        widest, top = max(widest, x - _EDGE), top + 96
    title = f"What a step of {explanation.kind} does, in the plan's order"
    return _svg(title, widest + 2 * _EDGE, max(top, 40.0), shapes)


def _memory(explanation: RunnerExplanation) -> str:
    """Addresses downwards, phases to the right: a slot is coloured while its value counts, and pale otherwise.

    Heights grow with the logarithm of bytes, since slots of 4 bytes lie beside slots of megabytes.
    """
    memory, kinds = explanation.memory, {slot.name: slot.kind for slot in explanation.declaration.slots}
    column, top, phases = _AREA / len(memory.phases), 30.0, memory.phases
    shapes = [_text(phase, _LEFT + (at + 0.5) * column, 18, "title", "middle") for at, phase in enumerate(phases)]
    for one in memory.allocations:
        title = f"{one.name}{', handed in' if one.adopted else ''}: {one.nbytes:,} bytes"
        shapes.append(_text(title, _EDGE, top + 16, "title"))
        top += 26
        for place in (place for place in memory.places if place.allocation == one.name):
            height = 20 + 2.5 * max(0.0, math.log2(max(place.nbytes, 1) / 64))
            middle, kind = top + height / 2 + 4, kinds[place.slot]
            since, until = phases.index(place.since), phases.index(place.until) + 1
            span = (_LEFT + since * column + 2, top, (until - since) * column - 4, height)
            shapes += [
                _text(f"{place.offset:,}", _LEFT - 8, middle, "faint", "end"),
                _box((_LEFT, top, _AREA, height), "held"),
                _box(span, _colour(kind), (f"{place.slot}, {kind}",), place),
                _text(f"{place.nbytes:,} B", _LEFT + _AREA + 8, middle, "faint"),
            ]
            top += height + 3
    return _svg(f"Memory of {explanation.kind} over a step", _LEFT + _AREA + _RIGHT, top + _EDGE, shapes)
