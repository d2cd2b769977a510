"""Plain data of a batch as JSON and back: what has its own word there as it is, tuples and mappings by name."""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from ...dataflow.errors import RecordingError

DEPTH: Final = 32
"""How deeply plain data may be nested."""
MOST: Final = 20_000
"""How many values one piece of plain data may hold; numbers in lists of one shape are tensors, and have no limit."""
_LONGEST: Final = 1 << 16
"""Letters of a text, or bits of a whole number."""


def lists_fit(shape: Sequence[int]) -> bool:
    """Whether nested lists of a shape hold numbers, and not so many more lists than numbers that they are the bulk.

    What is stored is the numbers alone. So a file of some bytes could stand for lists of many gigabytes.
    """
    numbers = math.prod(shape)
    return bool(shape) and numbers > 0 and sum(itertools.accumulate(shape[:-1], operator.mul)) <= MOST + 4 * numbers


class NotPlainError(TypeError):
    """Something is no plain data: the message says what."""


def plain_to_data(value: Any) -> Any:
    """JSON's words for None, bools, numbers, text, and lists, tuples and text-keyed dicts of them.

    NotPlainError names the type of anything else, and what is too large or too deep.
    """
    return _to_data(value, iter(range(MOST)), DEPTH)


def _to_data(value: Any, room: Iterator[int], depth: int) -> Any:
    if next(room, None) is None or depth == 0:
        message = f"more than {MOST:,} values" if depth else f"more than {DEPTH} levels deep"
        raise NotPlainError(message)
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in (list, tuple):
        inner = [_to_data(one, room, depth - 1) for one in value]
        return inner if kind is list else {"tuple": inner}
    if kind is dict:
        return {"dict": [[_text(key), _to_data(one, room, depth - 1)] for key, one in value.items()]}
    return _lone(value, kind)


def _lone(value: Any, kind: type) -> Any:
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value)
    if kind is int and value.bit_length() <= _LONGEST // 8:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    message = "a whole number with too many digits" if kind is int else f"{kind.__module__}.{kind.__qualname__}"
    raise NotPlainError(message)


def _text(value: Any) -> str:
    if type(value) is not str:
        message = f"a key that is {type(value).__qualname__}"
        raise NotPlainError(message)
    if len(value) > _LONGEST:
        message = f"text of {len(value):,} letters"
        raise NotPlainError(message)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = "text with half a letter in it"
        raise NotPlainError(message) from error
    return value


def plain_from_data(data: Any) -> Any:
    """What `plain_to_data` was given. RecordingError where that gives no such data."""
    return _from_data(data, iter(range(MOST)), DEPTH)


def _from_data(data: Any, room: Iterator[int], depth: int) -> Any:
    if next(room, None) is None or depth == 0:
        message = f"plain data of more than {MOST:,} values" if depth else f"plain data more than {DEPTH} levels deep"
        raise RecordingError(message)
    if isinstance(data, list):
        return [_from_data(one, room, depth - 1) for one in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"float": ("inf" | "-inf" | "nan") as text, **rest} if not rest:
            return float(text)
        case {"tuple": list(inner), **rest} if not rest:
            return tuple(_from_data(one, room, depth - 1) for one in inner)
        case {"dict": list(pairs), **rest} if not rest and all(_is_pair(pair) for pair in pairs):
            return {key: _from_data(one, room, depth - 1) for key, one in pairs}
    message = f"plain data with unknown words: {', '.join(map(repr, sorted(data)[:3]))}"
    raise RecordingError(message)


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)  # noqa: PLR2004 - key and value
