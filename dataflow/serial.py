"""Plans, and the records that explain them, as plain data and JSON and back: one cattrs converter, strict both ways."""

import difflib
import json
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs
import cattrs
import torch
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn

from .capabilities import dtype_from_text, dtype_text
from .errors import ConfigError
from .plan import FillPlan
from .tails import Number

T = TypeVar("T")
_NOT_FINITE: Final[Mapping[str, float]] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Numbers that JSON has no words for, as the text that stands for them; a tail's value is never text otherwise."""


def to_data(record: Any) -> Any:
    """A record as dicts, lists, text and numbers."""
    return _CONVERTER.unstructure(record)


def from_data(data: Any, kind: type[T]) -> T:
    """A record of one kind from plain data.

    ConfigError names each key that is unknown or missing and each value of the wrong type, with its place.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except (BaseValidationError, TypeError, ValueError) as error:
        message = f"no {kind.__name__}: {'; '.join(cattrs.transform_error(error, format_exception=_fault))}"
        raise ConfigError(message) from error


def plan_to_json(plan: FillPlan, indent: int | None = None) -> str:
    """A plan as JSON that any parser reads: infinity and NaN stand as text."""
    return json.dumps(to_data(plan), indent=indent, allow_nan=False)


def plan_from_json(text: str) -> FillPlan:
    """The plan of a JSON text; ConfigError where it does not parse, and as `from_data`."""
    try:
        data = json_data(text)
    except ValueError as error:
        message = f"no FillPlan: {error}"
        raise ConfigError(message) from error
    return from_data(data, FillPlan)


def json_data(text: str) -> Any:
    """What a JSON text says; ValueError for what is none, for NaN and infinity, and for what is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        message = "it is nested too deeply"
        raise ValueError(message) from error


def _refuse(constant: str) -> float:
    message = f"{constant} is no number in JSON"
    raise ValueError(message)


def _strict(kind: type) -> Callable[[Any, Any], Any]:
    """A structure hook that takes a kind of value as it is and converts nothing."""

    def hook(value: Any, _: Any) -> Any:
        return _expect(kind, value)

    return hook


def _expect(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        message = f"expected {kind.__name__}, got {value!r}"
        raise TypeError(message)
    return value


def _number_to_data(value: Number) -> Number | str:
    return value if math.isfinite(value) else str(value)


def _number_from_data(value: Any, _: Any) -> Number:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if not isinstance(value, bool | int | float):
        message = f"expected a number, true, false, 'inf', '-inf' or 'nan', got {value!r}"
        raise TypeError(message)
    return value


def _dtype_from_data(value: Any, _: Any) -> torch.dtype:
    return dtype_from_text(_expect(str, value))


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _is_frozenset(kind: Any) -> bool:
    return typing.get_origin(kind) is frozenset


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    """A structure hook for tuples that refuses text, which Python would take for a sequence of letters."""
    inner = typing.get_args(kind)

    def hook(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            message = f"expected a list, got {value!r}"
            raise TypeError(message)
        if inner[-1] is Ellipsis:
            return tuple(converter.structure(value, list[inner[0]]))  # type: ignore[valid-type]
        if len(value) != len(inner):
            message = f"expected {len(inner)} values, got {value!r}"
            raise TypeError(message)
        return tuple(converter.structure(one, each) for one, each in zip(value, inner, strict=True))

    return hook


def _record_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """A structure hook for records that asks for keys and values."""
    structure = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True)

    def hook(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            message = f"expected keys and values, got {value!r}"
            raise TypeError(message)
        return structure(value, kind)

    return hook


def _fault(error: BaseException, _: Any) -> str:
    """One fault in words; the hooks above have said what was expected."""
    if isinstance(error, ForbiddenExtraKeysError):
        return _unknown_keys(error)
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return str(error)


def _unknown_keys(error: ForbiddenExtraKeysError) -> str:
    known = [field.name for field in attrs.fields(error.cl)]
    hints = []
    for key in sorted(error.extra_fields):
        near = difflib.get_close_matches(key, known, n=1)
        hints.append(f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    return "; ".join(hints)


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, bool, str):
        converter.register_structure_hook(kind, _strict(kind))
    converter.register_structure_hook(float, _number_from_data)
    converter.register_structure_hook(Number, _number_from_data)
    converter.register_unstructure_hook(float, _number_to_data)
    converter.register_structure_hook(torch.dtype, _dtype_from_data)
    converter.register_unstructure_hook(torch.dtype, dtype_text)
    converter.register_unstructure_hook_func(_is_frozenset, sorted)
    converter.register_unstructure_hook_func(_is_tuple, lambda values: [converter.unstructure(one) for one in values])
    converter.register_structure_hook_factory(_is_tuple, _tuple_hook)
    converter.register_structure_hook_factory(attrs.has, _record_hook)
    return converter


_CONVERTER: Final = _converter()
