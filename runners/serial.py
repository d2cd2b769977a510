"""Converts plans and explanations to and from plain data, by one strict cattrs converter."""

import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import attrs
import cattrs
import torch
from cattrs.errors import BaseValidationError, ForbiddenExtraKeysError

from ..dataflow.capabilities import dtype_from_text, dtype_text
from ..dataflow.errors import ConfigError, did_you_mean
from ..dataflow.tails import Number
from .engine.selection import BucketKey

T = TypeVar("T")
_NOT_FINITE: Final[Mapping[str, float]] = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
"""Numbers that JSON lacks, by the text that represents them. A tail's value is never text otherwise."""


def to_data(record: Any) -> Any:
    """Write a record as dicts, lists, text and numbers."""
    return _CONVERTER.unstructure(record)


def from_data(data: Any, kind: type[T]) -> T:
    """Read a record of one kind from plain data.

    Raise ConfigError, which names each key that is unknown or missing and each value of the wrong type, with its place.
    """
    try:
        return _CONVERTER.structure(data, kind)
    except (BaseValidationError, TypeError, ValueError) as error:
        raise ConfigError(
            f"no {kind.__name__}: {'; '.join(cattrs.transform_error(error, format_exception=_fault))}"
        ) from error


def _expect(value: Any, kind: Any, expected: str = "") -> Any:
    """Return a value of a kind unchanged, as a structure hook that converts nothing. Raise TypeError for any other."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, str)):
        raise TypeError(f"expected {expected or kind.__name__}, got {value!r}")
    return value


def _number_from_data(value: Any, _: Any) -> Number:
    known = _NOT_FINITE.get(value, value) if isinstance(value, str) else value
    number: Number = _expect(known, bool | int | float, "a number, true, false, 'inf', '-inf' or 'nan'")
    return number


def _bucket_from_data(value: Any, _: Any) -> BucketKey | None:
    if isinstance(value, list):
        return tuple(_expect(one, int) for one in value)
    return None if value is None else _expect(value, int)


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Make a structure hook for tuples that refuses text, which Python would take for a sequence of letters."""
    inner = typing.get_args(kind)

    def hook(value: Any, _: Any) -> tuple[Any, ...]:
        _expect(value, list | tuple, "a list")
        if inner[-1] is Ellipsis:
            return tuple(converter.structure(value, list[inner[0]]))  # type: ignore[valid-type]
        if len(value) != len(inner):
            raise TypeError(f"expected {len(inner)} values, got {value!r}")
        return tuple(map(converter.structure, value, inner))

    return hook


def _record_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Make a structure hook for records that expects keys and values."""
    structure = converter.gen_structure_attrs_fromdict(kind)
    return lambda value, _: structure(_expect(value, Mapping, "keys and values"), kind)


def _fault(error: BaseException, _: Any) -> str:
    """Describe one fault. The hooks above say what was expected."""
    if isinstance(error, ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        return "; ".join(f"unknown key {key!r}{did_you_mean(key, known)}" for key in sorted(error.extra_fields))
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _is(box: Any) -> Callable[[Any], bool]:
    return lambda kind: typing.get_origin(kind) is box


_CONVERTER: Final = cattrs.Converter(forbid_extra_keys=True)
for _kind in (int, bool, str):
    _CONVERTER.register_structure_hook(_kind, _expect)
_CONVERTER.register_structure_hook(float, _number_from_data)
_CONVERTER.register_structure_hook(BucketKey, _bucket_from_data)
_CONVERTER.register_structure_hook(BucketKey | None, _bucket_from_data)
_CONVERTER.register_structure_hook(Number, _number_from_data)
_CONVERTER.register_structure_hook(
    Number | None, lambda value, kind: None if value is None else _number_from_data(value, kind)
)
_CONVERTER.register_unstructure_hook(float, lambda value: value if math.isfinite(value) else str(value))
_CONVERTER.register_structure_hook(torch.dtype, lambda value, _: dtype_from_text(_expect(value, str)))
_CONVERTER.register_unstructure_hook(torch.dtype, dtype_text)
_CONVERTER.register_unstructure_hook_func(_is(frozenset), sorted)
_CONVERTER.register_unstructure_hook_func(_is(tuple), lambda values: [_CONVERTER.unstructure(one) for one in values])
_CONVERTER.register_structure_hook_factory(_is(tuple), _tuple_hook)
_CONVERTER.register_structure_hook_factory(attrs.has, _record_hook)
