"""An explanation of a runner as one HTML page that opens offline: tables and pictures, nothing loaded, no script."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from xml.etree import ElementTree as ET

from ..capture import human_bytes
from .facts import (
    Row,
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
from .markup import Child, node, page_text
from .pictures import pictures
from .rank_facts import decision_text, forced_rows, rank_rows
from .records import RunnerExplanation
from .style import KINDS, PAGE
from .svg import Picture

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser lets the page do: be styled, and nothing else."""
_DRAWN: Final = {
    "upload": "host data and values sent to the device",
    "kernel": "one kernel that fills many slots",
    "graph": "a captured graph",
    "reset": "tails put back to their padding",
}
_DECLARED: Final = (
    "What each slot follows from. A green line comes from all that a computed slot needs; what is optional is dashed."
)
_FILLS: Final = (
    "The upper strip has a box for each step, in the plan's order, as wide as it has calls; a dashed one has none of "
    "its own in most steps, and what stands inside of the graph is done by the graph. The lower strip has the same "
    "steps, as wide as the bytes that they move. Neither is measured time."
)
_MEMORY: Final = (
    "Addresses run downwards, phases of one step to the right. A box is coloured while its slot's value counts, and "
    "pale where its bytes are only held. Heights grow with the logarithm of bytes; a line below a box, and the number "
    "behind the plus sign, are what alignment costs."
)
_POOL: Final = (
    "All slots of all runners that share memory, over the phases of their loop. Boxes beside one another have the same "
    "bytes at different times; this runner's have colours, others are grey."
)

_RANKS: Final = (
    "The processes that run each step together, on one path and in one bucket: that of the rank that needs the "
    "largest, or eagerly, where one must."
)


def html(explanation: RunnerExplanation) -> str:
    """The page."""
    return page_text(_Page(explanation).root())


class _Page:
    """The page in the making."""

    def __init__(self, explanation: RunnerExplanation) -> None:
        self._explained = explanation
        self._pictures = pictures(explanation)
        declaration = explanation.declaration.declaration
        self._title = f"{explanation.kind} over {declaration}"

    def root(self) -> ET.Element:
        sections = [
            self._declared(),
            self._fills(),
            self._graphs(),
            self._memory(),
            self._shared(),
            self._decisions(),
            self._ranks(),
            self._configuration(),
        ]
        found = [section for section in sections if section is not None]
        links = [node("a", _heading(one), href=f"#{one.get('id')}") for one in found]
        footer = node("footer", "Written by slotgraph explain. This page loads nothing and runs nothing.")
        body = node("body", self._header(), node("main", node("nav", links), found), footer)
        return node("html", self._head(), body, lang="en")

    def _head(self) -> ET.Element:
        return node(
            "head",
            node("meta", charset="utf-8"),
            node("meta", http_equiv="Content-Security-Policy", content=POLICY),
            node("meta", name="viewport", content="width=device-width, initial-scale=1"),
            node("meta", name="color-scheme", content="light dark"),
            node("title", self._title),
            node("style", PAGE),
        )

    def _header(self) -> ET.Element:
        one = self._explained
        where = f"on {one.backend} ({one.device}), path {one.path}, filled {one.lowering}"
        facts = [node("div", node("b", value), node("span", name), class_="fact") for name, value in self._facts()]
        return node(
            "header", node("h1", self._title), node("p", where, class_="faint"), node("div", facts, class_="facts")
        )

    def _facts(self) -> Iterator[tuple[str, str]]:
        """The few figures that one looks for first."""
        one = self._explained
        yield "slots", str(len(one.declaration.slots))
        if one.buckets:
            graphs = [graph for bucket in one.buckets for graph in bucket.graphs]
            yield "graphs captured", f"{sum(not graph.why for graph in graphs)} of {len(graphs)}"
        fill = one.buckets[-1].fill if one.buckets else one.eager.fill
        if fill is not None:
            calls = fill.uploads + fill.launches + fill.copies + fill.resets
            yield "calls to fill and launch, at most", str(calls)
            yield "copied in a full step", human_bytes(fill.copied)
        yield "held by the runner", human_bytes(one.memory.account.total + (one.eager.own if one.buckets else 0))
        for path, steps in one.decisions.paths.items():
            if path == one.path or steps:
                yield f"steps on path {path}", f"{steps:,}"
        if one.seconds is not None:
            yield "seconds of capture", f"{one.seconds:.2f}"

    def _declared(self) -> ET.Element:
        declaration = self._explained.declaration
        used = [kind for kind in KINDS if any(slot.kind == kind for slot in declaration.slots)]
        remarks = [
            f"Carried from the batch as they are: {', '.join(declaration.fields)}." if declaration.fields else None,
            f"Switched off by the settings: {', '.join(declaration.disabled)}." if declaration.disabled else None,
        ]
        return _section(
            "Declaration",
            _DECLARED,
            _legend({kind: kind for kind in used}),
            _figure(self._pictures["dependencies"]),
            [node("p", remark) for remark in remarks if remark],
            _table(slot_rows(declaration)),
        )

    def _fills(self) -> ET.Element | None:
        rows = rows_of(self._explained)
        if not rows:
            return None
        kinds: set[str] = {step.kind for row in rows for step in row.fill.steps}
        legend = {kind: f"{kind}: {told}" for kind, told in _DRAWN.items() if kind in kinds}
        tables = [(node("h3", row.label), _table(step_rows(row.fill)), _plan(str(row.fill.plan))) for row in rows]
        return _section("Fills", _FILLS, _legend(legend), _figure(self._pictures["fills"]), tables)

    def _graphs(self) -> ET.Element | None:
        one = self._explained
        if not one.buckets:
            return None
        told = "Every bucket with the calls and bytes of a full step, and every graph, or why there is none."
        return _section("Buckets", told, _table(bucket_rows(one)), node("h3", "Graphs"), _table(graph_rows(one)))

    def _memory(self) -> ET.Element:
        one = self._explained
        held = (node("h3", "Bytes held"), _table(account_rows(one)))
        if not one.memory.places:
            return _section("Memory", "There are no buffers before the first batch.", held)
        return _section("Memory", _MEMORY, _figure(self._pictures["memory"]), _table(place_rows(one.memory)), held)

    def _shared(self) -> ET.Element | None:
        pool = self._explained.pool
        if pool is None:
            return None
        lines = [node("p", text) for text in pool_lines(pool)]
        return _section("Shared memory", _POOL, lines, _figure(self._pictures["pool"]), _table(pool_rows(pool)))

    def _decisions(self) -> ET.Element:
        decisions = self._explained.decisions
        reasons = reason_rows(decisions)
        told = "What was decided so far: the path of steps, how fills were run, and why some took another way."
        eager = (node("h3", "Why steps ran eagerly"), _table(reasons)) if reasons else None
        asked = self._explained.asked
        this = node("p", f"This batch: {decision_text(asked)}.") if asked is not None else None
        return _section("Decisions", told, this, _table(decision_rows(decisions)), eager)

    def _ranks(self) -> ET.Element | None:
        ranks = self._explained.ranks
        if ranks is None:
            return None
        forced = forced_rows(ranks)
        by = (node("h3", "Steps that one rank forced on all"), _table(forced)) if forced else None
        return _section("Ranks", _RANKS, _table(rank_rows(ranks)), by)

    def _configuration(self) -> ET.Element:
        one = self._explained
        options = [{"option": name, "value": option_text(value)} for name, value in one.configuration.items()]
        sizes = [{"axis": axis, "size": size} for axis, size in one.sizes]
        patterns = "; ".join(", ".join(names) or "none" for names in one.patterns)
        absent = node("p", f"Graphs are wanted for these patterns of absent slots: {patterns}.") if patterns else None
        return _section("Configuration", "As the runner was given it.", _table(options), _table(sizes), absent)


def _section(title: str, told: str, *children: Child) -> ET.Element:
    name = title.lower().replace(" ", "-")
    return node("section", node("h2", title), node("p", told, class_="faint"), children, id=f"section-{name}")


def _heading(section: ET.Element) -> str:
    return section.findtext("h2") or ""


def _figure(picture: Picture) -> ET.Element:
    return node("div", picture.element, class_="picture")


def _legend(kinds: Mapping[str, str]) -> ET.Element | None:
    """What colours mean."""
    keys = [node("span", node("span", class_=f"key {kind}"), told) for kind, told in kinds.items()]
    return node("p", keys, class_="keys") if keys else None


def _plan(text: str) -> ET.Element:
    return node("details", node("summary", "the plan as text"), node("pre", text))


def _table(rows: Sequence[Row]) -> ET.Element | None:
    """A table of rows of the same cells; nothing where there is none."""
    if not rows:
        return None
    numbers = {name for name in rows[0] if any(isinstance(row[name], int | float) for row in rows)}
    head = node("tr", [node("th", name, scope="col", class_="number" if name in numbers else None) for name in rows[0]])
    body = [node("tr", [_cell(name, value, number=name in numbers) for name, value in row.items()]) for row in rows]
    return node("div", node("table", node("thead", head), node("tbody", body)), class_="table")


def _cell(name: str, value: Any, *, number: bool) -> ET.Element:
    shown = "-" if value is None or value == "" else f"{value:,}" if isinstance(value, int) else str(value)
    return node("td", shown, class_="number" if number else "name mono" if name == "slot" else None)
