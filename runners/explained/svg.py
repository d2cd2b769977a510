"""The pictures of an explanation: what a step does, and where slots lie; drawn as SVG, each a file of its own."""

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Final
from xml.etree import ElementTree as ET

from ..capture import human_bytes
from .records import Fill, FillStep, RunnerExplanation, SlotPlace

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
"""The edge of a box, by the kind of slot or of step; inside it is the same colour, nearly transparent."""
LIGHT: Final = "--ink:#1b2330;--muted:#525d6b;--rule:#d3d9e1;--panel:#f2f5f8;--page:#ffffff"
DARK: Final = "--ink:#e7ebf1;--muted:#a3afbe;--rule:#333d4a;--panel:#1a212b;--page:#11161d"
FONT: Final = "ui-monospace,'DejaVu Sans Mono','Liberation Mono',Menlo,Consolas,monospace"
STYLE: Final = (
    f":root{{{LIGHT}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}"
    f"svg.slotgraph{{background:var(--page);font:12px {FONT}}}svg.slotgraph text{{fill:var(--ink)}}"
    "svg.slotgraph text.faint{fill:var(--muted);font-size:10.5px}svg.slotgraph text.title{font-weight:600}"
    "rect.held{fill:var(--panel);stroke:var(--rule)}rect.node{fill-opacity:.2}rect.riding{stroke-dasharray:4 3}"
    + "".join(f"rect.{kind}{{fill:{colour};stroke:{colour}}}" for kind, colour in COLOURS.items())
    + "rect.frame{fill:none;stroke-width:2}"
)
"""What a picture brings along, light and dark."""
_UNFIT: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
"""What XML and UTF-8 cannot hold, and marks that turn the order of letters around."""
_EDGE, _AREA, _LEFT, _RIGHT = 10.0, 760.0, 110.0, 150.0
"""Space around a picture, its width, and room for offsets and for bytes beside the memory picture."""


def clean(text: str) -> str:
    """Text that any browser takes: what cannot stand in a page is shown as a replacement mark."""
    return _UNFIT.sub("\ufffd", text)


def pictures(explanation: RunnerExplanation) -> Mapping[str, str]:
    """The SVG of each picture: "fills", what a step does, and "memory", where slots lie over the phases of a step."""
    return {"fills": _fills(explanation), "memory": _memory(explanation)}


def _svg(title: str, width: float, height: float, shapes: Sequence[ET.Element]) -> str:
    size = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    root = ET.Element("svg", size, xmlns="http://www.w3.org/2000/svg", role="img")
    root.set("class", "slotgraph")
    root.set("aria-label", clean(title))
    ET.SubElement(root, "style").text = STYLE
    root.extend(shapes)
    return ET.tostring(root, encoding="unicode") + "\n"


def _text(text: str, x: float, y: float, class_: str = "", anchor: str = "start", room: float = math.inf) -> ET.Element:
    """A line of text from its base line, cut to a room."""
    made = ET.Element("text", {"x": f"{x:.6g}", "y": f"{y:.6g}", "text-anchor": anchor, "class": class_})
    made.text = clipped(clean(text), room / (6.5 if class_ == "faint" else 7.4))
    return made


def clipped(text: str, columns: float) -> str:
    """The text, cut to so many columns of a fixed-width font, with dots where it is cut."""
    kept = ""
    for sign in text:
        columns -= 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        if columns < 0:
            return f"{kept[:-1]}…" if kept else ""
        kept += sign
    return kept


def _box(at: tuple[float, ...], class_: str, lines: Sequence[str] = (), hint: str = "") -> ET.Element:
    """A box at x and y, of a width and a height, with lines in it, and what a browser shows over it."""
    (x, y, width, height), made = at, ET.Element("g")
    ET.SubElement(made, "title").text = clean(hint)
    numbers = {"x": x, "y": y, "width": width, "height": height, "rx": 4}
    ET.SubElement(made, "rect", {name: f"{value:.6g}" for name, value in numbers.items()} | {"class": class_})
    for row, line in enumerate(lines):
        base = y + height / 2 + 4 + 15 * (row - (len(lines) - 1) / 2)
        made.append(_text(line, x + 4, base, "faint" if row else "", room=width - 6))
    return made


def _fills(explanation: RunnerExplanation) -> str:
    """A row for all buckets that do the same: a box a step, as wide as its calls, and a strip as wide as its bytes."""
    most = max((sum(step.calls or 1 for step in fill.steps) for _, fill in explanation.fills), default=1)
    unit = min(96.0, _AREA / most)
    shapes, width, top = list[ET.Element](), _AREA + 2 * _EDGE, _EDGE
    for name, fill in explanation.fills:
        sums = {"uploads": fill.uploads, "launches": fill.launches, "copy calls": fill.copies, "resets": fill.resets}
        told = ", ".join(f"{what} {count}" for what, count in {**sums, "computed": fill.computed}.items() if count)
        shapes.append(_text(f"{name}: {told or 'no call'}", _EDGE, top + 12, "title", room=_AREA))
        boxes, right = _steps(fill, top + 26, unit)
        shapes += [*boxes, *_strip(fill, top + 84, right - _EDGE)]
        width, top = max(width, right + _EDGE), top + 124
    return _svg(f"What a step of {explanation.kind} does, in the plan's order", width, max(top, 40.0), shapes)


def _steps(fill: Fill, top: float, unit: float) -> tuple[list[ET.Element], float]:
    """A box for each step, and where the last ends; a frame is around the graph and what it does."""
    boxes, x, framed = list[ET.Element](), _EDGE, math.inf
    for number, step in sorted(enumerate(fill.steps, 1), key=lambda one: (one[1].kind == "graph", one[1].inside)):
        width = max(20.0, unit * (step.calls or 1))
        lines = [f"{number} {step.kind}", *([] if step.nbytes is None else [human_bytes(step.nbytes)])]
        lines = lines if width > 8 * len(f"{number} {step.kind}") else [str(number)]
        riding = " riding" if step.maybe or not step.calls else ""
        boxes.append(_box((x, top, width, 44), f"node {_colour(step.kind)}{riding}", lines, _told(step)))
        framed = min(framed, x) if step.inside else framed
        x += width + 4
    if framed < x:
        boxes.insert(0, _box((framed - 3, top - 3, x - framed + 2, 50), "graph frame"))
    return boxes, x - 4


def _strip(fill: Fill, top: float, width: float) -> Iterator[ET.Element]:
    """The same steps, as wide as the bytes that they move."""
    total, x = sum(step.nbytes or 0 for step in fill.steps), _EDGE
    for step in fill.steps:
        if step.nbytes:
            share = step.nbytes / total * width
            yield _box((x, top, max(share - 1, 0.5), 9), f"node {_colour(step.kind)}", hint=_told(step))
            x += share
    if total:
        yield _text(f"bytes moved, {human_bytes(total)} when every row is live", _EDGE, top + 22, "faint")


def _told(step: FillStep) -> str:
    lines = [f"{step.kind}: {step.label}", f"calls: {step.calls}"]
    lines += ["left out where nothing is dirty"] if step.maybe else []
    lines += [f"{step.nbytes:,} bytes when every row is live"] if step.nbytes is not None else []
    return "\n".join([*lines, ", ".join(step.slots)])


def _colour(kind: str) -> str:
    """The colour of a kind of slot or of step; kinds of the user's own have none of theirs."""
    known = {"copy": "copied", "compute": "computed"}.get(kind, kind)
    return known if known in COLOURS else "other"


def _memory(explanation: RunnerExplanation) -> str:
    """Addresses downwards, phases to the right: a slot is coloured while its value counts, and pale otherwise.

    Heights grow with the logarithm of bytes, since slots of 4 bytes lie beside slots of megabytes.
    """
    memory, kinds = explanation.memory, {slot.name: slot.kind for slot in explanation.declaration.slots}
    column, shapes, top = _AREA / len(memory.phases), list[ET.Element](), 30.0
    for at, phase in enumerate(memory.phases):
        shapes.append(_text(phase, _LEFT + (at + 0.5) * column, 18, "title", "middle"))
    for one in memory.allocations:
        title = f"{one.name}{', handed in' if one.adopted else ''}: {one.nbytes:,} bytes, {one.unused:,} in no slot"
        shapes.append(_text(title, _EDGE, top + 16, "title", room=_AREA))
        top += 26
        for place in (place for place in memory.places if place.allocation == one.name):
            height = 20 + 2.5 * max(0.0, math.log2(max(place.nbytes, 1) / 64))
            middle, gap = top + height / 2 + 4, f" + {place.gap:,}" if place.gap else ""
            since, until = memory.phases.index(place.since), memory.phases.index(place.until) + 1
            span = (_LEFT + since * column + 2, top, (until - since) * column - 4, height)
            label = f"{place.slot}, {kinds[place.slot]}"
            shapes.append(_text(f"{place.offset:,}", _LEFT - 8, middle, "faint", "end"))
            shapes.append(_box((_LEFT, top, _AREA, height), "held"))
            shapes.append(_box(span, f"node {_colour(kinds[place.slot])}", [label], _lies(place)))
            shapes.append(_text(f"{place.nbytes:,} B{gap}", _LEFT + _AREA + 8, middle, "faint"))
            top += height + 3
    return _svg(f"Memory of {explanation.kind} over a step", _LEFT + _AREA + _RIGHT, top + _EDGE, shapes)


def _lies(place: SlotPlace) -> str:
    lines = [f"{place.slot} [{', '.join(map(str, place.shape))}]"]
    lines.append(f"bytes {place.offset:,} to {place.offset + place.nbytes:,} of {place.allocation}")
    lines += [f"then {place.gap:,} bytes to the next address that is aligned"] if place.gap else []
    lines += [f"kept between steps: {place.lasting}"] if place.lasting else []
    lines += [f"shared with {', '.join(place.shares)}"] if place.shares else []
    return "\n".join(lines)
