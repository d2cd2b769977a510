"""Finding a declaration or a runner by `MODULE:NAME`, or `file.py:NAME`, with the nearest name if there is none."""

import importlib
import inspect
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

import typer

from ...dataflow.errors import SlotGraphError, place_of
from ...dataflow.inputs import Inputs
from ..graph_runner import GraphRunner
from ..runner import Runner
from .screen import fail, nearest


def find_explained(target: str) -> type[Inputs] | Runner[Any]:
    """The declaration class of a target, or else a runner, as `find_runner` finds it."""

    def is_wanted(value: Any) -> bool:
        declared = isinstance(value, type) and issubclass(value, Inputs) and value is not Inputs
        return declared or isinstance(value, Runner)

    found: type[Inputs] | Runner[Any] = _found(
        target, "MODULE:NAME", "no subclass of slotgraph.Inputs, nor a runner", is_wanted
    )
    return found


def find_runner(target: str, **given: Any) -> Runner[Any]:
    """The runner of a target, an attribute that is one or a function without required arguments that makes one.

    Modules of the current directory are found. Exits with 2 if there is no such module or runner, with 1 if the module
    fails to import, or the function to make a runner.

    Args:
        target: The module and the name.
        given: What such a function is called with, if it takes arguments of these names.
    """
    why = "no runner, nor a function without required arguments that makes one"
    found: Runner[Any] = _found(target, "MODULE:RUNNER", why, lambda value: isinstance(value, Runner), **given)
    return found


def find_batches(target: str, name: str) -> Any:
    """What a runner's module has under a name, to check it with: several batches, or a function that makes one."""

    def is_wanted(value: Any) -> bool:
        if inspect.isroutine(value):
            return _arguments(value, 1, None) is not None
        return callable(value) or (isinstance(value, Iterable) and not isinstance(value, str))

    why = "no batches: name several, or a function of two arguments, rows and a torch.Generator"
    return _found(f"{target.rpartition(':')[0] or target}:{name}", "--batches", why, is_wanted)


def captured(runner: Runner[Any]) -> Runner[Any]:
    """The runner with its graphs captured, if it has any and they are not. CaptureError as `capture` raises it."""
    if isinstance(runner, GraphRunner) and runner.report is None:
        runner.capture()
    return runner


def _found(target: str, hint: str, why: str, is_wanted: Callable[[Any], bool], **given: Any) -> Any:
    """What a target names, or what the function makes that it names. hint: the argument that is wrong if it is none."""
    place, colon, name = target.rpartition(":")
    place = place if colon else name
    try:
        value: Any = _module(place)
        module: ModuleType = value
        for part in name.split("."):
            value = getattr(value, part, None)
        arguments = None if isinstance(value, type) or is_wanted(value) else _arguments(value, **given)
        if arguments is not None:
            value = _made(f"{place}:{name}", value, arguments)
            if not is_wanted(value):
                _unknown(f"{name!r} in {place} returned {type(value).__name__}, which is no runner")
        if is_wanted(value):
            return value
        known = [known for known, one in vars(module).items() if is_wanted(one) and not known.startswith("_")]
        near = nearest(name, known) if known else f"; {place} has none"
        if not colon:
            what, such = hint.rpartition(":")[2].lower(), known[0] if known else "make_runner"
            _unknown(f"say which {what}, as in {place}:{such}{near}")
        _unknown(f"{place} has no {name!r}{near}" if value is None else f"{name!r} in {place} is {why}{near}")
    except typer.BadParameter as error:
        error.param_hint = hint
        raise


def _arguments(function: Any, *positional: Any, **given: Any) -> dict[str, Any] | None:
    """The given arguments that a function takes. None if it cannot be called with them and the positional ones."""
    try:
        signature = inspect.signature(function)
        found = {name: given[name] for name in signature.parameters if name in given}
        signature.bind(*positional, **found)
    except (TypeError, ValueError):
        return None
    return found


def _made(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        return function(**arguments)
    except SlotGraphError:
        raise
    except Exception as error:  # noqa: BLE001 - what a user's function raises can be anything
        fail(f"{name} failed to make a runner: {type(error).__name__}: {error}{place_of(error)}")


def _module(place: str) -> ModuleType:
    """A module by its name, or by its file, whose folder is searched first."""
    file = pathlib.Path(place).resolve()
    is_file = file.suffix == ".py"
    folder, name = (file.parent, file.stem) if is_file else (pathlib.Path.cwd(), place)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if is_file and not file.is_file():
        files = (one.name for one in folder.glob("*.py") if one.is_file())
        _unknown(f"there is no file {place!r}{nearest(file.name, files)}")
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name)
    except SlotGraphError:
        raise
    except Exception as error:  # noqa: BLE001 - what a user's module raises can be anything
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{name}.".startswith(f"{missing}."):
            parent, _, last = missing.rpartition(".")
            folders = getattr(sys.modules[parent], "__path__", ()) if parent else [str(folder)]
            of = "" if missing == name else f", which {name!r} is in"
            near = nearest(last, (known.name for known in pkgutil.iter_modules(folders)))
            _unknown(f"there is no module {missing!r}{of}{near}")
        fail(f"{place} cannot be imported: {type(error).__name__}: {error}{place_of(error)}")
    if is_file and module.__file__ != str(file):
        _unknown(f"{place!r} has the name of another module, {module.__file__}: rename the file")
    return module


def _unknown(message: str) -> NoReturn:
    raise typer.BadParameter(message)
