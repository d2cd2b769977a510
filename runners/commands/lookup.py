"""Finding a declaration by `MODULE:CLASS`, or `file.py:CLASS`, with the nearest name where there is none."""

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

import typer

from ...dataflow.errors import SlotGraphError
from ...dataflow.inputs import Inputs
from .failures import fail, nearest

_HINT = "MODULE:CLASS"


def find_declaration(target: str) -> type[Inputs]:
    """The declaration class of a target; modules of the current directory are found.

    Exits with 2 where there is no such module or class, with 1 where the module fails to import.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, ""
    module = _from_file(pathlib.Path(place)) if place.endswith(".py") else _from_name(place)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Inputs) and found is not Inputs):
        _no_class(module, place, name, found)
    return found


def _no_class(module: ModuleType, place: str, name: str, found: object) -> NoReturn:
    known = [
        n for n, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Inputs) and kind is not Inputs
    ]
    if not known:
        _unknown(f"{place} has no subclass of slotgraph.Inputs")
    if not name:
        _unknown(f"say which class, as in {place}:{known[0]}{nearest('', known)}")
    what = f"{place} has no {name!r}" if found is None else f"{name!r} in {place} is no subclass of slotgraph.Inputs"
    _unknown(f"{what}{nearest(name, known)}")


def _from_name(name: str) -> ModuleType:
    _look_in(pathlib.Path.cwd())
    if not all(part.isidentifier() for part in name.split(".")):
        _unknown(f"expected a module's name or a .py file before the colon, got {name!r}")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            _no_module(name, missing)
        _broken(name, error)
    except Exception as error:  # noqa: BLE001 - what a user's module raises can be anything
        _broken(name, error)


def _from_file(path: pathlib.Path) -> ModuleType:
    if not path.is_file():
        beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
        _unknown(f"there is no file {str(path)!r}{nearest(path.name, (one.name for one in beside))}")
    _look_in(path.parent.resolve())
    name = path.stem if path.stem not in sys.modules else f"_slotgraph_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        _unknown(f"{str(path)!r} cannot be loaded as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # attrs and pickle find a class through its module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # noqa: BLE001 - what a user's module raises can be anything
        del sys.modules[name]
        _broken(str(path), error)
    return module


def _look_in(folder: pathlib.Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _no_module(name: str, missing: str) -> NoReturn:
    parent, _, last = missing.rpartition(".")
    places: Iterable[str] = getattr(sys.modules[parent], "__path__", ()) if parent else [str(pathlib.Path.cwd())]
    near = nearest(last, (module.name for module in pkgutil.iter_modules(list(places))))
    what = (
        f"there is no module {name!r}" if missing == name else f"there is no module {missing!r}, which {name!r} is in"
    )
    _unknown(f"{what}{near}")


def _broken(name: str, error: Exception) -> NoReturn:
    """A module that fails to import: the library's own faults as ever, others with the place that raised."""
    if isinstance(error, SlotGraphError):
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    fail(f"{name} cannot be imported: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})")


def _unknown(message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=_HINT)
