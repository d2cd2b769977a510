"""Sizes and settings as they stand on the command line."""

import json
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import typer

from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis
from ...dataflow.declaration import Declaration
from ...dataflow.explain import Extents
from .failures import nearest

_SIZE: Final = re.compile(r"(?P<axis>\w+)=(?P<live>\d+)(?:/(?P<padded>\d+))?")


def extents_of(texts: Sequence[str], width: int, declaration: Declaration) -> Extents:
    """Live and padded sizes from texts such as `batch=37/48` and `hidden=64`.

    width: tokens a request, which sizes WIDTH, and TOKENS where only BATCH is given.
    """
    extents: dict[Axis, tuple[int, int]] = {}
    for text in texts:
        match = _SIZE.fullmatch(text)
        if match is None:
            _refuse(f"expected AXIS=LIVE/PADDED or AXIS=SIZE, as in batch=37/48, got {text!r}")
        axis = _axis(match["axis"], declaration)
        if axis in extents:
            _refuse(f"{axis.name} is given twice")
        extents[axis] = (int(match["live"]), int(match["padded"] or match["live"]))
    if BATCH in extents and TOKENS in declaration.axes and TOKENS not in extents:
        live, padded = extents[BATCH]
        extents[TOKENS] = (live * width, padded * width)
    if extents and WIDTH in declaration.axes:
        extents.setdefault(WIDTH, (width, width))
    return extents


def _axis(name: str, declaration: Declaration) -> Axis:
    """The axis of a name, whatever its case; BATCH is known wherever TOKENS can follow from it."""
    axes = {axis.name: axis for axis in (*declaration.axes, *([BATCH] if TOKENS in declaration.axes else []))}
    found = [axes[name]] if name in axes else [axis for known, axis in axes.items() if known.lower() == name.lower()]
    if len(found) != 1:
        _refuse(f"{declaration.name} has no axis {name!r}{nearest(name, axes)}")
    return found[0]


def settings_of(texts: Sequence[str]) -> object:
    """Settings from texts such as `swa`, `swa=false` and `attention.window=128`; None where there are none."""
    if not texts:
        return None
    settings = SimpleNamespace()
    for text in texts:
        path, _, value = text.partition("=")
        if not all(part.isidentifier() for part in path.split(".")):
            message = f"expected NAME or NAME=VALUE, as in attention.window=128, got {text!r}"
            raise typer.BadParameter(message, param_hint="--set")
        _put(settings, path.split("."), _value(value) if value else True)
    return settings


def _put(settings: SimpleNamespace, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(getattr(settings, part, None), SimpleNamespace):
            setattr(settings, part, SimpleNamespace())
        settings = getattr(settings, part)
    setattr(settings, path[-1], value)


def _value(text: str) -> Any:
    """A number, true or false where it reads as one, else the text."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except ValueError:
        return text


def _refuse(message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint="--size")
