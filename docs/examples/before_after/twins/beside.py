"""A picture of both runners beside each other, code lines alone; those that handle inputs are marked.

Run `python -m twins.beside > ../../pictures/beside.svg` in the folder above to draw it anew.
"""

import ast
import html
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from twins.lines import numbered_code, parts

_STYLE: Final = (
    "text{font:10px ui-monospace,Menlo,Consolas,monospace;fill:#24292f;white-space:pre}"
    ".head{font:600 22px system-ui,sans-serif}.page{fill:#fff}.before{fill:#f9dcc4}.after{fill:#d3ecd6}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#131416}.before{fill:#5a3412}.after{fill:#1d4425}}"
)
_HIGH, _TOP = 13, 48
_SIDES: Final = (  # name, place, width, parts that handle inputs, what is said above
    ("before", 12, 694, {"allocate", "fill", "on_device"}, "By hand: {} lines. {} allocate, copy and reset inputs."),
    ("after", 720, 694, {"TokenInputs", "PrefillInputs", "DecodeInputs"}, "slotgraph: {} lines. {} declare inputs."),
)


def picture() -> str:
    """An SVG, light or dark as the page is."""
    high = _TOP + _HIGH * max(len(numbered_code(_text(name))) for name, *_ in _SIDES) + 8
    size = f'viewBox="0 0 1420 {high}" role="img" aria-label="A model runner by hand, and with slotgraph"'
    drawn = "\n".join(line for side in _SIDES for line in _side(*side))
    page = f'<style>{_STYLE}</style>\n<rect class="page" width="1420" height="{high}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{page}\n{drawn}\n</svg>\n'


def _text(name: str) -> str:
    return (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def _side(name: str, left: int, width: int, marked: set[str], said: str) -> Iterator[str]:
    text = _text(name)
    lines, numbers = text.splitlines(), sorted(numbered_code(text))
    spans = [range(node.lineno, (node.end_lineno or 0) + 1) for part, node in parts(ast.parse(text)) if part in marked]
    inputs = [number for number in numbers if any(number in span for span in spans)]
    yield f'<text class="head" x="{left}" y="30">{said.format(len(numbers), len(inputs))}</text>'
    for row, number in enumerate(numbers):
        top = _TOP + _HIGH * row
        if number in inputs:
            yield f'<rect class="{name}" x="{left - 4}" y="{top}" width="{width}" height="{_HIGH}"/>'
        code = lines[number - 1].partition("  #")[0]
        yield f'<text x="{left}" y="{top + 10}">{html.escape(code)}</text>'


if __name__ == "__main__":
    print(picture(), end="")
