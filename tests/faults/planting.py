"""Planting: a fault takes the place of a method, a function or a value of the library, by `unittest.mock.patch`."""

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType
from typing import Any, Final
from unittest import mock

import attrs

Body = Callable[..., Any]


@attrs.frozen(eq=False)
class Fault:
    """One fault.

    Attributes:
        name: Its name.
        promise: What it breaks.
        owner: The class or the module that has what it replaces.
        attribute: The name of that.
        body: What stands there instead. It is given what stood there before, and then the arguments of the call.
        tests: The tests of which one must fail.
    """

    name: str
    promise: str
    owner: Any
    attribute: str
    body: Body
    tests: tuple[str, ...]

    @property
    def seen(self) -> str:
        """Say what it does and what a user would see."""
        return " ".join(str(inspect.getdoc(self.body)).split())

    def plant(self) -> AbstractContextManager[object]:
        """Plant it, and take it back at the end of a block; without a block it stays."""
        old, stack = inspect.getattr_static(self.owner, self.attribute), ExitStack()
        new = _in_the_place_of(old, self.body)
        if isinstance(new, functools.cached_property):
            new.__set_name__(self.owner, self.attribute)
        for place in self._places(old):
            stack.enter_context(mock.patch.object(place, self.attribute, new))
        return stack

    def _places(self, old: Any) -> list[Any]:
        """Find all modules that have imported a function or a value; of a class there is one."""
        if not isinstance(self.owner, ModuleType):
            return [self.owner]
        ours = [module for name, module in [*sys.modules.items()] if name.startswith("slotgraph.")]
        return [module for module in ours if vars(module).get(self.attribute) is old]


def _in_the_place_of(old: Any, body: Body) -> Any:
    """Make what stands in the place of a function, a property or a class; of any other value, what `body` returns."""
    if isinstance(old, property):
        return property(_in_the_place_of(old.fget, body))
    if isinstance(old, functools.cached_property):
        return functools.cached_property(_in_the_place_of(old.func, body))
    if isinstance(old, classmethod | staticmethod):
        return type(old)(_in_the_place_of(old.__func__, body))
    if not callable(old):
        return body(old)

    @functools.wraps(old, updated=())
    def planted(*args: Any, **kwargs: Any) -> Any:
        return body(old, *args, **kwargs)

    return planted


FAULTS: Final[dict[str, Fault]] = {}
"""All faults, by name."""


def fault(promise: str, owner: Any, attribute: str, *tests: str) -> Callable[[Body], Body]:
    """Make a fault of a function, under the function's name with hyphens. tests: paths below tests/."""

    def note(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        FAULTS[name] = Fault(name, promise, owner, attribute, body, tuple(f"tests/{test}" for test in tests))
        return body

    return note
