"""The page in a real browser, opened as a file and offline: everything is there, readable, and nothing is loaded."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any, Final

import pytest

from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.explained.html import html
from tests.runners.explained.test_pages import full, harmful, many, pooled

VARIABLE: Final = "SLOTGRAPH_TEST_BROWSER"
NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS: Final = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-component-update
    --disable-background-networking --disable-sync --disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr
    --window-size=1440,1000 --virtual-time-budget=3000 --dump-dom"""
PROBE: Final = """<script>
const inside = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
const place = one => one.getBoundingClientRect();
addEventListener("load", () => {
  const faults = [], pictures = [...document.querySelectorAll("svg.slotgraph")];
  for (const svg of pictures) {
    const texts = [...svg.querySelectorAll("text")].filter(one => one.textContent);
    for (const one of [...texts, ...svg.querySelectorAll("rect")]) {
      if (!inside(place(one), place(svg))) faults.push("outside: " + one.outerHTML);
      if (!(place(one).width > 0 && place(one).height > 0)) faults.push("empty: " + one.outerHTML);
    }
    texts.forEach((one, at) => {
      for (const other of texts.slice(at + 1))
        if (meet(place(one), place(other))) faults.push("overlap: " + one.textContent);
      const own = one.parentNode.querySelector("rect.node");
      if (own && one.parentNode !== svg && !inside(place(one), place(own))) faults.push("spilled: " + one.textContent);
    });
  }
  const shown = getComputedStyle(document.body), mark = document.createElement("pre");
  mark.id = "probed";
  mark.textContent = JSON.stringify({
    faults, pictures: pictures.length, page: shown.backgroundColor, ink: shown.color,
    loaded: performance.getEntriesByType("resource").map(one => one.name),
    wide: document.documentElement.scrollWidth > innerWidth});
  document.body.appendChild(mark);
});
</script></body>"""


@pytest.fixture(scope="module")
def browser() -> str:
    """The browser that the environment names, or one that is installed; skips where there is none."""
    found = os.environ.get(VARIABLE) or next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: install chromium, or name one in {VARIABLE}")
    return found


def look(browser: str, page: str, folder: Path, *, dark: bool = False) -> tuple[str, list[str]]:
    """A page opened by its file, offline, in a new browser: its document, and what was written to the console."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        given = ["--host-resolver-rules=MAP * ~NOTFOUND", scheme, f"--user-data-dir={profile}", file.as_uri()]
        done = subprocess.run([browser, *OPTIONS.split(), *given], capture_output=True, check=True, timeout=120)  # noqa: S603 - the browser that was found, on our own page
    said = done.stderr.decode(errors="replace").splitlines()
    return done.stdout.decode(), [line for line in said if "CONSOLE" in line]


def probed(browser: str, page: str, folder: Path, *, dark: bool = False) -> Any:
    """What a script finds that is let into a page, policy and all."""
    opened = page.replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    document, console = look(browser, opened.replace("</body>", PROBE), folder, dark=dark)
    found = re.search(r'<pre id="probed">(.*?)</pre>', document, re.DOTALL)
    assert found is not None, console
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("explained", [full, many, harmful, pooled])
def test_page_is_shown(
    browser: str,
    explained: Callable[[], RunnerExplanation],
    tmp_path: Path,
    dark: bool,  # noqa: FBT001 - a parameter
) -> None:
    """No text lies over another, leaves its box, or leaves the picture; nothing is loaded, nothing scrolls sideways."""
    found = probed(browser, html(explained()), tmp_path, dark=dark)
    page, ink = ("rgb(17, 22, 29)", "rgb(231, 235, 241)") if dark else ("rgb(255, 255, 255)", "rgb(27, 35, 48)")
    assert found == {"faults": [], "pictures": 2, "loaded": [], "wide": False, "page": page, "ink": ink}


def test_nothing_is_said_or_run(browser: str, tmp_path: Path) -> None:
    """The page as it is: no word on the console, from the policy neither, and hostile names are text."""
    document, console = look(browser, html(harmful()), tmp_path)
    assert console == []
    assert "<script" not in document
    assert "&lt;script&gt;alert(1)" in document


def test_policy_stops_what_an_escape_would_let_in(browser: str, tmp_path: Path) -> None:
    """A script or an image that got into the page all the same is neither run nor loaded, and the console says so."""
    planted = "<script>document.title = 'ran'</script><img src='https://example.invalid/x.png'></body>"
    document, console = look(browser, html(full()).replace("</body>", planted), tmp_path)
    assert "<title>ran</title>" not in document
    assert len(console) == 2
    assert all("Content Security Policy" in line for line in console)
