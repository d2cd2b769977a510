"""Tables and page: whole, offline, readable, and deaf to what names try to say to a browser."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

import slotgraph
from slotgraph.dataflow.errors import CaptureError
from slotgraph.dataflow.shown import cell, html, printable
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.check.trial import Finding
from slotgraph.runners.explained.declared import mermaid
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.recording.replaying import Replayed, ReplayReport
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

NOT_CAPTURED = "nothing is captured yet: call capture()"
GOLDEN = """\
DecodeRunner of FullInputs on cpu (cpu)
padding   27.8% of 18 rows: 25.0% in bucket 8, 50.0% in bucket 2
eager     25.0% of 4 steps: too_large=1
memory    20.6 KiB: inputs=4.8 KiB, uploads=8.8 KiB, eager=7.0 KiB
buckets   2, 8: 4 graphs, graph by in_graph; larger batches are eager

slots of FullInputs
slot           type                    tail              comes from
────────────────────────────────────────────────────────────────────────────────
input_ids      int64 [TOKENS]          pad=0             batch
seq_lens       int32 [BATCH]           pad=seq_len_fill  batch
out_cache_loc  int64 [TOKENS]          pad=0             batch, cache_loc
block_tables   int32 [BATCH, PAGES]    pad=0             batch.tables.decode
temperatures   float32 [BATCH, 1]      once=1.0          batch
hidden_states  float32 [TOKENS,        keep              argument proxy.hidden,
               HIDDEN]                                   optional
tokens         int32 [1]               -                 live_tokens(step)
last           int64 [BATCH]           -                 last_rows(seq_lens)
after          int64 [BATCH]           -                 behind(last, input_ids)
rows           int64 [BATCH]           -                 ramp(), host
kv_lens        int32 [BATCH]           pad=0             batch.lens, host,
                                                         argument kv_lens
ones           int32 [BATCH, 2]        -                 constant, set to 1
embeds         float32 [TOKENS * 2,    pad=0             staged
               HIDDEN]
logits         float32 [TOKENS,        -                 output
               HIDDEN]
carried from the batch as they are: mode

plan of FullInputs for BATCH=8, HIDDEN=16, PAGES=8, TOKENS=8: 1 copy call, 992
          bytes, in_graph
upload  one packet, then one kernel for 8 slots, the graph's first node
copy    hidden_states, temperatures  (float32, device, fused)
copy    block_tables, seq_lens  (int32, device, fused)
copy    input_ids, out_cache_loc  (int64, device, fused)
copy    kv_lens  (int32, host, direct)
compute rows = ramp(out) on the host
compute tokens = live_tokens(step) on the host, rides in the upload
compute last = last_rows(seq_lens) on the device
compute after = behind(last, input_ids) on the device
"""


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


@functools.cache
def full() -> RunnerExplanation:
    """A runner over every kind of slot that has done some steps."""
    runner = ready(full_runner(lowering="in_graph"))
    for rows in (1, 5, 7, 11):
        runner(full_batch(rows), **proxy(rows))
    return slotgraph.explain(runner)


@functools.cache
def harmful() -> RunnerExplanation:
    """Names that mean harm."""
    runner = harmful_runner()
    with pytest.raises(CaptureError):
        runner.capture()
    return slotgraph.explain(runner)


def leaves(data: Any) -> Iterator[Any]:
    """All names and values of plain data."""
    if isinstance(data, dict):
        yield from (name for name, one in data.items() if one not in (None, [], {}))
    for one in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from leaves(one)
    if not isinstance(data, dict | list):
        yield data


def test_the_golden_text() -> None:
    """What matters comes first; all fits 80 columns and 40 lines; no section is empty."""
    assert str(full()) == GOLDEN
    assert len(GOLDEN.splitlines()) <= 40


EXPLAINED: dict[str, Callable[[], Any]] = {
    "full": full,
    "many": lambda: slotgraph.explain(many_runner("slot_by_slot")),
    "harmful": harmful,
    "pooled": lambda: slotgraph.explain(pooled_runner()),
    "declaration": lambda: full().declaration,
}
all_explained = pytest.mark.parametrize("explained", EXPLAINED.values(), ids=EXPLAINED)


@all_explained
def test_the_page_has_everything(explained: Callable[[], Any]) -> None:
    """Each table, name and value of the data is on the page, and in a notebook."""
    found = explained()
    data = json.loads(json.dumps(to_data(found)))
    for page in (Parsed(html(found)), Parsed(found._repr_html_())):
        assert {"h1", "h2", "table", "details"} <= {tag for tag, _ in page.tags}
        words = " ".join(page.text.split())
        missing = [one for one in leaves(data) if " ".join(cell(one).split()) not in words and one not in (None, "", 0)]
        assert missing == []
        assert all(" ".join(printable(f"{table.text}").split()) in words for table in found.tables() if table.text)


@all_explained
def test_nothing_is_empty(explained: Callable[[], Any]) -> None:
    """Each table of a text has rows or lines, or says what is missing, and each section of a page has a value."""
    found = explained()
    assert all(table.rows or table.text or table.title.startswith("no plan") for table in found.tables())
    assert not re.search(
        r"<summary>[^<]*</summary>\s*</details>|<section>\s*(<h.>[^<]*</h.>)?\s*</section>", html(found)
    )


def test_what_matters_is_said() -> None:
    """Buckets without a graph and why, slots that are copied alone, what sharing saves: each where it is so."""
    made = {name: make() for name, make in EXPLAINED.items()}
    notes = {name: dict(one.notes()) for name, one in made.items() if isinstance(one, RunnerExplanation)}
    assert notes["many"]["no graph"] == f"buckets {cell([1 << n for n in range(9)])}: {NOT_CAPTURED}"
    assert notes["many"]["alone"].endswith("copied one by one (slot by slot)")
    assert (notes["full"]["eager"], notes["full"].keys() & {"alone", "no graph"}) == (
        "25.0% of 4 steps: too_large=1",
        set(),
    )
    assert HARM.split("<")[0] in notes["harmful"]["no graph"]
    assert "sharing saves" in notes["pooled"]["pool"]


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
    assert f": {HARM} (at " in json.loads(json.dumps(to_data(explanation)))["buckets"][0]["why"]
    assert "<script>" not in mermaid(explanation.declaration)
    assert "<script>alert(1)</script>" in printed(explanation)


@all_explained
def test_texts_fit_a_terminal(explained: Callable[[], Any]) -> None:
    """`repr` is one line. `str` has 80 columns, and no letter less than a wide terminal has."""
    found = explained()
    assert re.fullmatch(r"<\w*Explanation: .*>", repr(found))
    assert max(map(len, str(found).splitlines())) <= 80
    folded, whole = (re.sub(r"[\s─]", "", text) for text in (str(found), printed(found)))
    assert sorted(folded) == sorted(whole)


def reports() -> dict[str, Any]:
    """A plan, and reports of what was done to runners, with faults and without."""
    runner, broken = full_runner(lowering="in_graph"), harmful_runner()
    captured = runner.capture()
    with pytest.raises(CaptureError):
        broken.capture()
    step = Replayed(number=3, outcome="different", lines=(HARM, "outputs row 2"))
    return {
        "FillPlan": runner.plan(8),
        "CaptureReport": captured,
        "a failed CaptureReport": broken.report,
        "CheckReport": slotgraph.check(runner, only="coverage", progress=False),
        "a bad CheckReport": CheckReport(runner="R", findings=(Finding("parity", "ids", HARM),), steps={"parity": 4}),
        "ReplayReport": ReplayReport(file="a.safetensors", runner="R", notes=("other torch",), steps=(step,)),
    }


def test_plans_and_reports_are_shown_like_explanations() -> None:
    """`repr` is one line that begins with the kind; rich and a notebook show each table, and letters are letters."""
    for name, found in reports().items():
        kind = name.split()[-1]
        titles = [printable(table.title) for table in found.tables()]
        assert repr(found) == f"<{kind}: {titles[0]}>"
        assert len(repr(found)) < 160, repr(found)
        for width in (60, 200):
            shown = Console(width=width, color_system=None, force_terminal=True, legacy_windows=False)
            with shown.capture() as written:
                shown.print(found)
            text = written.get()
            assert [line.rstrip() for line in text.splitlines()] == [*found.text(width).splitlines(), ""]
            assert max(map(len, text.splitlines())) <= width
        page = Parsed(found._repr_html_())
        words = " ".join(page.text.split())
        for table in found.tables():
            lines = [
                table.title,
                *f"{table.text}".splitlines(),
                *(cell(one) for row in table.rows for one in row.values()),
            ]
            assert [line for line in lines if " ".join(printable(line).split()) not in words] == []
        assert {tag for tag, _ in page.tags} <= {
            "div",
            "style",
            "section",
            "h1",
            "h2",
            "table",
            "tr",
            "th",
            "td",
            "pre",
        }


def test_a_plan_is_printed_whole() -> None:
    """`str` of a plan folds no line, so that a slot can be searched for."""
    plan = full_runner().plan(8)
    assert str(plan).splitlines() == [*plan.lines()]
    assert max(map(len, str(plan).splitlines())) > 80


def test_graphs_are_short() -> None:
    """What a runner is made of is one line in a debugger or a message of pytest, however much it holds."""
    runner = ready(full_runner())
    assert repr(runner.graphs.captured[8, frozenset(), ()]) == "<graph of bucket 8 of FullInputs>"
    for part in (runner.graphs, runner.stage, *runner.graphs.captured.values()):
        assert len(repr(part)) < 100
