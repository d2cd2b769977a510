"""`slotgraph explain`: what a declaration's slots are, what they follow from, and what a step would do; or a runner."""

import json
import pathlib
import re
from collections.abc import Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any, Final, NoReturn

import typer

from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis
from ...dataflow.capabilities import AUTO, LADDER, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CaptureError
from ...dataflow.explain import Explanation, Extents, explain_declaration
from ..explained.explanation import RunnerExplanation
from ..explained.explanation import explain as explain_runner
from ..explained.html import html
from ..explained.tables import diagram, printed, tables
from ..runner import Runner
from .lookup import captured, find_explained
from .screen import as_json, chosen, fail, nearest, parted, reported, screen


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
_OF_A_RUNNER: Final = ("target", "capture", "form", "output")
_SIZE: Final = re.compile(r"(\w+)=(\d+)(?:/(\d+))?")


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
            found: _Explained = _runner(named, context, capture=capture)
        else:
            declared, on = named.slotgraph, chosen(backend)
            declared = declared.under(_settings_of(setting)) if setting else declared
            found = explain_declaration(
                declared,
                on.capabilities,
                on.name,
                _extents_of(size or (), width, declared),
                absent or (),
                parted(in_place),
                chosen_lowering(on.capabilities, lowering),
                hosted=parted(hosted),
            )
    if output is not None:
        try:
            output.write_text(_text(found, form), encoding="utf-8")
        except OSError as error:
            fail(f"{output}: cannot be written: {error.strerror or error}")
        typer.echo(f"written to {output}")
    elif form == Format.TABLE:
        screen().print(tables(found))
    else:
        typer.echo(_text(found, form), nl=False)


def _runner(runner: Runner[Any], context: typer.Context, *, capture: bool) -> RunnerExplanation:
    """A runner explained, captured before if that is asked for. What was not captured says why."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name not in _OF_A_RUNNER and source is not None and source.name == "COMMANDLINE":
            _refuse(option.opts[0], "is for a declaration; a runner has its own: leave it out")
    if capture:
        try:
            captured(runner)
        except CaptureError as error:
            typer.echo(str(error), err=True)
    return explain_runner(runner)


def _extents_of(texts: Sequence[str], width: int, declaration: Declaration) -> Extents:
    """Live and padded sizes from texts such as `batch=37/48` and `hidden=64`.

    width: tokens a request, which sizes WIDTH, and TOKENS if only BATCH is given.
    """
    extents: dict[Axis, tuple[int, int]] = {}
    beside = [BATCH] if TOKENS in declaration.axes else []  # which TOKENS can follow from
    axes = {axis.name.lower(): axis for axis in (*declaration.axes, *beside)}
    for text in texts:
        match = _SIZE.fullmatch(text)
        if match is None:
            _refuse("--size", f"expected AXIS=LIVE/PADDED or AXIS=SIZE, as in batch=37/48, got {text!r}")
        name, live, padded = match.groups()
        axis = axes.get(name.lower())
        if axis is None:
            near = nearest(name, (one.name for one in axes.values()))
            _refuse("--size", f"{declaration.name} has no axis {name!r}{near}")
        if axis in extents:
            _refuse("--size", f"{axis.name} is given twice")
        extents[axis] = (int(live), int(padded or live))
    if BATCH in extents and TOKENS in declaration.axes:
        live, padded = extents[BATCH]
        extents.setdefault(TOKENS, (live * width, padded * width))
    if extents and WIDTH in declaration.axes:
        extents.setdefault(WIDTH, (width, width))
    return extents


def _settings_of(texts: Sequence[str]) -> object:
    """Settings from texts such as `swa`, `swa=false` and `attention.window=128`."""
    settings = SimpleNamespace()
    for text in texts:
        path, _, value = text.partition("=")
        *outer, last = path.split(".")
        if not all(part.isidentifier() for part in (*outer, last)):
            _refuse("--set", f"expected NAME or NAME=VALUE, as in attention.window=128, got {text!r}")
        holder = settings
        for part in outer:
            holder = vars(holder).setdefault(part, SimpleNamespace())
        try:  # a number, true or false if it reads as one, else the text
            read = json.loads(value.lower() if value.lower() in ("true", "false") else value or "true")
        except ValueError:
            read = value
        setattr(holder, last, read)
    return settings


def _text(explanation: _Explained, form: Format) -> str:
    """The explanation in one form."""
    if form == Format.JSON:
        return as_json(explanation)
    if form == Format.MERMAID:
        return diagram(explanation)
    if form == Format.TABLE:
        return printed(tables(explanation))
    if not isinstance(explanation, RunnerExplanation):
        _refuse("--format", "a page is made of a runner: name one, or take --format table, mermaid or json")
    return html(explanation)


def _refuse(option: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=option)
