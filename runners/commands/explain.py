"""`slotgraph explain`: what a declaration's slots are, what they follow from, and what a step would do."""

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from ...dataflow.capabilities import AUTO, LADDER, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.explain import Explanation
from ...dataflow.explain import explain as explanation_of
from ...dataflow.mermaid import mermaid
from ...dataflow.serial import to_data
from ...dataflow.tables import tables
from .failures import chosen, reported
from .lookup import find_declaration
from .screen import screen
from .sizes import extents_of, settings_of


class Format(StrEnum):
    """How an explanation is printed."""

    TABLE = "table"
    MERMAID = "mermaid"
    JSON = "json"


_Target = Annotated[
    str, typer.Argument(metavar="MODULE:CLASS", help="A declaration: a module or a .py file, and a class.")
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
_Format = Annotated[Format, typer.Option("--format", help="Tables, a mermaid diagram of the dependencies, or JSON.")]


def explain(
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
    form: _Format = Format.TABLE,
) -> None:
    """Show a declaration's slots and dependencies, and for given sizes the plan that fills them and its bytes.

    Without --size only the declaration is shown. Without --set every slot is shown, whatever its `when=` asks for.

    \b
    Examples:
      slotgraph explain my_engine.inputs:DecodeInputs
      slotgraph explain inputs.py:DecodeInputs --size batch=37/48 --size hidden=64
      slotgraph explain inputs.py:DecodeInputs --size batch=7/8 --width 4 --format json
      slotgraph explain inputs.py:DecodeInputs --size batch=37/48 --lowering slot_by_slot --in-place input_ids
      slotgraph explain inputs.py:DecodeInputs --format mermaid > inputs.mmd
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    with reported():
        declaration = _declaration(target, setting or ())
        extents = extents_of(size or (), width, declaration)
        on = chosen(backend)
        how, written, brought = chosen_lowering(on.capabilities, lowering), _names(in_place or ()), _names(hosted or ())
        found = explanation_of(
            declaration, on.capabilities, on.name, extents, absent or (), written, how, hosted=brought
        )
    _show(found, form)


def _declaration(target: str, setting: Sequence[str]) -> Declaration:
    """The declaration of a target, under settings where some were given."""
    declaration, settings = find_declaration(target).slotgraph, settings_of(setting)
    return declaration if settings is None else declaration.under(settings)


def _names(texts: Sequence[str]) -> list[str]:
    """Names with commas between them, or in several options, or both."""
    return [name for text in texts for part in text.split(",") if (name := part.strip())]


def _show(explanation: Explanation, form: Format) -> None:
    if form == Format.TABLE:
        screen().print(tables(explanation))
    elif form == Format.MERMAID:
        typer.echo(mermaid(explanation), nl=False)
    else:
        typer.echo(json.dumps(to_data(explanation), indent=2, allow_nan=False))
