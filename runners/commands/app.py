"""The application: its commands, its options, and where its events go."""

import importlib.metadata
import logging
import sys
from typing import Annotated

import structlog
import typer

from .backends import backends
from .bench import bench
from .check import check
from .explain import explain
from .replay import replay

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


def _events_to_stderr() -> None:
    """Warnings of the library go to stderr, so that stdout holds nothing but what was asked for."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        processors=[structlog.processors.add_log_level, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())],
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )


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
    _events_to_stderr()


app.command()(explain)
app.command()(backends)
app.command()(bench)
app.command()(check)
app.command()(replay)


def main() -> None:
    """Run the command line on this process's arguments."""
    app()
