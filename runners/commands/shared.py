"""What commands share: how they find a user's runner, where they print to, and how they fail."""

import contextlib
import importlib
import inspect
import json
import operator
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Final, Literal, NoReturn

import typer
from rich.console import Console, RenderableType

from ...dataflow.errors import ConfigError, DeclarationErrors, SlotGraphError, did_you_mean, place_of
from ...dataflow.inputs import Inputs
from ..decode import GraphRunner
from ..explained.pages import WIDE
from ..runner import Runner
from ..serial import to_data

FAILED: Final = 1
"""A check failed, or a backend cannot run here. What was not understood exits with 2, as typer has it."""


Form = Literal["table", "json"]
FormOption = Annotated[Form, typer.Option("--format", help="Tables, or JSON for scripts.")]


OutputOption = Annotated[
    typer.FileTextWrite | None,
    typer.Option("--output", metavar="FILE", encoding="utf-8", help="Write it to this file, not to the screen."),
]


def screen(least: int = 0, output: typer.FileTextWrite | None = None) -> Console:
    """Standard output or a file: as wide as the terminal or as COLUMNS says, else wide. least: its columns."""
    console = Console(highlight=False, file=output)
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = WIDE
    console.width = max(console.width, least)
    return console


def as_json(data: Any) -> str:
    """Records as JSON that any parser reads."""
    return json.dumps(to_data(data), indent=2, allow_nan=False) + "\n"


def show(form: Form, data: Any, *shown: RenderableType) -> None:
    """Print data as JSON, or what shows it."""
    if form == "json":
        typer.echo(as_json(data), nl=False)
    else:
        screen().print(*shown, sep="\n")


def fail(*lines: str) -> NoReturn:
    """Print lines to stderr and exit with the status of a failed check."""
    typer.echo("\n".join(lines), err=True)
    raise typer.Exit(FAILED)


def refuse(message: str, option: str | None = None) -> NoReturn:
    """Say what was not understood, and of which option, and exit with 2."""
    raise typer.BadParameter(message, param_hint=option)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Turn errors into lines on stderr, a user's own with their place; code that ends the process is a failure, too."""
    try:
        yield
    except (typer.BadParameter, typer.Exit):  # the command's own, which say all there is to say
        raise
    except DeclarationErrors as group:
        fail(f"{group.message}:", *(f"  {error}" for error in group.exceptions))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except SlotGraphError as error:
        fail(f"{type(error).__name__}: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a user's module raises can be anything
        what = f"it ended the process with {error.code!r}" if isinstance(error, SystemExit) else str(error)
        fail(f"{type(error).__name__}{place_of(error)}: {what}")


def is_explained(value: Any) -> bool:
    """Whether a value can be explained: a runner, or the class of a declaration."""
    is_class = isinstance(value, type) and issubclass(value, Inputs) and value is not Inputs
    return is_class or isinstance(value, Runner)


def are_batches(value: Any) -> bool:
    """Whether a value may be what a runner is checked with: several batches, or a function that makes one."""
    return callable(value) or (isinstance(value, Iterable) and not isinstance(value, str))


RUNNER: Final = "no runner, nor a function without required arguments that makes one"


def find(
    target: str,
    is_wanted: Callable[[Any], bool] = lambda value: isinstance(value, Runner),
    why: str = RUNNER,
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """What a target, `module:name` or `file.py:name`, names, or the function that it names makes. Exits with 2 else.

    is_wanted: whether a value is looked for. why: what others are. given: for a function that takes such arguments.
    """
    place, colon, name = target.rpartition(":")
    module: Any = _module(place if colon else name)
    known = [known for known, one in vars(module).items() if is_wanted(one) and not known.startswith("_")]
    if not colon:
        there = f"; there are: {', '.join(sorted(known))}" if known else ""
        refuse(f"say which one, as in {name}:{next(iter(known), 'make_runner')}{there}")
    try:
        value = operator.attrgetter(name)(module)
    except AttributeError:
        refuse(f"{place} has no {name!r}{did_you_mean(name, known)}")
    if is_wanted(value):
        return value
    arguments = None if isinstance(value, type) else _arguments(value, given)
    if arguments is None:
        refuse(f"{name!r} in {place} is {why}")
    made = value(**arguments)
    if not is_wanted(made):
        refuse(f"{name!r} in {place} returned {type(made).__name__}, which is {why}")
    return made


def captured(runner: Runner[Any]) -> Runner[Any]:
    """The runner with its graphs captured, if it has any and they are not. CaptureError as `capture` raises it."""
    if isinstance(runner, GraphRunner) and runner.report is None:
        runner.capture()
    return runner


def _arguments(function: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The given arguments that a function takes. None if it cannot be called with them."""
    try:
        signature = inspect.signature(function)
        found = {name: given[name] for name in signature.parameters if name in given}
        signature.bind(**found)
    except (TypeError, ValueError):
        return None
    return found


def _module(place: str) -> ModuleType:
    """A module by its name, or by its file, whose folder is searched first."""
    file = pathlib.Path(place).resolve()
    is_file = file.suffix == ".py"
    folder, name = (file.parent, file.stem) if is_file else (pathlib.Path.cwd(), place)
    if is_file and not file.is_file():
        refuse(f"there is no file {place!r}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            refuse(f"there is no module {error.name!r}")
        raise
    if is_file and module.__file__ != str(file):
        refuse(f"{place!r} has the name of another module, {module.__file__}: rename the file")
    return module
