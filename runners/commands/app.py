"""The application: its commands and its options."""

import contextlib
import importlib.metadata
import os
import sys
from typing import Annotated

import typer

from .backends import backends
from .bench import bench
from .check import check
from .explain import explain
from .replay import replay
from .screen import FAILED

app = typer.Typer(
    name="slotgraph",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: examples stay as they were written, in a terminal and in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        typer.echo(f"slotgraph {importlib.metadata.version('slotgraph')}")
        raise typer.Exit


@app.callback()
def slotgraph(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

    \b
    Exit status: 0 where all went well, 1 where a check failed or a backend cannot run here, 2 where the command was
    not understood.
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    del version


app.command()(explain)
app.command()(backends)
app.command()(bench)
app.command()(check)
app.command()(replay)


def main() -> None:
    """Run the command line on this process's arguments."""
    try:
        app()
    except OSError as error:  # of printing: commands tell of all other files themselves
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be printed cannot be
        with contextlib.suppress(OSError):
            typer.echo(f"the output cannot be written: {error.strerror or error}", err=True)
        sys.exit(FAILED)
