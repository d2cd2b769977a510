"""How commands fail: one line a fault on stderr, no traceback, and an exit status that a script can use."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Final, NoReturn

import typer

from ...backends.base import Backend
from ...backends.registry import AUTO, choose, names
from ...dataflow.errors import BackendUnavailableError, ConfigError, DeclarationErrors, SlotGraphError

FAILED: Final = 1
"""A check failed, or a backend cannot run here. What was not understood exits with 2, as typer has it."""


def fail(*lines: str) -> NoReturn:
    """Print lines to stderr and exit with the status of a failed check."""
    for line in lines:
        typer.echo(line, err=True)
    raise typer.Exit(FAILED)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn the library's errors into lines on stderr: a declaration's faults one a line, wrong options as such."""
    try:
        yield
    except DeclarationErrors as group:
        fail(f"{group.message}:", *(f"  {error}" for error in group.exceptions))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except SlotGraphError as error:
        fail(f"{type(error).__name__}: {error}")


def chosen(name: str) -> Backend:
    """The backend of a name; exits with 2 where there is none, with 1 where it cannot run here."""
    known = (AUTO, *names())
    if name not in known:
        message = f"there is no backend {name!r}{nearest(name, known)}"
        raise typer.BadParameter(message, param_hint="--backend")
    try:
        return choose(name)
    except BackendUnavailableError as error:
        fail(str(error))


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, else all of them."""
    every = sorted(set(known))
    lowered = {one.lower(): one for one in every}
    near = difflib.get_close_matches(name.lower(), lowered, n=1)
    if near:
        return f"; did you mean {lowered[near[0]]!r}?"
    return f"; there are: {', '.join(every)}" if every else ""
