"""Tables of times, as the suites print them."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from serving.timing import Spread


def table_of(title: str, rows: Mapping[str, Sequence[float]], unit: str) -> Table:
    """Medians and spreads, each with its ratio to the first row, taken round by round."""
    table = Table(title=title, title_justify="left")
    for name in ("", f"{unit}, median", "p10", "p90", "of the first", "p10", "p90"):
        table.add_column(name, justify="right")
    first = next(iter(rows.values()))
    for name, times in rows.items():
        spread, ratio = Spread.of(times), Spread.of([t / f for t, f in zip(times, first, strict=True)])
        cells = [f"{value:.2f}" for value in (spread.median, spread.p10, spread.p90)]
        table.add_row(name, *cells, *(f"{value:.4f}" for value in (ratio.median, ratio.p10, ratio.p90)))
    return table


def show(table: Table) -> None:
    """Print it, whatever the terminal."""
    Console(width=110).print("\n", table)
