"""The function behind a computed slot: what it needs follows from its parameters' names."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import attrs

STEP: Final = "step"
SETTINGS: Final = "settings"
RANKS: Final = "ranks"
OUT: Final = "out"
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@attrs.frozen
class Compute:
    """A function and the names that it needs, as pytest fixtures have them.

    needs: parameters in order: slots, fields of the batch, `step` for the step's sizes, `settings` for the runner's,
    `ranks` for those that run the step together.
    writes_out: whether it takes `out`, the slot's own buffer, and fills it instead of returning a value.
    """

    function: Callable[..., Any]
    needs: tuple[str, ...]
    writes_out: bool

    @property
    def name(self) -> str:
        """The function's name, for plans and messages."""
        return str(getattr(self.function, "__qualname__", self.function))


def compute_of(function: Callable[..., Any]) -> Compute:
    """Read a function's parameters; TypeError where they cannot name slots."""
    if isinstance(function, Compute):
        return function
    if not callable(function):
        message = f"a computed slot needs a function, got {function!r}"
        raise TypeError(message)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:  # a function in C, or what only looks like one
        message = f"its parameters cannot be read ({error}): write a function that calls it, with names of slots"
        raise TypeError(message) from error
    for parameter in parameters:
        if parameter.kind not in _NAMED:
            message = f"{parameter} cannot name a slot: use plain parameters, one for each slot needed"
            raise TypeError(message)
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return Compute(_no_coroutine(function), tuple(name for name in names if name != OUT), OUT in names)


def one_argument(function: Callable[..., Any], expected: str) -> Callable[..., Any]:
    """A function that can be called with one argument. TypeError, which tells what was `expected`, where it is none."""
    if not callable(function):
        message = f"expected {expected}"
        raise TypeError(message)
    try:
        inspect.signature(function).bind(None)
    except ValueError:  # a function in C that does not tell its parameters
        return function
    except TypeError as error:
        message = f"expected {expected}: it is called with one argument, which it does not take ({error})"
        raise TypeError(message) from error
    return _no_coroutine(function)


def _no_coroutine(function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        message = "a function that returns its value is called here, no coroutine and no generator"
        raise TypeError(message)
    return function
