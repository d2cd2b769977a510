"""The picture of fills: what a step does in the plan's order, a row for all buckets that do the same.

The upper strip of a row has a box a step, as wide as it has calls; what is done inside the graph stands in the graph's
box. The lower strip has the same steps, as wide as the bytes that they move. Neither is measured time.
"""

from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree import ElementTree as ET

import attrs

from ..capture import human_bytes
from .markup import node
from .records import BucketFacts, Fill, FillStep, RunnerExplanation, Use
from .svg import NORMAL, SMALL, Picture, box, clipped, hint, letters, width_of

EDGE: Final = 10.0
AREA: Final = 760.0
MOST: Final = 96.0
LEAST: Final = 13.0
RIDING: Final = 0.9
TALL: Final = 44.0
STRIP: Final = 9.0
PITCH: Final = 118.0
TOP: Final = 14.0
INSET: Final = 8.0
BESIDE: Final = 190.0


@attrs.frozen
class Row:
    """Buckets that are filled alike, told by `label`; the fill of the largest of them, and how all were used."""

    label: str
    fill: Fill
    uses: tuple[Use, ...] = ()


def rows_of(explanation: RunnerExplanation) -> list[Row]:
    """A row for buckets next to one another that do the same; the eager fill last."""
    groups: list[list[BucketFacts]] = []
    for bucket in explanation.buckets:
        if groups and _shape(groups[-1][-1].fill) == _shape(bucket.fill):
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
    rows = [Row(_label(group), group[-1].fill, tuple(one.use for one in group if one.use)) for group in groups]
    eager = explanation.eager.fill
    return rows if eager is None else [*rows, Row("eager, not padded", eager)]


def _shape(fill: Fill) -> list[FillStep]:
    """What a fill does, whatever the bytes."""
    return [attrs.evolve(step, nbytes=None) for step in fill.steps]


def _label(group: Sequence[BucketFacts]) -> str:
    first, last = group[0].rows, group[-1].rows
    return f"bucket {first}" if len(group) == 1 else f"{len(group)} buckets, {first} to {last}"


def fill_picture(rows: Sequence[Row], owner: str, name: str = "fills") -> Picture:
    """The picture of the fills of one runner."""
    return _Drawing(rows, owner, name).picture()


class _Drawing:
    """The picture in the making."""

    def __init__(self, rows: Sequence[Row], owner: str, name: str) -> None:
        self._rows = rows
        told = "; ".join(f"{row.label}: {_calls(row.fill)}" for row in rows) or "nothing is filled yet"
        self._picture = Picture(name, f"What a step of {owner} does, in the plan's order", told)
        most = max((sum(map(_units, row.fill.steps)) for row in rows), default=1.0)
        self._unit = min(MOST, AREA / most)

    def picture(self) -> Picture:
        """Rows below one another."""
        for index, row in enumerate(self._rows):
            self._row(row, TOP + index * PITCH)
        bottom = TOP + max(len(self._rows), 1) * PITCH
        self._picture.reach(2 * EDGE + AREA, bottom - 10)
        return self._picture

    def _row(self, row: Row, top: float) -> None:
        title = f"{row.label}: {_calls(row.fill)}{_measured(row.uses)}"
        self._picture.add(letters(clipped(title, AREA), EDGE, top + 12, class_="strong"))
        y, right = top + 22, EDGE
        for drawn, end in self._steps(row.fill, y):
            self._picture.add(drawn)
            right = end
        self._picture.reach(right + EDGE, y)
        self._picture.add(self._bytes(row.fill, y + TALL + 9, right))

    def _steps(self, fill: Fill, y: float) -> Iterator[tuple[ET.Element, float]]:
        """A box for each step and where it ends; those inside of the graph in its box."""
        x = EDGE
        inside = [(number, step) for number, step in enumerate(fill.steps, 1) if step.inside]
        for number, step in enumerate(fill.steps, 1):
            if step.inside:
                continue
            if step.kind == "graph" and inside:
                drawn, x = self._graph(number, step, inside, x, y)
                yield drawn, x
            else:
                width = self._width(step)
                yield self._step(number, step, (x, y, width, TALL)), x + width
                x += width + 4

    def _graph(
        self, number: int, step: FillStep, inside: Sequence[tuple[int, FillStep]], x: float, y: float
    ) -> tuple[ET.Element, float]:
        at, boxes = x + INSET, []
        for own, one in inside:
            width = self._width(one)
            boxes.append(self._step(own, one, (at, y + 4, width, TALL - 8)))
            at += width + 4
        width = at - x + self._width(step)
        label = letters(clipped(f"{number} {step.label}", self._width(step) - 8), at + 4, y + 18)
        outer = box(x, y, width, TALL, class_="node graph")
        return node("g", outer, hint(_whole(step)), label, boxes, class_="row"), x + width

    def _width(self, step: FillStep) -> float:
        return max(LEAST, _units(step) * self._unit)

    def _step(self, number: int, step: FillStep, at: tuple[float, float, float, float]) -> ET.Element:
        x, y, width, height = at
        dashed = " dashed" if step.maybe or not step.calls else ""
        moved = "" if step.nbytes is None else human_bytes(step.nbytes)
        return node(
            "g",
            box(x, y, width, height, class_=f"node {_class(step)}{dashed}"),
            letters(_short(number, step, width - 8), x + 5, y + height / 2 - 4),
            letters(clipped(moved, width - 8, SMALL), x + 5, y + height / 2 + 11, size=SMALL, class_="faint"),
            hint(_whole(step)),
            class_="row",
        )

    def _bytes(self, fill: Fill, y: float, right: float) -> Iterator[ET.Element]:
        """The strip of bytes, as long as the strip of calls."""
        moved = [(step, step.nbytes) for step in fill.steps if step.nbytes]
        total, x = sum(nbytes for _, nbytes in moved), EDGE
        for step, nbytes in moved:
            width = nbytes / total * (right - EDGE)
            drawn = box(x, y, max(width - 1, 0.5), STRIP, class_=f"node {_class(step)}", radius=1.5)
            yield node("g", drawn, hint(_whole(step)), class_="row")
            x += width
        if moved:
            told = f"bytes moved, {human_bytes(total)} when every row is live"
            yield letters(told, EDGE, y + STRIP + 13, size=SMALL, class_="faint")


def _measured(uses: Sequence[Use]) -> str:
    """What fills took in fact, where some were timed."""
    times = [use.time for use in uses if use.time is not None]
    if not times:
        return ""
    mean = sum(time.mean * time.count for time in times) / sum(time.count for time in times)
    return f"; fills took {mean:.1f} us on average"


def _units(step: FillStep) -> float:
    return float(step.calls) if step.calls else RIDING


def _class(step: FillStep) -> str:
    return {"copy": "copied", "compute": "computed", "step": "outside"}.get(step.kind, step.kind)


def _short(number: int, step: FillStep, room: float) -> str:
    """A step's number and kind, or its number alone, whatever there is room for."""
    calls = f" x{step.calls}" if step.calls > 1 and step.kind != "graph" else ""
    words = (f"{number} {step.kind}{calls}", f"{number} {step.kind}", str(number))
    return next((text for text in words if width_of(text, NORMAL) <= room), "")


def _calls(fill: Fill) -> str:
    """The sums of a fill in words."""
    counts = {
        "upload": fill.uploads,
        "launch": fill.launches,
        "copy call": fill.copies,
        "reset call": fill.resets,
        "computed": fill.computed,
    }
    told = [f"{count} {_plural(what, count)}" for what, count in counts.items() if count]
    return ", ".join(told) or "no call"


def _plural(what: str, count: int) -> str:
    if count == 1 or what == "computed":
        return what
    return f"{what}es" if what.endswith("ch") else f"{what}s"


def _whole(step: FillStep) -> str:
    """A step in several lines."""
    lines = [f"{step.kind}: {step.label}", f"{step.calls} {_plural('call', step.calls)}"]
    if step.maybe:
        lines.append("left out where nothing is dirty")
    if step.nbytes is not None:
        lines.append(f"{step.nbytes:,} bytes when every row is live")
    return "\n".join([*lines, ", ".join(step.slots)])
