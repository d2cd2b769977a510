"""Finding a declaration or a runner by `MODULE:NAME`, or `file.py:NAME`, with the nearest name where there is none."""

import contextlib
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NoReturn

import typer

from ...dataflow.errors import SlotGraphError
from ...dataflow.inputs import Inputs
from ..runner import GraphRunner, Runner
from .failures import fail, nearest

_NAME: Final = "MODULE:NAME"
_RUNNER: Final = "MODULE:RUNNER"
_NOTHING: Final[Mapping[str, Any]] = {}


def find_explained(target: str) -> type[Inputs] | Runner[Any]:
    """The declaration class of a target, or else a runner, as `find_runner` finds it.

    Modules of the current directory are found. Exits with 2 where there is no such module or name, with 1 where the
    module fails to import, or a function to make a runner.
    """
    with _about(_NAME):
        module, place, name, found = _looked_up(target)
        is_class = isinstance(found, type) and issubclass(found, Inputs) and found is not Inputs
        if not (is_class or isinstance(found, Runner) or _makes(found)):
            _no_class(module, place, name, found)
        explained: type[Inputs] | Runner[Any] = found if is_class else _runner_in(module, place, name, found)
        return explained


def find_runner(target: str, **given: Any) -> Runner[Any]:
    """The runner of a target, an attribute that is one or a function without required arguments that makes one.

    given: what such a function is called with, where it takes arguments of these names. The runner is as the module
    left it: `captured` sees to its graphs. Exits with 2 where there is no such module or runner,
    with 1 where the module fails to import, or the function to make a runner.
    """
    with _about(_RUNNER):
        return _runner_in(*_looked_up(target), given)


def _runner_in(
    module: ModuleType, place: str, name: str, found: Any, given: Mapping[str, Any] = _NOTHING
) -> Runner[Any]:
    """What was found as a runner, or the one that it makes."""
    if isinstance(found, Runner):
        return found
    if not _makes(found, given):
        _no_runner(module, place, name, found)
    try:
        made = found(**{one: given[one] for one in inspect.signature(found).parameters if one in given})
    except Exception as error:  # noqa: BLE001 - what a user's function raises can be anything
        _broken(f"{place}:{name}", error, "failed to make a runner")
    if not isinstance(made, Runner):
        _unknown(f"{name!r} in {place} returned {type(made).__name__}, which is no runner")
    return made


def find_batches(target: str, name: str) -> Any:
    """What a runner's module has under a name, to check it with: several batches, or a function that makes one.

    Exits with 2 where there is no such thing.
    """
    place = target.rpartition(":")[0] or target
    with _about("--batches"):
        module = _loaded(place) or _module(place)
        found = getattr(module, name, None)
        if not (callable(found) or (isinstance(found, Iterable) and not isinstance(found, str))):
            what = f"{place} has no {name!r}" if found is None else f"{name!r} in {place} is no batches"
            known = [one for one, value in vars(module).items() if inspect.isfunction(value)]
            _unknown(f"{what}: name several batches, or a function of rows and a generator{_near(name, known)}")
        if callable(found) and not _takes_two(found):
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


def _looked_up(target: str) -> tuple[ModuleType, str, str, Any]:
    """A target's module, the two parts of its text, and what is there, or None."""
    place, colon, name = target.rpartition(":")
    if not colon:
        place, name = target, ""
    module = _module(place)
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return module, place, name, found


def _module(place: str) -> ModuleType:
    return _from_file(pathlib.Path(place)) if place.endswith(".py") else _from_name(place)


def _loaded(place: str) -> ModuleType | None:
    """The module of a file that was loaded before: to run it again would make other classes."""
    modules = reversed(list(sys.modules.values()))
    return next((module for module in modules if getattr(module, "__file__", None) == place), None)


def _makes(found: object, given: Collection[str] = ()) -> bool:
    """Whether it is a function that can be called without arguments, but for those that are given."""
    if not callable(found) or isinstance(found, type):
        return False
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic or p.name in given for p in parameters)


def _takes_two(found: Callable[..., Any]) -> bool:
    """Whether a function can be called with two arguments, as far as it tells."""
    try:
        inspect.signature(found).bind(1, None)
    except TypeError:
        return False
    except ValueError:  # it does not tell
        return True
    return True


def _no_runner(module: ModuleType, place: str, name: str, found: object) -> NoReturn:
    known = [n for n, value in vars(module).items() if isinstance(value, Runner)]
    if not name:
        _unknown(f"say which runner, as in {place}:{known[0] if known else 'make_runner'}{_near('', known)}")
    if found is None:
        _unknown(f"{place} has no {name!r}{_near(name, known)}")
    wanted = "is no runner, nor a function without required arguments that makes one"
    _unknown(f"{name!r} in {place} {wanted}{_near(name, known)}")


def _near(name: str, known: list[str]) -> str:
    return nearest(name, known) if known else ""


def _no_class(module: ModuleType, place: str, name: str, found: object) -> NoReturn:
    known = [
        n for n, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Inputs) and kind is not Inputs
    ]
    known += [n for n, value in vars(module).items() if isinstance(value, Runner)]
    if not known:
        _unknown(f"{place} has no subclass of slotgraph.Inputs, and no runner")
    if not name:
        _unknown(f"say which one, as in {place}:{known[0]}{nearest('', known)}")
    what = (
        f"{place} has no {name!r}"
        if found is None
        else f"{name!r} in {place} is no subclass of slotgraph.Inputs, nor a runner"
    )
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
    what = (
        f"there is no module {name!r}" if missing == name else f"there is no module {missing!r}, which {name!r} is in"
    )
    _unknown(f"{what}{near}")


def _broken(name: str, error: Exception, what: str = "cannot be imported") -> NoReturn:
    """A user's module or function that raises: the library's own faults as ever, others with the place that raised."""
    if isinstance(error, SlotGraphError):
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    fail(f"{name} {what}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})")


def _unknown(message: str) -> NoReturn:
    raise typer.BadParameter(message)
