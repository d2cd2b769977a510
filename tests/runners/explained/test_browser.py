"""The page in a real browser, opened as a file and offline: everything is there, readable, and nothing is loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import slotgraph
from slotgraph.dataflow.errors import CaptureError
from slotgraph.runners.explained.html import html
from tests.runners.explained.browser import VARIABLE, find_browser, look, probed
from tests.runners.explained.houses import (
    full_batch,
    full_runner,
    harmful_runner,
    many_runner,
    pooled_runner,
    proxy,
)


@pytest.fixture(scope="module")
def browser() -> str:
    """A browser; skips where there is none."""
    found = find_browser()
    if found is None:
        pytest.skip(f"no browser: install chromium, or name one in {VARIABLE}")
    return found


def full_page() -> str:
    """A runner over every kind of slot that has done some steps."""
    runner = full_runner(lowering="in_graph")
    runner.capture()
    for rows in (1, 5, 7):
        runner(full_batch(rows), **proxy(rows))
    return html(slotgraph.explain(runner))


def many_page() -> str:
    """Forty-eight slots, nine buckets, one call a slot."""
    return html(slotgraph.explain(many_runner("slot_by_slot")))


def harmful_page() -> str:
    """Names that mean harm."""
    runner = harmful_runner()
    with pytest.raises(CaptureError):
        runner.capture()
    return html(slotgraph.explain(runner))


def pooled_page() -> str:
    """A runner that shares memory with others."""
    return html(slotgraph.explain(pooled_runner()))


PAGES: Mapping[str, Callable[[], str]] = {
    "full": full_page,
    "many": many_page,
    "harmful": harmful_page,
    "pooled": pooled_page,
}
each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


@each_page
def test_pictures_are_drawn(browser: str, page: Callable[[], str], tmp_path: Path) -> None:
    """Each picture has boxes with a size; no text lies over another, leaves its box, or leaves the picture."""
    told: dict[str, Any] = look(browser, probed(page()), tmp_path).told
    wanted = {"dependencies", "fills", "memory"} | ({"pool"} if page is pooled_page else set())
    assert set(told["pictures"]) == wanted
    for name, found in told["pictures"].items():
        assert found["width"] > 300, name
        assert found["height"] > 50, name
        assert found["texts"] >= 3, name
        assert found["shapes"] >= 3, name
        assert found["named"], name
        assert (found["empty"], found["outside"], found["overlaps"], found["spilled"]) == (0, [], [], []), name
    assert told["resources"] == []
    assert told["style"] == {"page": "rgb(255, 255, 255)", "ink": "rgb(27, 35, 48)"}
    assert not told["wide"], "the page itself must not scroll sideways; what is wide in it does so by itself"


@pytest.mark.parametrize("page", [harmful_page, pooled_page], ids=["harmful", "pooled"])
def test_nothing_is_said_or_run(browser: str, page: Callable[[], str], tmp_path: Path) -> None:
    """The page as it is: no word on the console, from the policy neither, no script, and all of its text."""
    seen = look(browser, page(), tmp_path)
    assert seen.console == ()
    assert "<script" not in seen.document
    assert seen.document.count("<svg") >= 3
    assert ("&lt;script&gt;alert(1)" in seen.document) == (page is harmful_page)


def test_dark(browser: str, tmp_path: Path) -> None:
    """The page is dark for whoever prefers that, and its pictures are as sound."""
    told = look(browser, probed(full_page()), tmp_path, dark=True).told
    assert told["style"] == {"page": "rgb(17, 22, 29)", "ink": "rgb(231, 235, 241)"}
    assert all(found["overlaps"] == [] for found in told["pictures"].values())


def test_probe_finds_what_is_wrong(browser: str, tmp_path: Path) -> None:
    """Letters over others, outside and beyond their box, a box without a size, and something loaded: all are told."""
    wrong = """
      <text x="40" y="20" font-size="12">upon another</text><text x="60" y="22" font-size="12">upon another</text>
      <text x="90000" y="20" font-size="12">outside</text><rect x="5" y="5" width="0" height="9"></rect><g>
      <rect class="node" x="300" y="30" width="20" height="20"></rect><text x="302" y="44" font-size="12">spilled</text>
      </g></svg><img src="http://example.invalid/x.svg">"""
    page = probed(full_page().replace("</svg>", wrong, 1)).replace("default-src 'none'", "img-src *")
    told = look(browser, page, tmp_path).told
    found = told["pictures"]["dependencies"]
    assert ["upon another", "upon another"] in found["overlaps"]
    assert "outside" in found["outside"]
    assert found["spilled"] == ["spilled"]
    assert found["empty"] == 1
    assert [name.rpartition("/")[2] for name in told["resources"]] == ["x.svg"]


def test_policy_stops_what_an_escape_would_let_in(browser: str, tmp_path: Path) -> None:
    """A script or an image that got into the page all the same is neither run nor loaded, and the console says so."""
    planted = "<script>document.title = 'ran'</script><img src='https://example.invalid/x.png'></body>"
    seen = look(browser, full_page().replace("</body>", planted), tmp_path)
    assert "<title>ran</title>" not in seen.document
    assert len(seen.console) == 2
    assert all("Content Security Policy" in line for line in seen.console)
