"""How Sphinx builds the documentation: furo's theme, MyST's Markdown, the reference from docstrings."""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
author = _PROJECT["authors"][0]["name"]
copyright = author  # noqa: A001 - the name that Sphinx reads
release = version = _PROJECT["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "examples"]

default_role = "code"  # docstrings have Markdown's single backticks
autodoc_typehints = "none"  # signatures on one line; types are in the docstrings and in the source
autodoc_member_order = "bysource"
nitpick_ignore_regex = [  # types of attributes that the reference has no entry for
    ("py:class", r"(collections|torch)\..*"),
    ("py:class", r"slotgraph\.runners\.(eagerly|graphs|pool|stage)\..*"),
]

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False


def _relative(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """README's links are absolute, for the package index; in the book they lead to its own pages."""
    del app, path, parent
    pages = re.compile(r"\]\(https://(?:github|raw\.githubusercontent)\.com/slotgraph/slotgraph(?:/blob)?/main/docs/([^)]*\.(?:md|svg)(?:#[^)]*)?)\)")
    content[0] = pages.sub(r"](\1)", content[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("include-read", _relative)
