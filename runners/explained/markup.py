"""Markup as a tree, so that nothing is ever pasted into HTML or SVG: text and attributes are escaped where written."""

import re
from collections.abc import Iterable
from typing import Final, TypeAlias
from xml.etree import ElementTree as ET

Child: TypeAlias = "ET.Element | str | Iterable[Child] | None"
_UNFIT: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")
"""What XML does not bear, what UTF-8 cannot hold, and marks that turn the order of letters around."""


def clean(text: str) -> str:
    """Text that any browser takes: what does not fit into a page is shown as a replacement mark."""
    return _UNFIT.sub("\ufffd", text)


def node(tag: str, *children: Child, **attributes: object) -> ET.Element:
    """An element. Attributes: `class_` is class, `stroke_width` stroke-width; those that are None are left out."""
    names = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    made = ET.Element(tag, {name: clean(_text(value)) for name, value in names.items()})
    append(made, children)
    return made


def append(parent: ET.Element, children: Child) -> None:
    """Put children behind those that an element has; strings are text."""
    if children is None:
        return
    if isinstance(children, str):
        text = clean(children)
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + text
        else:
            parent.text = (parent.text or "") + text
    elif isinstance(children, ET.Element):
        parent.append(children)
    else:
        for child in children:
            append(parent, child)


def page_text(root: ET.Element) -> str:
    """A whole HTML page."""
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def svg_text(root: ET.Element) -> str:
    """An SVG file."""
    return ET.tostring(root, encoding="unicode", method="xml") + "\n"


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
