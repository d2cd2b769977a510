"""Look at every built page in a real browser, narrow and wide, light and dark: no block and no table scrolls sideways.

`make docs` runs this after the build. Where there is no Chromium it says so and does nothing.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

WIDTHS: Final = (1280, 830, 390)
SCHEMES: Final = ("light", "dark")
_LOOK: Final = """<script>
document.body.dataset.theme = "%s";
window.addEventListener("load", () => {
  const wide = [];
  for (const one of document.querySelectorAll(".content pre, .content table, .content .table-wrapper, .content img"))
    if (one.scrollWidth > one.clientWidth + 1
        || one.getBoundingClientRect().right > document.documentElement.clientWidth + 1) {
      const lines = one.textContent.trim().split("\\n").sort((a, b) => b.length - a.length);
      wide.push(one.tagName + ": " + lines[0].slice(0, 120));
    }
  const found = document.createElement("pre");
  found.id = "found";
  found.textContent = JSON.stringify([wide, getComputedStyle(document.body).backgroundColor]);
  document.body.append(found);
});
</script>"""


def look(browser: str, page: Path, width: int, scheme: str) -> tuple[list[str], str]:
    """What is too wide on a page, and the colour of its background."""
    with tempfile.NamedTemporaryFile("w", suffix=".html", dir=page.parent, encoding="utf-8") as copy:
        copy.write(page.read_text(encoding="utf-8").replace("</body>", _LOOK % scheme + "</body>"))
        copy.flush()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--dump-dom",
            f"--window-size={width},2000",
            "--virtual-time-budget=2000",
        ]
        dom = subprocess.run(  # noqa: S603 - a browser that is installed here
            [browser, *flags, f"file://{copy.name}"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    if found is None:
        raise LookupError(f"{page.name}: the browser did not measure it")
    wide, colour = json.loads(html.unescape(found[1]))
    return wide, colour


def main(folder: Path) -> int:
    """Print what is too wide, and return 1 where anything is."""
    browser = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
    if browser is None:
        print("slotgraph: pages not measured: there is no Chromium here")
        return 0
    faults, colours, pages = (
        0,
        set(),
        [
            page
            for page in sorted([*folder.glob("*.html"), *folder.glob("reference/*.html")])
            if page.name not in {"genindex.html", "search.html"}
        ],
    )
    for page in pages:
        for width in WIDTHS:
            for scheme in SCHEMES if page.name == "index.html" else SCHEMES[:1]:
                wide, colour = look(browser, page, width, scheme)
                colours.add(colour)
                for one in wide:
                    faults += 1
                    print(f"{page.relative_to(folder)} at {width} px: {one}")
    if len(colours) != len(SCHEMES):
        faults += 1
        print(f"light and dark have the same background: {colours}")
    print(f"slotgraph: {len(pages)} pages measured at {' and '.join(map(str, WIDTHS))} px: {faults or 'no'} faults")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
