"""A real browser without a screen: what it makes of a page, and what it says about it."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import attrs

VARIABLE: Final = "SLOTGRAPH_TEST_BROWSER"
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--window-size=1440,1000",
)
_MARK: Final = "probed"
PROBE: Final = """
<script>
const told = {pictures: {}, resources: [], style: {}};
const inside = (a, b) =>
  a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
addEventListener("load", () => {
for (const svg of document.querySelectorAll("svg.slotgraph")) {
  const whole = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(one => one.textContent);
  const places = texts.map(one => one.getBoundingClientRect());
  const shapes = [...svg.querySelectorAll("rect, path, circle")].map(one => [one, one.getBoundingClientRect()]);
  const found = told.pictures[svg.id] = {
    width: whole.width, height: whole.height, texts: texts.length, shapes: shapes.length,
    named: svg.getAttribute("aria-labelledby").split(" ").every(id => document.getElementById(id).textContent),
    outside: [], overlaps: [], spilled: [], empty: 0,
  };
  texts.forEach((one, at) => {
    if (!inside(places[at], whole)) found.outside.push(one.textContent);
    for (let other = at + 1; other < texts.length; other++)
      if (meet(places[at], places[other])) found.overlaps.push([one.textContent, texts[other].textContent]);
    const own = one.parentNode.querySelector("rect.node");
    if (own && meet(places[at], own.getBoundingClientRect()) && !inside(places[at], own.getBoundingClientRect()))
      found.spilled.push(one.textContent);
  });
  for (const [one, box] of shapes) {
    if (!inside(box, whole)) found.outside.push(one.outerHTML);
    if (one.tagName !== "path" && !(box.width > 0 && box.height > 0)) found.empty++;
  }
}
told.resources = performance.getEntriesByType("resource").map(one => one.name);
const shown = getComputedStyle(document.body);
told.style = {page: shown.backgroundColor, ink: shown.color};
told.wide = document.documentElement.scrollWidth > innerWidth;
const mark = document.createElement("pre");
mark.id = "probed";
mark.textContent = JSON.stringify(told);
document.body.appendChild(mark);
});
</script>
"""


@attrs.frozen
class Look:
    """What a browser made of a page: its document as text, and what it wrote to its console."""

    document: str
    console: tuple[str, ...]

    @property
    def told(self) -> Any:
        """What the probe found."""
        found = re.search(rf'<pre id="{_MARK}">(.*?)</pre>', self.document, re.DOTALL)
        if found is None:
            message = f"the probe did not run: {self.console}"
            raise AssertionError(message)
        text = found[1]
        for entity, sign in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", "\u00a0"), ("&amp;", "&")):
            text = text.replace(entity, sign)
        return json.loads(text)


def find_browser() -> str | None:
    """The browser that the environment names, or one that is installed."""
    named = os.environ.get(VARIABLE)
    return named or next((found for name in _NAMES if (found := shutil.which(name))), None)


def probed(page: str) -> str:
    """A copy of a page that looks at itself, and may run that script."""
    return page.replace("style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'").replace(
        "</body>", f"{PROBE}</body>"
    )


def look(browser: str, page: str, folder: Path, *, dark: bool = False) -> Look:
    """Open a page by its file, offline, in a new browser that knows nothing, and wait until it is shown."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        done = subprocess.run(  # noqa: S603 - the browser that was found, on our own page
            [
                browser,
                *_OPTIONS,
                scheme,
                f"--user-data-dir={profile}",
                "--virtual-time-budget=3000",
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            check=True,
            timeout=120,
        )
    said = done.stderr.decode(errors="replace").splitlines()
    return Look(done.stdout.decode(), tuple(line for line in said if "CONSOLE" in line))
