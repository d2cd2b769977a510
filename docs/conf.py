"""How Sphinx builds the documentation: furo's theme, MyST's Markdown, and a button that copies each block of code."""

import os
import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_DOCS = Path(__file__).resolve().parent
_PROJECT = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
author = _PROJECT["authors"][0]["name"]
copyright = author  # noqa: A001 - the name that Sphinx reads
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "decisions", "examples"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_title = f"{project} {version}"
html_copy_source = False


def _linked(text: str, folder: Path, page: Path) -> str:
    """Make a text's relative links lead to pages and pictures of the book, and all others to the repository.

    Args:
        text: The text.
        folder: Where its links start from.
        page: The folder of the page that shows it.
    """

    def linked(link: re.Match[str]) -> str:
        path, mark, heading = link[1].partition("#")
        target = (folder / path).resolve()
        if not path or not target.exists():  # code may look like a link
            return link[0]
        if target.parent in {_DOCS, _DOCS / "pictures", _DOCS / "reference"}:
            return f"]({os.path.relpath(target, page)}{mark}{heading})"
        return f"]({_PROJECT['urls']['Source']}/blob/main/{target.relative_to(_DOCS.parent)}{mark}{heading})"

    return re.sub(r"\]\(([^):\s]+)\)", linked, text)


def _tree(text: str) -> str:
    """Return the index with a tree of pages in place of each list, and README's text before it."""
    readme = (_DOCS.parent / "README.md").read_text(encoding="utf-8")
    found = [readme.split("<!-- /teaser -->")[0]]
    below = [f"reference/{path.stem}" for path in sorted((_DOCS / "reference").glob("*.md"))]
    for title, listed in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", text, re.MULTILINE):
        names = re.findall(r"^- \[.+?\]\((.+?)\.md\)", listed, re.MULTILINE)
        pages = [*names, *below * ("reference" in names)]
        found.append("\n".join(["```{toctree}", f":caption: {title}", ":maxdepth: 1", "", *pages, "```", ""]))
    return "\n".join(found)


def _read(app: Sphinx, page: str, content: list[str]) -> None:
    """Make the index and the changelog what they are in the book, and lead links to where they go from there."""
    folder = Path(app.env.doc2path(page)).parent
    if page == "index":
        content[0] = _linked(_tree(content[0]), _DOCS.parent, folder)
    elif page == "changes":
        content[0] = _linked((_DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8"), _DOCS.parent, folder)
    else:
        content[0] = _linked(content[0], folder, folder)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _read)
