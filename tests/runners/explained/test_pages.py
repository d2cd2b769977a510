"""Tables, page and pictures: whole, offline, readable, and deaf to what names try to say to a browser."""

import json
import re
import runpy
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import slotgraph
from slotgraph.dataflow.errors import CaptureError
from slotgraph.runners.engine.config import switch_of
from slotgraph.runners.explained.declared import mermaid
from slotgraph.runners.explained.explanation import RunnerExplanation, drawn_fills, drawn_memory
from slotgraph.runners.explained.pages import STYLE, html, printable
from slotgraph.runners.serial import to_data
from tests.runners.explained.houses import (
    HARM,
    full_batch,
    full_runner,
    harmful_runner,
    many_runner,
    pooled_runner,
    printed,
    proxy,
)
from tests.runners.models import ready

PICTURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{}" style="background:#fff">'
    '<foreignObject width="100%" height="100%"><div xmlns="http://www.w3.org/1999/xhtml" class="slotgraph">{}{}</div>'
    "</foreignObject></svg>\n"
)
PAGE = Path(__file__).parents[3] / "docs" / "observe.md"
VARIABLE = "SLOTGRAPH_WRITE_PICTURES"


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
    runner = ready(full_runner(lowering="in_graph"))
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


def test_tables_and_page_say_it_all() -> None:
    """Slots, steps, plans, places, bytes, decisions and shared memory are in both, and each slot by name."""
    explanation = pooled()
    page = Parsed(html(explanation))
    assert {"h2", "table", "pre"} <= {tag for tag, _ in page.tags}
    for text in (printed(explanation), page.text):
        for part in (
            "DecodeRunner of FullInputs on cpu",
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
    assert "nothing is captured yet: call capture()" in printed(many())
    for part in ("fused kernel, the graph's first node", " 0.25", "of 4 steps; too_large=1"):
        assert part in printed(full()), part


def test_page_loads_and_runs_nothing() -> None:
    """No script, no style sheet, image, font or frame from outside, and a policy that forbids all of them."""
    page = html(full())
    parsed = Parsed(page)
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert not re.findall(r"https?://[^\s\"<]*", page)
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
    assert f": {HARM} (at " in json.loads(json.dumps(to_data(explanation)))["buckets"][0]["graphs"][0]["why"]
    assert "<script>" not in mermaid(explanation.declaration)
    assert "<script>alert(1)</script>" in printed(explanation)


@pytest.mark.parametrize("explained", [full, many, harmful, pooled])
def test_pictures_are_sound(explained: Callable[[], RunnerExplanation]) -> None:
    """Both are XML, too, and have every step and every slot in them."""
    found = explained()
    fills, memory = (
        "".join(ET.fromstring(f"<div>{drawn}</div>").itertext())  # noqa: S314 - our own text
        for drawn in (drawn_fills(found), drawn_memory(found))
    )
    assert all(f"{number} {step.kind}" in fills for _, one in found.fills for number, step in enumerate(one.steps, 1))
    assert all(f"{place.offset:,}" in memory and printable(place.slot) in memory for place in found.memory.places)


@pytest.mark.parametrize("explained", [full, many, pooled])
def test_texts_fit_a_terminal(explained: Callable[[], RunnerExplanation]) -> None:
    """`repr` is one line. `str` has 80 columns, with each word and number that a wide terminal has."""
    found = explained()
    for one in (found, found.declaration):
        assert repr(one).startswith(f"<explanation of {next(one.tables()).title}: ")
        assert "\n" not in repr(one)
        assert max(map(len, str(one).splitlines())) <= 80
        assert {*printed(one).split()} - {*str(one).split()} <= {word for word in printed(one).split() if "─" in word}
    assert found.declaration._repr_html_() in html(found.declaration)


def test_alike_buckets_share_a_row() -> None:
    """Buckets that do the same are one row; the eager fill has one of its own."""
    assert [name for name, _ in many().fills] == ["9 buckets, 1 to 256", "eager, not padded"]
    names = [name for name, _ in slotgraph.explain(many_runner("foreach")).fills]
    assert names == ["8 buckets, 1 to 128", "bucket 256", "eager, not padded"], "the last has copies apart"


def test_pictures_of_the_docs(tmp_path: Path) -> None:
    """A page of the docs has its example's pictures of today; with SLOTGRAPH_WRITE_PICTURES=1 they are written."""
    page, example = PAGE.read_text(encoding="utf-8"), tmp_path / "reading_example.py"
    example.write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    found = slotgraph.explain(runpy.run_path(str(example))["verify"])
    for name, height, drawn in (("fills", 220, drawn_fills(found)), ("memory", 330, drawn_memory(found))):
        file, picture = PAGE.parent / "pictures" / f"reading-{name}.svg", PICTURE.format(height, STYLE, drawn)
        if switch_of(VARIABLE):
            file.write_text(picture, encoding="utf-8")
        assert file.read_text(encoding="utf-8") == picture, f"draw it anew: {VARIABLE}=1 pytest {__file__}"
        assert f"](pictures/{file.name})" in page
