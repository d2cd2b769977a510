"""Tables, page and pictures: whole, offline, readable, and deaf to what names try to say to a browser."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import NamedTuple
from xml.etree import ElementTree as ET

import pytest

import slotgraph
from slotgraph.dataflow.errors import CaptureError
from slotgraph.dataflow.explain import mermaid
from slotgraph.dataflow.serial import to_data
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.explained.pages import html, pictures, printable, printed, tables
from tests.runners.explained.houses import (
    HARM,
    full_batch,
    full_runner,
    harmful_runner,
    many_runner,
    pooled_runner,
    proxy,
)

NAMESPACE = "{http://www.w3.org/2000/svg}"


class Parsed(HTMLParser):
    """A page as a browser takes it: its tags with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def full() -> RunnerExplanation:
    """A runner over every kind of slot that has done some steps."""
    runner = full_runner(lowering="in_graph")
    runner.capture()
    for rows in (1, 5, 7, 11):
        runner(full_batch(rows), **proxy(rows))
    return slotgraph.explain(runner)


def many() -> RunnerExplanation:
    """44 slots, nine buckets, one call a slot."""
    return slotgraph.explain(many_runner("slot_by_slot"))


def harmful() -> RunnerExplanation:
    """Names that mean harm."""
    runner = harmful_runner()
    with pytest.raises(CaptureError):
        runner.capture()
    return slotgraph.explain(runner)


def pooled() -> RunnerExplanation:
    """A runner that shares its memory with others."""
    return slotgraph.explain(pooled_runner())


def shown(explanation: RunnerExplanation) -> str:
    """The tables as a wide terminal has them."""
    return printed(tables(explanation), 400)


def test_tables_and_page_say_it_all() -> None:
    """Slots, steps, plans, places, bytes, decisions and shared memory are in both, and each slot by name."""
    explanation = pooled()
    page = Parsed(html(explanation))
    assert {"svg", "pre"} <= {tag for tag, _ in page.tags}
    for text in (shown(explanation), page.text):
        for part in (
            "DecodeRunner on cpu",
            "slots of FullInputs",
            "steps of a fill, 2 buckets, 2 to 8",
            "plan of FullInputs for BATCH=8",
            "memory layout",
            "a constant, which no step writes",
            "statistics",
            "shared memory",
            "shares with none",
        ):
            assert part in text
        assert all(text.count(slot.name) >= 3 for slot in explanation.declaration.slots)
    assert "nothing is captured yet: call capture()" in shown(many())
    for part in ("fused kernel, the graph's first node", " 0.25 ", "eager.too_large.steps"):
        assert part in shown(full()), part


def test_page_loads_and_runs_nothing() -> None:
    """No script, no style sheet, image, font or frame from outside, and a policy that forbids all of them."""
    page = html(full())
    parsed = Parsed(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert set(re.findall(r"https?://[^\s\"<]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"url\(|@import|javascript:", page)
    policy = [attributes["content"] for tag, attributes in parsed.tags if tag == "meta" and "http-equiv" in attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_names_are_letters() -> None:
    """A name, a rule and a failure that look like markup are text in every form: no tag, no attribute of theirs."""
    explanation = harmful()
    page = html(explanation)
    page.encode()
    parsed, plain = Parsed(page), Parsed(html(full()))
    assert {tag for tag, _ in parsed.tags} <= {tag for tag, _ in plain.tags}
    known = {name for _, attributes in plain.tags for name in attributes}
    assert {name for _, attributes in parsed.tags for name in attributes} <= known
    assert parsed.text.count(printable(HARM)) >= 5
    assert not re.search("[\x00\x1b\u202e]", page)
    assert json.loads(json.dumps(to_data(explanation)))["buckets"][0]["graphs"][0]["why"].endswith(HARM)
    assert "<script>" not in mermaid(explanation.declaration)
    assert "<script>alert(1)</script>" in shown(explanation)


class Rectangle(NamedTuple):
    """A box from its left upper corner to its right lower one."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "Rectangle") -> bool:
        """Whether both have more than an edge in common."""
        apart = self.right < other.left + 0.1 or other.right < self.left + 0.1
        return not (apart or self.bottom < other.top + 0.1 or other.bottom < self.top + 0.1)

    def holds(self, other: "Rectangle") -> bool:
        """Whether the other is inside."""
        starts = self.left <= other.left + 0.1 and self.top <= other.top + 0.1
        return starts and self.right >= other.right - 0.1 and self.bottom >= other.bottom - 0.1


def boxes(root: ET.Element, class_: str = "node") -> list[Rectangle]:
    """The boxes of a class."""
    found = [one.attrib for one in root.iter(f"{NAMESPACE}rect") if class_ in one.get("class", "").split()]
    places = [[float(one[name]) for name in ("x", "y", "width", "height")] for one in found]
    return [Rectangle(x, y, x + width, y + height) for x, y, width, height in places]


def words(root: ET.Element) -> Iterator[Rectangle]:
    """At most so much room each line of text takes."""
    for one in root.iter(f"{NAMESPACE}text"):
        letter, size = (6.5, 10.5) if one.get("class") == "faint" else (7.4, 12.0)
        width, x, y = len(one.text or "") * letter, float(one.attrib["x"]), float(one.attrib["y"])
        left = x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[one.attrib["text-anchor"]]
        yield Rectangle(left, y - size * 0.78, left + width, y + size * 0.2)


@pytest.mark.parametrize("explained", [full, many, harmful, pooled])
@pytest.mark.parametrize("name", ["fills", "memory"])
def test_pictures_are_sound(explained: Callable[[], RunnerExplanation], name: str) -> None:
    """Nothing is outside, no text is over another or leaves its box, no box is empty, and no script is drawn."""
    root = ET.fromstring(pictures(explained())[name])  # noqa: S314 - our own text
    whole, texts = Rectangle(*map(float, root.attrib["viewBox"].split())), [*words(root)]
    shapes = boxes(root) + boxes(root, "held")
    assert texts
    assert all(whole.holds(one) for one in (*texts, *shapes))
    assert not any(one.meets(other) for one, other in itertools.combinations(texts, 2))
    assert all(shape.right > shape.left and shape.bottom > shape.top for shape in shapes)
    for group in root.iter(f"{NAMESPACE}g"):
        assert all(box.holds(text) for box in boxes(group) for text in words(group))
    assert {one.tag.removeprefix(NAMESPACE) for one in root.iter()} <= {"svg", "style", "g", "title", "rect", "text"}


def test_alike_buckets_share_a_row() -> None:
    """Buckets that do the same are one row; the eager fill has one of its own."""
    assert [name for name, _ in many().fills] == ["9 buckets, 1 to 256", "eager, not padded"]
    names = [name for name, _ in slotgraph.explain(many_runner("foreach")).fills]
    assert names == ["8 buckets, 1 to 128", "bucket 256", "eager, not padded"], "the last has copies apart"
