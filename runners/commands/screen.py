"""Where commands print to, in what form, and how they fail: one line a fault on stderr, no traceback, and a status."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console, RenderableType

from ...backends import Backend, choose, names
from ...dataflow.capabilities import AUTO
from ...dataflow.errors import ConfigError, DeclarationErrors, SlotGraphError, place_of
from ...dataflow.serial import to_data
from ..explained.tables import WIDE

FAILED: Final = 1
"""A check failed, or a backend cannot run here. What was not understood exits with 2, as typer has it."""


class Form(StrEnum):
    """How a result is printed."""

    TABLE = "table"
    JSON = "json"


FormOption = Annotated[Form, typer.Option("--format", help="Tables, or JSON for scripts.")]


def screen() -> Console:
    """Standard output: as wide as the terminal, or wide if it is none and nobody set COLUMNS."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(highlight=False, width=WIDE)


def as_json(data: Any) -> str:
    """Records as JSON that any parser reads."""
    return json.dumps(to_data(data), indent=2, allow_nan=False) + "\n"


def show(form: Form, data: Any, *shown: RenderableType) -> None:
    """Print data as JSON, or what shows it."""
    if form == Form.JSON:
        typer.echo(as_json(data), nl=False)
    else:
        screen().print(*shown, sep="\n")


def parted(texts: Sequence[str] | None) -> list[str]:
    """Names with commas between them, or in several options, or both."""
    return [name for text in texts or () for part in text.split(",") if (name := part.strip())]


def fail(*lines: str) -> NoReturn:
    """Print lines to stderr and exit with the status of a failed check."""
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn errors into lines on stderr: a declaration's faults one a line, wrong options as such.

    What a user's own code raises is told with its line. That it ends the process, even with 0, is a failure: nothing
    was done.
    """
    try:
        yield
    except (typer.BadParameter, typer.Exit):  # the command's own, which say all there is to say
        raise
    except DeclarationErrors as group:
        fail(f"{group.message}:", *(f"  {error}" for error in group.exceptions))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except SlotGraphError as error:
        fail(f"{type(error).__name__}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a user's module raises can be anything
        what = f"it ended the process with {error.code!r}" if isinstance(error, SystemExit) else str(error)
        fail(f"{type(error).__name__}{place_of(error)}: {what}")


def chosen(name: str) -> Backend:
    """The backend of a name, in a block that is `reported`. Exits with 2 if there is none."""
    known = (AUTO, *names())
    if name not in known:
        raise typer.BadParameter(f"there is no backend {name!r}{nearest(name, known)}", param_hint="--backend")
    return choose(name)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, else all of them."""
    every = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), every, n=1)
    if near:
        return f"; did you mean {every[near[0]]!r}?"
    return f"; there are: {', '.join(every.values())}" if every else ""
