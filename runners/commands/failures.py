"""How commands fail: one line a fault on stderr, no traceback, and an exit status that a script can use."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from typing import Final, NoReturn

import typer

from ...backends.base import Backend
from ...backends.registry import AUTO, choose, names
from ...dataflow.errors import BackendUnavailableError, ConfigError, DeclarationErrors, SlotGraphError, place_of

FAILED: Final = 1
"""A check failed, or a backend cannot run here. What was not understood exits with 2, as typer has it."""


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
    except SystemExit as error:
        fail(f"SystemExit: the code that was called ended the process with {error.code!r}{place_of(error)}")
    except Exception as error:  # noqa: BLE001 - what a user's module raises can be anything
        fail(f"{type(error).__name__}{place_of(error)}: {error}")


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
