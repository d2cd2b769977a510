"""Public submodules can be imported by their names, and hold what the face shows."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import slotgraph
from slotgraph.errors import SlotGraphError

FILES = {info.name for info in pkgutil.iter_modules(slotgraph.__path__) if not info.ispkg} - {"__main__"}
MODULES = sorted(FILES - {"errors", "standard", "testing"})


def subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    """All subclasses of a class that slotgraph defines and calls errors."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("slotgraph.") and one.__name__.endswith(("Error", "Errors")):
            yield one
        yield from subclasses(one)


def test_the_face_is_small() -> None:
    """What most programs need, and the modules beside it without a further import."""
    assert len(slotgraph.__all__) <= 24
    for name in ("errors", "standard"):
        assert importlib.import_module(f"slotgraph.{name}") is getattr(slotgraph, name)


@pytest.mark.parametrize("name", MODULES)
def test_every_submodule_shows_what_it_says(name: str) -> None:
    """And nothing that another one, or the face, shows too."""
    module = importlib.import_module(f"slotgraph.{name}")
    shown = set(module.__all__)
    assert {one for one in vars(module) if one.isidentifier() and not one.startswith("_")} == shown
    others = [set(importlib.import_module(f"slotgraph.{one}").__all__) for one in MODULES if one != name]
    assert shown.isdisjoint(set(slotgraph.__all__).union(*others))


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
    inner = vars(importlib.import_module("slotgraph.runners.standard.declarations"))
    classes = {name: one for name, one in inner.items() if isinstance(one, type) and issubclass(one, slotgraph.Inputs)}
    del classes["Inputs"]
    assert len(classes) > 20
    assert {name: getattr(standard, name, None) for name in classes} == classes
