"""The page and the other forms: whole, offline, and deaf to what names try to say to a browser."""

import io
import itertools
import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

import slotgraph
from slotgraph.dataflow.errors import CaptureError
from slotgraph.dataflow.serial import to_data
from slotgraph.runners.explained import style
from slotgraph.runners.explained.diagram import mermaid
from slotgraph.runners.explained.html import html
from slotgraph.runners.explained.markup import clean, node, page_text
from slotgraph.runners.explained.pictures import pictures
from slotgraph.runners.explained.tables import tables
from tests.runners.explained.houses import HARM, full_runner, harmful_runner, many_runner

SHOWN = clean(HARM)
"""Hostile text as a page shows it."""


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


def harmful_page() -> str:
    """The page of a runner whose names mean harm."""
    runner = harmful_runner()
    with pytest.raises(CaptureError):
        runner.capture()
    return html(slotgraph.explain(runner))


def test_page_has_everything() -> None:
    """Each section is there with its picture or table, every slot in each, and every link leads somewhere."""
    explanation = slotgraph.explain(full_runner(lowering="in_graph"))
    page = Parsed(html(explanation))
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert {"dependencies", "fills", "memory"} <= ids
    links = [str(attributes["href"]) for tag, attributes in page.tags if tag == "a"]
    assert len(links) == 6
    assert {link.removeprefix("#") for link in links} <= ids
    for slot in explanation.declaration.slots:
        assert page.text.count(slot.name) >= 4


def test_page_loads_and_runs_nothing() -> None:
    """No script, no style sheet, image, font or frame from outside, and a policy that forbids all of them."""
    page = html(slotgraph.explain(full_runner()))
    parsed = Parsed(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert re.findall(r"https?://[^\s\"<]*", page) == ["http://www.w3.org/2000/svg"] * 3
    assert not re.search(r"url\(|@import|javascript:", page)
    policy = [attributes["content"] for tag, attributes in parsed.tags if tag == "meta" and "http-equiv" in attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_hostile_names_are_letters() -> None:
    """A name, a rule and a failure that look like markup end up as text: no tag, no attribute of theirs."""
    page = harmful_page()
    parsed, plain = Parsed(page), Parsed(html(slotgraph.explain(full_runner())))
    assert {tag for tag, _ in parsed.tags} <= {tag for tag, _ in plain.tags} | {"desc"}
    known = {name for _, attributes in plain.tags for name in attributes}
    assert {name for _, attributes in parsed.tags for name in attributes} <= known
    assert parsed.text.count(SHOWN) >= 5
    assert not re.search("[\x00\x1b\u202e]", page)


def test_hostile_names_do_no_harm_in_other_forms() -> None:
    """Pictures stay XML, JSON stays JSON, a diagram keeps its lines, and tables print."""
    runner = harmful_runner()
    with pytest.raises(CaptureError):
        runner.capture()
    explanation = slotgraph.explain(runner)
    for picture in pictures(explanation).values():
        root = ET.fromstring(picture.text)  # noqa: S314 - our own text
        assert not [one for one in root.iter() if one.tag.endswith("script")]
    assert json.loads(json.dumps(to_data(explanation)))["buckets"][0]["graphs"][0]["why"].endswith(HARM)
    assert "<script>" not in mermaid(explanation)
    console = Console(file=io.StringIO(), width=400)
    console.print(tables(explanation))
    assert "<script>alert(1)</script>" in console.file.getvalue()  # type: ignore[attr-defined] # a StringIO


@pytest.mark.parametrize("text", ["</script><b>", 'a" onload="x', "&amp;", "]]>", "\x00\x1b", "\ud800", "a\u202eb"])
def test_text_and_attributes_are_escaped(text: str) -> None:
    """Whatever is put in comes out as one text and one attribute, in bytes that UTF-8 holds."""
    page = page_text(node("p", text, title=text))
    page.encode()
    parsed = Parsed(page)
    assert parsed.tags == [("p", {"title": clean(text)})]
    assert parsed.text.strip() == clean(text)


def test_tables_say_it_all() -> None:
    """A terminal gets slots, steps, plans, graphs, places, bytes and decisions."""
    console = Console(file=io.StringIO(), width=220)
    explanation = slotgraph.explain(full_runner(lowering="in_graph"))
    console.print(tables(explanation))
    shown = console.file.getvalue()  # type: ignore[attr-defined] # a StringIO
    for part in (
        "DecodeRunner on cpu",
        "slots of FullInputs",
        "steps of a fill, 2 buckets, 2 to 8",
        "fused kernel, the graph's first node",
        "plan of FullInputs for BATCH=8",
        "nothing is captured yet: call capture()",
        "memory layout",
        "a constant, which no step writes",
        "all that is the runner's own",
    ):
        assert part in shown
    for slot in explanation.declaration.slots:
        assert slot.name in shown


def test_diagram_names_the_runner() -> None:
    """The captured step is the runner with its graphs; of many buckets the first and the last are named."""
    runner = full_runner()
    runner.capture()
    assert 'captured[["DecodeRunner<br/>2 buckets: 2, 8<br/>filled foreach"]]' in mermaid(slotgraph.explain(runner))
    runner = many_runner()
    runner.capture()
    assert "9 buckets: 1 to 256" in mermaid(slotgraph.explain(runner))


def luminance(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    text = colour.lstrip("#")
    text = "".join(letter * 2 for letter in text) if len(text) == 3 else text
    parts = [int(text[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2's contrast ratio."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("palette", [style._LIGHT, style._DARK], ids=["light", "dark"])
def test_letters_can_be_read(palette: str) -> None:
    """Text stands out from every colour that it is written on, by WCAG's 4.5, and lines from the page by 2."""
    found: dict[str, Any] = dict(re.findall(r"--([a-z-]+):(#[0-9a-f]+)", palette))
    fills = [*style._FILLED, "page", "panel", "free"]
    for ink, fill in itertools.product(("ink", "muted"), fills):
        assert contrast(found[ink], found[fill]) >= 4.5, (ink, fill)
    for kind in style._FILLED:
        assert contrast(found[f"{kind}-line"], found["page"]) >= 2, kind
