"""`slotgraph explain`: what a declaration's slots are, what they follow from, and what a step would do; or a runner."""

import io
import json
import pathlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from ...dataflow.capabilities import AUTO, LADDER, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CaptureError
from ...dataflow.explain import Explanation, explain_declaration
from ...dataflow.inputs import Inputs
from ...dataflow.serial import to_data
from ..explained.explanation import explain as explain_runner
from ..explained.html import html
from ..explained.records import RunnerExplanation
from ..explained.tables import diagram, tables
from ..runner import Runner
from .failures import chosen, fail, reported
from .lookup import captured, find_explained
from .screen import WIDE, screen
from .sizes import extents_of, settings_of


class Format(StrEnum):
    """How an explanation is printed."""

    TABLE = "table"
    MERMAID = "mermaid"
    JSON = "json"
    HTML = "html"


_Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        help="A declaration's class, a runner, or a function that makes one: a module or a .py file, and a name.",
    ),
]
_Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="AXIS=LIVE/PADDED", help="An axis' size, as in batch=37/48; one number for both."),
]
_Width = Annotated[int, typer.Option(min=1, help="Tokens that a request has: sizes TOKENS where only BATCH is given.")]
_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting that slots with `when=` ask for; no value means true."),
]
_Absent = Annotated[list[str] | None, typer.Option(metavar="SLOT", help="An optional slot that the batch has not.")]
_InPlace = Annotated[
    list[str] | None,
    typer.Option("--in-place", metavar="SLOT[,SLOT]", help="Copied slots that a producer writes in place of a copy."),
]
_Hosted = Annotated[
    list[str] | None,
    typer.Option("--hosted", metavar="SLOT[,SLOT]", help="Slots that the batch brings host data for: lists, arrays."),
]
_Lowering = Annotated[
    str, typer.Option(metavar="NAME", help=f"How the plan is run: {', '.join(LADDER)}, or what the backend prefers.")
]
_Backend = Annotated[str, typer.Option(metavar="NAME", help="Plan for this backend; see `slotgraph backends`.")]
_Capture = Annotated[bool, typer.Option("--capture", help="Capture a runner's graphs first, if they are not.")]
_Format = Annotated[
    Format, typer.Option("--format", help="Tables, a mermaid diagram of the dependencies, JSON, or a runner's page.")
]
_Output = Annotated[
    pathlib.Path | None, typer.Option("--output", metavar="FILE", help="Write it there, and say so, not to the screen.")
]
_Explained = Explanation | RunnerExplanation
_OF_A_DECLARATION: Final = "is for a declaration; a runner has its own: leave it out"


def explain(
    context: typer.Context,
    target: _Target,
    *,
    size: _Sizes = None,
    width: _Width = 1,
    setting: _Settings = None,
    absent: _Absent = None,
    in_place: _InPlace = None,
    hosted: _Hosted = None,
    backend: _Backend = "auto",
    lowering: _Lowering = AUTO,
    capture: _Capture = False,
    form: _Format = Format.TABLE,
    output: _Output = None,
) -> None:
    """Show a declaration's slots, dependencies and plan; or a runner's, with its buckets, graphs, memory and decisions.

    Without --size only the declaration is shown. Without --set every slot is shown, whatever its `when=` asks for.

    \b
    Examples:
      slotgraph explain my_engine.inputs:DecodeInputs
      slotgraph explain inputs.py:DecodeInputs --size batch=37/48 --size hidden=64 --lowering slot_by_slot
      slotgraph explain inputs.py:DecodeInputs --format mermaid > inputs.mmd
      slotgraph explain my_engine.serving:decode --capture --format html --output decode.html
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    with reported():
        named = find_explained(target)
        if isinstance(named, Runner):
            _check_options(context)
            found: _Explained = _runner(named, capture=capture)
        else:
            declared = _declaration(named, setting or ())
            extents, on = extents_of(size or (), width, declared), chosen(backend)
            how, written, brought = chosen_lowering(on.capabilities, lowering), _names(in_place), _names(hosted)
            found = explain_declaration(
                declared, on.capabilities, on.name, extents, absent or (), written, how, hosted=brought
            )
    _show(found, form, output)


def _check_options(context: typer.Context) -> None:
    """Refuse options that say what a runner says itself."""
    for option in ("size", "width", "setting", "absent", "in_place", "hosted", "backend", "lowering"):
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE":
            name = "--set" if option == "setting" else f"--{option.replace('_', '-')}"
            raise typer.BadParameter(_OF_A_DECLARATION, param_hint=name)


def _runner(runner: Runner[Any], *, capture: bool) -> RunnerExplanation:
    """A runner explained, captured before where that is asked for; what was not captured says why."""
    if capture:
        try:
            captured(runner)
        except CaptureError as error:
            typer.echo(str(error), err=True)
    return explain_runner(runner)


def _declaration(inputs: type[Inputs], setting: Sequence[str]) -> Declaration:
    """A class' declaration, under settings where some were given."""
    declaration, settings = inputs.slotgraph, settings_of(setting)
    return declaration if settings is None else declaration.under(settings)


def _names(texts: Sequence[str] | None) -> list[str]:
    """Names with commas between them, or in several options, or both."""
    return [name for text in texts or () for part in text.split(",") if (name := part.strip())]


def _show(explanation: _Explained, form: Format, output: pathlib.Path | None) -> None:
    if output is None:
        if form == Format.TABLE:
            screen().print(tables(explanation))
        else:
            typer.echo(_text(explanation, form), nl=False)
        return
    try:
        output.write_text(_text(explanation, form), encoding="utf-8")
    except OSError as error:
        fail(f"{output}: cannot be written: {error.strerror or error}")
    typer.echo(f"written to {output}")


def _text(explanation: _Explained, form: Format) -> str:
    """The explanation in one form."""
    if form == Format.JSON:
        return json.dumps(to_data(explanation), indent=2, allow_nan=False) + "\n"
    if form == Format.MERMAID:
        return diagram(explanation)
    if form == Format.TABLE:
        paper = io.StringIO()
        Console(file=paper, width=WIDE, highlight=False).print(tables(explanation))
        return paper.getvalue()
    if isinstance(explanation, RunnerExplanation):
        return html(explanation)
    message = "a page is made of a runner: name one, or take --format table, mermaid or json"
    raise typer.BadParameter(message, param_hint="--format")
