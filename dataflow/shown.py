"""Shows plans, reports and explanations: as one line, as tables, and as a page for a browser or a notebook."""

import abc
import functools
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import rich.box
import rich.console
import rich.table
from rich.text import Text

_LARGE: Final = 1000
TableRow = Mapping[str, Any]
"""Cells by their column."""


@attrs.frozen
class Table:
    """Rows of the same columns under a title, and text below them, such as a plan.

    Attributes:
        drawn: Whether a page also draws a bar for each float of a row. As text, such a table has a column for each row,
            because it would be too wide.
    """

    title: str
    rows: Sequence[TableRow] = ()
    text: object = ""
    drawn: bool = False

    def lines(self, width: int, style: Callable[[str], str] = str) -> str:
        """Return the table as text in so many columns, where longer cells are folded. style: Styles the title."""
        folded = functools.partial(textwrap.fill, width=width, subsequent_indent=" " * 10)
        parts = [style(folded(printable(self.title)))]
        if self.rows:
            parts.append(self._drawn(width))
        parts += map(folded, printable(f"{self.text}").splitlines())
        return "\n".join(parts) + "\n"

    def _drawn(self, width: int) -> str:
        rows = self._turned() if self.drawn else self.rows
        names = [*dict.fromkeys(itertools.chain(*rows))]
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for name in names:
            has_numbers = any(isinstance(row.get(name), int | float) for row in rows)
            table.add_column(Text(name), justify="right" if has_numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell(row.get(name))) for name in names))
        console = rich.console.Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(table)
        return "\n".join(map(str.rstrip, captured.get().splitlines()))

    def _turned(self) -> list[TableRow]:
        """Return a row for each column. The first column's cells become the columns' names."""
        head, *names = dict.fromkeys(itertools.chain(*self.rows))
        return [{head: name, **{cell(row[head]): row.get(name) for row in self.rows}} for name in names]


class Shown(abc.ABC):
    """Shows a result: a line for `repr`, tables for `str` and for rich, and a page that a notebook shows."""

    __slots__ = ()

    @abc.abstractmethod
    def tables(self) -> Iterator[Table]:
        """Yield the result as tables. The first title is also the page's."""

    def facts(self) -> Any:
        """Return what a page shows below the tables, as plain data."""
        return {}

    def text(self, width: int = 80, style: Callable[[str], str] = str) -> str:
        """Return the tables in so many columns. style: Styles the titles."""
        return "\n".join(table.lines(width, style) for table in self.tables())

    def __repr__(self) -> str:
        """Return one line."""
        return f"<{type(self).__name__}: {printable(next(self.tables()).title)}>"

    def __str__(self) -> str:
        """Return the tables in 80 columns."""
        return self.text()

    def __rich_console__(self, _: rich.console.Console, options: rich.console.ConsoleOptions) -> Iterator[Text]:
        """Yield the tables in the columns of a console."""
        yield Text(self.text(options.max_width))

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return html(self, is_whole=False)


def html(shown: Shown, *, is_whole: bool = True) -> str:
    """Return a result as a page: its tables, then everything else that its data has.

    The page is light or dark as its reader prefers, and loads nothing, so that it opens offline.

    Args:
        shown: An explanation, a plan, a report, or the result of a command.
        is_whole: Whether to return a whole page, not a part for a notebook.
    """
    page: str = _template().render(tables=[*shown.tables()], facts=shown.facts(), is_whole=is_whole)
    return page


def printable(text: str) -> str:
    """Escape characters that would control a terminal, or that a page does not allow."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def cell(value: Any) -> str:
    """Return the text of a cell, for text, numbers, names, or names with values."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= _LARGE):
        return f"{value:,.0f}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        value = [f"{name}={cell(one)}" for name, one in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(cell, value))
    return printable(str(value or "-"))


@functools.cache
def _template() -> Any:
    """Return the template of pages."""
    import jinja2  # noqa: PLC0415 - few programs show a page, and the import takes 10 ms

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = cell
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
