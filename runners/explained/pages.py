"""Shows explanations: as tables in text, and with pictures as HTML, for a page or a notebook."""

import abc
import functools
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, Final

import attrs

WIDE: Final = 200
"""Columns in a pipe or file, where nothing must fit a screen, and a folded name could not be searched for."""
_SCREEN, _SENTENCE, _GAP = 80, 24, 2
"""The columns of `str`, the fewest columns of a sentence in a cell, and the columns between cells."""
_LARGE: Final = 1000
_BARS: Final = "The second longest bar of each group has the full width, and the longest is cut."
_fold: Final = functools.partial(textwrap.wrap, break_on_hyphens=False)
TableRow = Mapping[str, Any]
"""Cells by their column. Numbers are shown as numbers, None as a dash."""
STYLE: Final = """<style>
.slotgraph{font:15px/1.45 system-ui,sans-serif;padding:0 8px;overflow-wrap:anywhere}
.slotgraph dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(180px,1fr));gap:10px;margin:0 0 1em}
.slotgraph dl div{border:1px solid #8886;border-radius:8px;padding:8px 12px}
.slotgraph dt{font-weight:600}
.slotgraph dd{margin:0}
.slotgraph dd b{display:block;font-size:1.6em}
.slotgraph h2{margin:1.4em 0 .2em}
.slotgraph h3{margin:1.2em 0 .4em;font-size:1em}
.slotgraph p{margin:.3em 0;white-space:pre-line}
.slotgraph .tables{display:flex;flex-wrap:wrap;column-gap:48px}
.slotgraph section{flex:1 1 auto;max-width:100%}
.slotgraph .scroll{overflow-x:auto}
.slotgraph table{border-collapse:collapse;width:100%;margin:0;font-size:14px}
.slotgraph td{text-align:left;vertical-align:top;white-space:nowrap;overflow-wrap:break-word}
.slotgraph td{padding:3px 14px 3px 0;border-bottom:1px solid #8884}
.slotgraph tr:first-child{font-weight:600}
.slotgraph .number{text-align:right;font-variant-numeric:tabular-nums}
.slotgraph td div{white-space:normal;max-width:80ch}
.slotgraph .number div{margin-left:auto;white-space:nowrap}
.slotgraph pre{white-space:pre-wrap;font:13px/1.4 ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace}
.slotgraph .boxes{display:flex;flex-wrap:wrap;gap:7px}
.slotgraph .boxes span{border:2px solid var(--colour,#626b78)}
.slotgraph .boxes span{border-radius:6px;padding:3px 8px;box-sizing:border-box;max-width:100%}
.slotgraph .boxes .inside{outline:2px dashed #5a5fc8;outline-offset:1px}
.slotgraph .drawn{background:var(--colour,#626b78);color:#fff}
.slotgraph .copy,.slotgraph .copied{--colour:#3670a9}
.slotgraph .compute,.slotgraph .computed{--colour:#437a2a}
.slotgraph .constant{--colour:#7a6a1a}
.slotgraph .staged{--colour:#a8572a}
.slotgraph .output{--colour:#8a4fa8}
.slotgraph .upload{--colour:#b64a72}
.slotgraph .kernel{--colour:#8a6207}
.slotgraph .graph{--colour:#5a5fc8}
.slotgraph .memory{table-layout:fixed;border-collapse:separate;border-spacing:2px}
.slotgraph .memory td{border:0;padding:1px 6px;white-space:normal;overflow-wrap:anywhere}
.slotgraph .memory .held{background:#8882}
.slotgraph .memory .number{width:8em;white-space:nowrap}
.slotgraph .boxes .pale{background:none;color:inherit}
.slotgraph section:has(.bars){flex-basis:100%}
.slotgraph .bars{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:4px 16px;margin:0 0 1.4em}
.slotgraph .bars div div{display:flex;justify-content:space-between;margin:2px 0;padding:0 6px;font-size:14px}
.slotgraph .bars div div{background:var(--cut),linear-gradient(to right,#4a86c4aa var(--part),#8882 0)}
.slotgraph .bars div div{--cut:repeating-linear-gradient(115deg,Canvas 0 3px,#0000 0 6px) 60%/var(--gap) no-repeat}
.slotgraph .bars div div{--gap:clamp(0px,(var(--part) - 100%)*999,14px)}
.slotgraph h4{margin:.8em 0 .3em}
.slotgraph h1~pre{font:inherit}
.slotgraph .bars b{font-variant-numeric:tabular-nums}
@media(max-width:700px){
.slotgraph td div{max-width:none}
.slotgraph section table:has(td:nth-child(3)) tr{display:flex;flex-wrap:wrap;column-gap:14px}
.slotgraph section table:has(td:nth-child(3)) tr{border-bottom:1px solid #8884;padding:4px 0}
.slotgraph section table:has(td:nth-child(3)) tr:first-child{display:none}
.slotgraph section table:has(td:nth-child(3)) td{display:flex;gap:.4em;padding:0;border:0;max-width:100%}
.slotgraph section table:has(td:nth-child(3)) td:first-child{width:100%;font-weight:600}
.slotgraph section table:has(td:nth-child(3)) td::before{content:attr(data-of);font-weight:400;opacity:.7}
.slotgraph section table:has(td:nth-child(3)) td div{margin:0;min-width:0;overflow-wrap:anywhere}
.slotgraph .memory{font-size:12px;border-spacing:1px}
.slotgraph .memory td{padding:1px 3px}
}
</style>"""


@attrs.frozen
class Table:
    """Rows of the same columns under a title, and text below them, such as a plan.

    Attributes:
        why: The text if there are no rows.
        drawn: Whether a page also draws bars for the numbers of each row.
    """

    title: str
    rows: Sequence[TableRow] = ()
    text: object = ""
    why: str = ""
    drawn: bool = False

    @property
    def columns(self) -> list[list[str]]:
        """The name and the cells of each column."""
        names = dict.fromkeys(itertools.chain(*self.rows))
        return [[name, *(cell(row.get(name)) for row in self.rows)] for name in names]

    @property
    def below(self) -> str:
        """The text below, or why there are no rows."""
        return printable(f"{self.text or ('' if self.rows else self.why)}")

    def lines(self, width: int, style: Callable[[str], str] = str) -> str:
        """Return the table as text.

        Sentences are folded, words are not. Columns that do not fit come below, after the first one. style: Styles the
        title.
        """
        shown, columns = [*map(style, _fold(printable(self.title), width))], list[list[str]]()
        for column in self.columns:
            if columns[1:] and _width([*columns, column], _SENTENCE) > width:
                shown += _side_by_side(columns, width)
                columns = columns[:1]
            columns.append(column)
        shown += _side_by_side(columns, width)
        for line in self.below.splitlines():
            shown += _fold(line, width, subsequent_indent="        ")
        return "\n".join(shown).rstrip() + "\n"

    def html(self, heading: str = "h3") -> str:
        """Return the table for a page. On a narrow page, rows of many columns become lists of names and values."""
        columns = self.columns
        kinds = [f'{"number" if _is_number(one) else "text"} data-of="{escape(one[0])}"' for one in columns]
        rows = "".join(
            f"<tr>{''.join(map('<td class={}><div>{}</div></td>'.format, kinds, map(escape, row)))}</tr>"
            for row in zip(*columns, strict=True)
        )
        bars = f'<p>{_BARS}</p><div class="bars">{"".join(self.bars())}</div>' if self.drawn else ""
        table = f'{bars}<div class="scroll"><table>{rows}</table></div><pre>{escape(self.below)}</pre>'
        return f"<section><{heading}>{safe(self.title)}</{heading}>{table}</section>"

    def bars(self) -> Iterator[str]:
        """Yield a box for each row, with a bar for each time, as long as its share of the second longest."""
        for row in self.rows:
            (what, of), *others = row.items()
            times = {name: value for name, value in others if isinstance(value, float)}
            full, *_ = sorted(times.values())[-2:]
            bars = (
                f'<div style="--part:{value / full:.1%}">{safe(name)} <b>{cell(value)}</b></div>'
                for name, value in times.items()
            )
            yield f"<div><h4>{safe(what)}: {safe(of)}</h4>{''.join(bars)}</div>"


def _is_number(column: Sequence[str]) -> bool:
    """Return whether a column has only numbers."""
    return bool(re.fullmatch(r"[-\d,.]*\d[-\d,.]*", "".join(column[1:])))


def _width(columns: Sequence[Sequence[str]], most: int) -> int:
    """Return the width of columns side by side, if sentences, but no words, are folded to so many terminal columns."""
    each = (max(*map(len, " ".join(cells).split()), min(most, max(map(len, cells)))) for cells in columns)
    return sum(wide + _GAP for wide in each) - _GAP


def _side_by_side(columns: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield lines of columns, with the longest sentences folded until all fit."""
    most = next((most for most in range(width, _SENTENCE, -1) if _width(columns, most) <= width), _SENTENCE)
    widths = [min(_width([one], most), width) for one in columns]
    sides = [">" if _is_number(one) else "<" for one in columns]
    for number, row in enumerate(zip(*columns, strict=True)):
        for parts in itertools.zip_longest(*map(_fold, row, widths), fillvalue=""):
            yield "  ".join(map("{:{}{}}".format, parts, sides, widths)).rstrip()
        if not number:
            yield "─" * min(_width(columns, most), width)
    yield ""


class Shown(abc.ABC):
    """Shows an explanation: a line for `repr`, tables for `str`, and a page that a notebook shows."""

    __slots__ = ()

    @abc.abstractmethod
    def tables(self) -> Iterator[Table]:
        """Yield all tables.

        The first is on top of a page: each value is a figure, followed by a colon and what it counts.
        """

    def pictures(self) -> str:
        """Return pictures in HTML."""
        return ""

    def __repr__(self) -> str:
        """Return one line."""
        top = next(self.tables())
        figures = ", ".join(f"{row['what']} {row['value'].partition(':')[0]}" for row in top.rows)
        return f"<explanation of {printable(top.title)}: {figures}>"

    def __str__(self) -> str:
        """Return the tables in 80 columns."""
        return "\n".join(table.lines(_SCREEN) for table in self.tables())

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        top, *others = self.tables()
        figures = "".join(
            f"<div><dt>{row['what']}</dt><dd><b>{safe(row['value']).replace(':', '</b>', 1)}</dd></div>"
            for row in top.rows
            if "what" in row
        )
        head = f"<h1>{safe(top.title)}</h1><dl>{figures}</dl><p>{safe(top.text)}</p>" if figures else top.html("h1")
        return f"""<div class="slotgraph">{STYLE}
{head}
{self.pictures()}
<div class="tables">{"".join(table.html() for table in others)}</div>
</div>"""


@attrs.frozen
class Page(Shown):
    """The result of a command: tables, the first of which comes on top."""

    found: Sequence[Table]

    def tables(self) -> Iterator[Table]:
        """Return all tables."""
        return iter(self.found)


def table_rows(records: Sequence[Any], **first: Any) -> list[TableRow]:
    """Make a row for each record, with a column for each field. first: Columns before them."""
    return [{**first, **attrs.asdict(one, recurse=False)} for one in records]


def printable(text: str) -> str:
    """Escape characters that would control a terminal, or that a page does not allow."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def cell(value: Any) -> str:
    """Return the text of a cell, for text, numbers, names, or names with values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= _LARGE else f"{value:.4g}"
    if attrs.has(type(value)):
        value = attrs.asdict(value, recurse=False)
    if isinstance(value, Mapping):
        value = [f"{name}={cell(one)}" for name, one in value.items()]
    text = ", ".join(map(cell, value)) if isinstance(value, list | tuple) else str(value or "")
    return printable(text) or "-"


def pairs(found: TableRow) -> list[TableRow]:
    """Make a row for each name and its value."""
    return [{"what": name, "value": value} for name, value in found.items()]


def safe(text: object) -> str:
    """Return a text's printable form, escaped for a page."""
    return escape(printable(f"{text}"))


def html(explanation: Shown) -> str:
    """Return an explanation as a page, light or dark as its reader prefers.

    It loads nothing, so that it opens offline.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{safe(next(explanation.tables()).title)}</title>
</head>
<body>
{explanation._repr_html_()}
</body>
</html>
"""
