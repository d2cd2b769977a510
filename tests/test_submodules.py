"""Public submodules can be imported by their names, and hold what the face shows."""

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import slotgraph
from slotgraph import SlotGraphError

MODULES = [name for name in slotgraph.__all__ if isinstance(getattr(slotgraph, name), ModuleType)]
FILES = {info.name for info in pkgutil.iter_modules(slotgraph.__path__) if not info.ispkg} - {"__main__"}


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    """All subclasses of a class that slotgraph defines and calls errors."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("slotgraph.") and one.__name__.endswith(("Error", "Errors")):
            yield one
        yield from subclasses(one)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_face_is_a_module(name: str) -> None:
    """`import slotgraph.errors` gives what `slotgraph.errors` is, for every module that the face shows."""
    assert importlib.import_module(f"slotgraph.{name}") is getattr(slotgraph, name)


def test_every_submodule_is_on_the_face() -> None:
    """But for `slotgraph.testing`, which needs hypothesis."""
    assert {*MODULES, "testing"} == FILES


def test_errors_has_every_error() -> None:
    """Each error that slotgraph raises can be imported from `slotgraph.errors`."""
    errors = importlib.import_module("slotgraph.errors")
    every: list[type[Exception]] = [SlotGraphError, *subclasses(SlotGraphError)]
    found = {one.__name__: one for one in every}
    assert len(found) > 10
    assert {name: getattr(errors, name, None) for name in found} == found


def test_standard_has_every_declaration() -> None:
    """`from slotgraph.standard import DecodeInputs` gives the class that declarations are built on."""
    standard = importlib.import_module("slotgraph.standard")
    inner = importlib.import_module("slotgraph.runners.standard")
    assert {name: getattr(standard, name, None) for name in inner.__all__} == {
        name: getattr(inner, name) for name in inner.__all__
    }
