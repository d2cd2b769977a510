"""How Sphinx builds the documentation: furo's theme, MyST's Markdown, the reference from docstrings."""

import re
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import generated

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
author = _PROJECT["authors"][0]["name"]
copyright = author  # noqa: A001 - the name that Sphinx reads
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "decisions", "examples"]

default_role = "code"  # docstrings have Markdown's single backticks
autodoc_typehints = "description"  # signatures on one line, types beside their parameters
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:class", r".*")]  # types of other packages and of private modules

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_title = f"{project} {version}"
html_copy_source = False


def _relative(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """README's links are absolute, for the package index; in the book they lead to its own pages."""
    del app, path, parent
    pages = re.compile(
        r"\]\(https://(?:github|raw\.githubusercontent)\.com/slotgraph/slotgraph(?:/blob)?/main/docs/([^)]*\.(?:md|svg)(?:#[^)]*)?)\)"
    )
    content[0] = pages.sub(r"](\1)", content[0])


def _generated(app: Sphinx, page: str, content: list[str]) -> None:
    del app, page
    content[0] = generated.replaced(content[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _generated)
    app.connect("include-read", _relative)
