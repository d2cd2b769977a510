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
    if not callable(function):
        message = f"a computed slot needs a function, got {function!r}"
        raise TypeError(message)
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind not in _NAMED:
            message = f"{parameter} cannot name a slot: use plain parameters, one for each slot needed"
            raise TypeError(message)
    names = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return Compute(function, tuple(name for name in names if name != OUT), OUT in names)
