"""Where commands print to, and in what form."""

import json
import os
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ...dataflow.serial import to_data

WIDE: Final = 200
"""Columns in a pipe or file, where nothing needs to fit a screen and a folded name could not be searched for."""


class Form(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


FormOption = Annotated[Form, typer.Option("--format", help="Tables, or JSON for scripts.")]


def screen() -> Console:
    """Standard output: as wide as the terminal, or wide where it is none and nobody set COLUMNS."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(highlight=False, width=WIDE)


def show(form: Form, data: Any, shown: RenderableType) -> None:
    """Print data as JSON, or what shows it."""
    if form == Form.JSON:
        typer.echo(json.dumps(to_data(data), indent=2, allow_nan=False))
    else:
        screen().print(shown)


def table(*titles: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table whose cells fold. right: the columns of numbers."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        made.add_column(title, overflow="fold", justify="right" if title in right else "left")
    return made
