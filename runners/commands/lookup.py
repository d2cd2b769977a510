"""Finding a declaration or a runner by `MODULE:NAME`, or `file.py:NAME`, with the nearest name where there is none."""

import contextlib
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple, NoReturn

import typer

from ...dataflow.errors import SlotGraphError, place_of
from ...dataflow.inputs import Inputs
from ..graph_runner import GraphRunner
from ..runner import Runner
from .failures import fail, nearest

_NOTHING: Final[Mapping[str, Any]] = {}


class _Named(NamedTuple):
    """A target's module, the two parts of its text, and what is there, or None."""

    module: ModuleType
    place: str
    name: str
    value: Any


def find_explained(target: str) -> type[Inputs] | Runner[Any]:
    """The declaration class of a target, or else a runner, as `find_runner` finds it.

    Modules of the current directory are found. Exits with 2 where there is no such module or name, with 1 where the
    module fails to import, or a function to make a runner.
    """

    def is_declaration(value: object) -> bool:
        return isinstance(value, type) and issubclass(value, Inputs) and value is not Inputs

    with _about("MODULE:NAME"):
        found = _named(target)
        if is_declaration(found.value):
            declaration: type[Inputs] = found.value
            return declaration
        if not (isinstance(found.value, Runner) or _makes(found.value)):
            why = "is no subclass of slotgraph.Inputs, nor a runner"
            _refuse(found, lambda value: is_declaration(value) or isinstance(value, Runner), "one", why)
        return _runner_of(found)


def find_runner(target: str, **given: Any) -> Runner[Any]:
    """The runner of a target, an attribute that is one or a function without required arguments that makes one.

    given: what such a function is called with, where it takes arguments of these names. The runner is as the module
    left it: `captured` sees to its graphs. Exits with 2 where there is no such module or runner,
    with 1 where the module fails to import, or the function to make a runner.
    """
    with _about("MODULE:RUNNER"):
        return _runner_of(_named(target), given)


def find_batches(target: str, name: str) -> Any:
    """What a runner's module has under a name, to check it with: several batches, or a function that makes one.

    Exits with 2 where there is no such thing.
    """
    place = target.rpartition(":")[0] or target
    with _about("--batches"):
        # A file that was loaded before is not run again: that would make other classes.
        loaded = [one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == place]
        module = loaded[-1] if loaded else _module(place)
        found = getattr(module, name, None)
        if not (callable(found) or (isinstance(found, Iterable) and not isinstance(found, str))):
            why = "is no batches: name several, or a function of rows and a generator"
            _refuse(_Named(module, place, name, found), inspect.isfunction, "batches", why)
        if callable(found) and not _takes(found, 1, None):
            _unknown(f"{name!r} in {place} takes other arguments than two, rows and a torch.Generator")
        return found


def captured(runner: Runner[Any]) -> Runner[Any]:
    """The runner with its graphs captured, if it has any and they are not. CaptureError as `capture` raises it."""
    if isinstance(runner, GraphRunner) and runner.report is None:
        runner.capture()
    return runner


@contextlib.contextmanager
def _about(argument: str) -> Iterator[None]:
    """What is not understood in the block is this argument of a command."""
    try:
        yield
    except typer.BadParameter as error:
        error.param_hint = argument
        raise


def _named(target: str) -> _Named:
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, ""
    module = _module(place)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return _Named(module, place, name, found)


def _runner_of(found: _Named, given: Mapping[str, Any] = _NOTHING) -> Runner[Any]:
    """What was found as a runner, or the one that it makes."""
    _, place, name, value = found
    if isinstance(value, Runner):
        return value
    if not _makes(value, given):
        why = "is no runner, nor a function without required arguments that makes one"
        _refuse(found, lambda one: isinstance(one, Runner), "runner", why)
    try:
        made = value(**{one: given[one] for one in inspect.signature(value).parameters if one in given})
    except Exception as error:  # noqa: BLE001 - what a user's function raises can be anything
        _broken(f"{place}:{name}", error, "failed to make a runner")
    if not isinstance(made, Runner):
        _unknown(f"{name!r} in {place} returned {type(made).__name__}, which is no runner")
    return made


def _makes(found: object, given: Mapping[str, Any] = _NOTHING) -> bool:
    """Whether it is a function that can be called without arguments, but for those that are given."""
    if not callable(found) or isinstance(found, type):
        return False
    try:
        parameters = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return False
    return _takes(found, **{name: given[name] for name in parameters if name in given})


def _takes(function: Callable[..., Any], *arguments: Any, **named: Any) -> bool:
    """Whether a function can be called with such arguments, as far as it tells."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    except ValueError:  # it does not tell
        return True
    return True


def _refuse(found: _Named, is_wanted: Callable[[Any], bool], what: str, why: str) -> NoReturn:
    """Say that a name is none of those that are wanted, and the nearest of them that the module has."""
    module, place, name, value = found
    known = [known for known, one in vars(module).items() if is_wanted(one)]
    near = nearest(name, known) if known else f"; {place} has none"
    if not name:
        _unknown(f"say which {what}, as in {place}:{known[0] if known else 'make_runner'}{near}")
    _unknown(f"{place} has no {name!r}{near}" if value is None else f"{name!r} in {place} {why}{near}")


def _module(place: str) -> ModuleType:
    path = pathlib.Path(place)
    return _from_file(path) if place.endswith(".py") else _from_name(place)


def _from_name(name: str) -> ModuleType:
    _look_in(pathlib.Path.cwd())
    if not all(part.isidentifier() for part in name.split(".")):
        _unknown(f"expected a module's name or a .py file before the colon, got {name!r}")
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - what a user's module raises can be anything
        missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
        if missing and f"{name}.".startswith(f"{missing}."):
            _no_module(name, missing)
        _broken(name, error)


def _from_file(path: pathlib.Path) -> ModuleType:
    if not path.is_file():
        beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
        _unknown(f"there is no file {str(path)!r}{nearest(path.name, (one.name for one in beside if one.is_file()))}")
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
    of = "" if missing == name else f", which {name!r} is in"
    _unknown(f"there is no module {missing!r}{of}{near}")


def _broken(name: str, error: Exception, what: str = "cannot be imported") -> NoReturn:
    """A user's module or function that raises: the library's own faults as ever, others with the place that raised."""
    if isinstance(error, SlotGraphError):
        raise error
    fail(f"{name} {what}: {type(error).__name__}: {error}{place_of(error)}")


def _unknown(message: str) -> NoReturn:
    raise typer.BadParameter(message)
