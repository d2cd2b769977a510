"""An explanation of a runner as one HTML page that opens offline: two pictures, each an SVG of its own, and tables."""

import math
from collections.abc import Mapping
from html import escape
from string import Template
from typing import Any, Final

import attrs
from rich.text import Text

from ..statistics import human_bytes
from .explanation import RunnerExplanation
from .tables import cell, printable, printed, tables

COLOURS: Final = {
    "copied": "#3b78b5",
    "parameter": "#2f8a8a",
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
A bar below marks the graph and what it does. The strip has the same steps, as wide as the bytes that they move.
Neither is measured time.</p>
<div class="wide">$fills</div>
<h2 id="memory">Memory over a step</h2>
<p>Addresses run downwards, phases of one step to the right. A slot is coloured while its value counts, and pale where
its bytes are only held. Heights grow with the logarithm of bytes; what follows a plus sign is what alignment costs.</p>
<div class="wide">$memory</div>
<h2 id="tables">Tables</h2>
<pre>$tables</pre>
</body>
</html>
""")
_EDGE, _AREA, _LEFT, _RIGHT = 10.0, 760.0, 110.0, 150.0
"""Space around a picture, its width, and room for offsets and for bytes beside the memory picture."""


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
    """A row for all buckets that do the same: a box a step, as wide as its calls, and a strip as wide as its bytes."""
    fills = explanation.fills
    unit = min(96.0, _AREA / max((sum(step.calls or 1 for step in fill.steps) for _, fill in fills), default=1))
    shapes, widest, top = list[str](), _AREA, _EDGE
    for name, fill in fills:
        told = ", ".join(f"{kind} {calls}" for kind, calls in fill.calls.items() if calls)
        shapes.append(_text(f"{name}: calls of {told}", _EDGE, top + 12, "title"))
        widths = [max(20.0, unit * (step.calls or 1)) for step in fill.steps]
        total, wide = sum(step.nbytes or 0 for step in fill.steps), sum(widths) + 4 * len(widths) - 4
        x = moved = _EDGE
        for number, (step, width) in enumerate(zip(fill.steps, widths, strict=True), 1):
            lines = (f"{number} {step.kind}", *(() if step.nbytes is None else (human_bytes(step.nbytes),)))
            lines = lines if width > 8 * len(lines[0]) else (str(number),)
            riding = " riding" if step.maybe or not step.calls else ""
            shapes.append(_box((x, top + 26, width, 44), f"{_colour(step.kind)}{riding}", lines, step))
            if step.inside or step.kind == "graph":
                shapes.append(_box((x, top + 73, width, 3), "graph"))
            if step.nbytes:
                share = step.nbytes / total * wide
                shapes.append(_box((moved, top + 84, max(share - 1, 0.5), 9), _colour(step.kind), record=step))
                moved += share
            x += width + 4
        if total:
            line = f"bytes moved, {human_bytes(total)} when every row is live"
            shapes.append(_text(line, _EDGE, top + 106, "faint"))
        widest, top = max(widest, wide), top + 124
    return _svg(
        f"What a step of {explanation.kind} does, in the plan's order", widest + 2 * _EDGE, max(top, 40.0), shapes
    )


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
            middle, gap, kind = top + height / 2 + 4, f" + {place.gap:,}" if place.gap else "", kinds[place.slot]
            since, until = phases.index(place.since), phases.index(place.until) + 1
            span = (_LEFT + since * column + 2, top, (until - since) * column - 4, height)
            shapes += [
                _text(f"{place.offset:,}", _LEFT - 8, middle, "faint", "end"),
                _box((_LEFT, top, _AREA, height), "held"),
                _box(span, _colour(kind), (f"{place.slot}, {kind}",), place),
                _text(f"{place.nbytes:,} B{gap}", _LEFT + _AREA + 8, middle, "faint"),
            ]
            top += height + 3
    return _svg(f"Memory of {explanation.kind} over a step", _LEFT + _AREA + _RIGHT, top + _EDGE, shapes)
