"""How Sphinx builds the documentation: furo's theme, MyST's Markdown, the reference from docstrings."""

import inspect
import re
import sys
import tomllib
import typing
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.typing import stringify_annotation

sys.path.insert(0, str(Path(__file__).parent))
import generated

_DOCS = Path(__file__).resolve().parent
_PROJECT = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

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
autodoc_typehints_description_target = "all"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
nitpick_ignore_regex = [("py:class", r".*")]  # types of other packages and of private modules

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_title = f"{project} {version}"
html_copy_source = False


def _led(text: str, folder: Path) -> str:
    """Make a text's relative links lead to pages and pictures of the book, and all others to the repository."""

    def led(link: re.Match[str]) -> str:
        path, mark, heading = link[1].partition("#")
        target = (folder / path).resolve()
        if not path or not target.exists():  # code may look like a link
            return link[0]
        if target.parent in {_DOCS, _DOCS / "pictures"}:
            return f"]({target.relative_to(_DOCS)}{mark}{heading})"
        return f"]({_PROJECT['urls']['Source']}/blob/main/{target.relative_to(_DOCS.parent)}{mark}{heading})"

    return re.sub(r"\]\(([^):\s]+)\)", led, text)


def _included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    del app, parent
    content[0] = _led(content[0], (_DOCS / path).resolve().parent)


def _generated(app: Sphinx, page: str, content: list[str]) -> None:
    del app, page
    content[0] = _led(generated.replaced(content[0]), _DOCS)


def _options(app: Sphinx, kind: str, path: str, found: object, *_: object) -> None:
    """Types of the documented options of a runner, whose signature has one TypedDict for all."""
    if kind != "class":
        return
    for parameter in inspect.signature(found.__init__).parameters.values():  # type: ignore[misc]
        for typed in filter(typing.is_typeddict, typing.get_args(parameter.annotation)):
            app.env.current_document.autodoc_annotations[path] |= {
                name: stringify_annotation(value, "smart")
                for name, value in inspect.get_annotations(typed).items()
                if f" {name}: " in (found.__doc__ or "")
            }


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _options)
    app.connect("source-read", _generated)
    app.connect("include-read", _included)
