"""Runs the commands and shows their results. Their options and help are in slotgraph_cli.py, which needs no torch."""

import contextlib
import functools
import importlib
import inspect
import json
import operator
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Final, NoReturn, TypeVar

import typer
from rich.console import Console
from torch import nn

from ...backends import choose, load, names
from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis
from ...dataflow.capabilities import AUTO, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import (
    CaptureError,
    ConfigError,
    RecordingError,
    SlotGraphError,
    did_you_mean,
    place_of,
)
from ...dataflow.inputs import Inputs
from ...dataflow.plan import Pattern
from ...dataflow.shown import Shown, Table, html, printable
from ..check.checks import check as check_runner
from ..decode import CapturingRunner
from ..engine.runner import Runner
from ..explained.declared import Explanation, Extents, explain_declaration, mermaid
from ..explained.explanation import RunnerExplanation
from ..explained.explanation import explain as explain_runner
from ..explained.pages import Page
from ..modes import ModeRunner
from ..recording.records import RecordedFile
from ..recording.replaying import RecordedRanks, replay_file, tables_of
from ..serial import to_data
from ..suggested import suggest as suggested
from ..testing.bench import bench as measure_inputs
from .demo import show as show_demo

FAILED: Final = 1  # a check failed, or a backend cannot run; typer exits with 2 for arguments it rejects
_WIDE: Final = 1000
"""Columns in a pipe or file, where nothing must fit a screen, and a folded name could not be searched for."""
_NEITHER: Final = "not a subclass of slotgraph.Inputs, nor a runner"
_SIZE: Final = re.compile(r"(\w+)=(\d+)(?:/(\d+))?")
R = TypeVar("R")
Result = tuple[Any, Shown, bool]
"""The result of a command: as data, as tables, and whether all is well."""


def run(command: Callable[..., Result], form: str, output: pathlib.Path | None, **given: Any) -> None:
    """Run a command, and print its result, or write it to a file. Exit with 1 if it failed."""
    with reported():
        data, shown, is_well = command(**given)
    if form == "json":
        text = json.dumps(to_data(data), indent=2, allow_nan=False) + "\n"
    elif form == "html":
        text = html(shown)
    elif form == "mermaid":
        one = next(iter(data.values())) if isinstance(data, dict) else data  # modes have one declaration
        text = mermaid(one if isinstance(one, Explanation) else one.declaration)
    else:
        width = shutil.get_terminal_size((_WIDE, 0)).columns
        bold = functools.partial(typer.style, bold=True)
        text = shown.text(width, bold)
    _write(text, output)
    if not is_well:
        raise typer.Exit(FAILED)


def _write(text: str, output: pathlib.Path | None) -> None:
    """Print a text, or write it to a file."""
    with contextlib.nullcontext() if output is None else output.open("w", encoding="utf-8") as file:
        typer.echo(text, file, nl=False)


def exit_refused(message: str, option: str | None = None) -> NoReturn:
    """Print which option was not understood and why, and exit with 2."""
    raise typer.BadParameter(message, param_hint=option)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Print errors as lines on stderr. For errors of the user's code, add the file and line.

    Code that ends the process counts as a failure.
    """
    try:
        yield
    except (typer.BadParameter, typer.Exit):  # the command's own errors are complete
        raise
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
        place = "" if isinstance(error, SlotGraphError) else place_of(error)
        what = f"it ended the process with {error.code!r}" if isinstance(error, SystemExit) else str(error)
        told = f"{type(error).__name__}{place}: {what}"
    else:
        return
    typer.echo(told, err=True)
    raise typer.Exit(FAILED)


def find(
    target: str,
    is_wanted: Callable[[Any], bool] = lambda value: isinstance(value, Runner),
    why: str = "not a runner, nor a function without required arguments that makes one",
    given: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Return the value that a target, `module:name` or `file.py:name`, names. If it is a function, call it.

    Exit with 2 if there is no such value.

    Args:
        target: The target.
        is_wanted: Whether a value is of the right kind.
        why: Why other values are refused, for the error.
        given: Arguments for a function that takes them.
    """
    place, colon, name = target.rpartition(":")
    if not name or (colon and not place):
        exit_refused(
            "expected MODULE:NAME, a module or a .py file and a name in it, as in my_engine.runners:decode or "
            f"engine.py:make, got {target!r}"
        )
    module: Any = _module(place if colon else name)
    known = [known for known, one in vars(module).items() if is_wanted(one) and not known.startswith("_")]
    if not colon:
        there = f"; there are: {', '.join(sorted(known))}" if known else ""
        exit_refused(f"say which one, as in {name}:{next(iter(known), 'make_runner')}{there}")
    try:
        value = operator.attrgetter(name)(module)
    except AttributeError:
        exit_refused(f"{place} has no {name!r}{did_you_mean(name, known)}")
    if is_wanted(value):
        return value
    arguments = None if isinstance(value, type | nn.Module) else _arguments(value, given)
    if arguments is None:
        exit_refused(f"{name!r} in {place} is {why}")
    made = value(**arguments)
    if not is_wanted(made):
        exit_refused(f"{name!r} in {place} returned {type(made).__name__}, which is {why}")
    return made


def captured(runner: R) -> R:
    """Return the runner, after a capture if it captures graphs and has none. Raise CaptureError as `capture` does."""
    if isinstance(runner, CapturingRunner) and runner.report is None:
        runner.capture()
    if isinstance(runner, ModeRunner) and not any(runner.report.values()):
        runner.capture()
    return runner


def _arguments(function: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the given arguments that a function takes, or None if it cannot be called with them."""
    try:
        signature = inspect.signature(function)
        found = {name: given[name] for name in signature.parameters if name in given}
        signature.bind(**found)
    except (TypeError, ValueError):
        return None
    return found


def _module(place: str) -> ModuleType:
    """Import a module by its name, or by its file, whose folder is searched first."""
    file = pathlib.Path(place).resolve()
    is_file = file.suffix == ".py"
    folder, name = (file.parent, file.stem) if is_file else (pathlib.Path.cwd(), place)
    if is_file and not file.is_file():
        exit_refused(f"there is no file {place!r}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            exit_refused(f"there is no module {error.name!r}")
        raise
    if is_file and module.__file__ != str(file):
        exit_refused(f"{place!r} has the name of another module, {module.__file__}: rename the file")
    return module


def _is_explained(value: Any) -> bool:
    """Return whether a value is a runner, or a class of a user's inputs."""
    return isinstance(value, Runner) or (isinstance(value, type) and issubclass(value, Inputs) and value is not Inputs)


def _refuse_own(**options: object) -> None:
    """Refuse options for a declaration that were given for a runner."""
    for option in filter(options.get, options):
        exit_refused("is for a declaration; a runner has its own: leave it out", f"--{option}")


def _batches(target: str | None, name: str | None) -> Any:
    """Return the value that `--batches` names in a target's module, or None without the option."""
    if name is None:
        return None
    if target is None:
        exit_refused("is for a target: name one", "--batches")
    return find(
        f"{target.rpartition(':')[0] or target}:{name}",
        lambda value: callable(value) or (isinstance(value, Iterable) and not isinstance(value, str)),
        "no batches: name several, or a function of two arguments, rows and a torch.Generator",
    )


def explain(
    target: str,
    *,
    size: Sequence[str] | None,
    setting: Sequence[str] | None,
    absent: Sequence[str] | None,
    backend: str,
    lowering: str,
    capture: bool,
) -> Result:
    """Explain a declaration or a runner."""
    found: Explanation | RunnerExplanation
    named = find(target, lambda value: _is_explained(value) or isinstance(value, ModeRunner), _NEITHER)
    if isinstance(named, Runner | ModeRunner):
        _refuse_own(size=size, set=setting, absent=absent, backend=backend != AUTO, lowering=lowering != AUTO)
        if capture:
            try:
                captured(named)
            except CaptureError as error:  # the explanation says why, by bucket
                typer.echo(str(error), err=True)
        if isinstance(named, ModeRunner):
            return {mode: explain_runner(one) for mode, one in named.modes.items()}, explain_runner(named), True
        found = explain_runner(named)
    else:
        declared = named.slotgraph
        on = choose(backend)
        declared = declared.under(_settings_of(setting)) if setting else declared
        extents = _extents_of(size or (), declared)
        how = chosen_lowering(on.capabilities, lowering)
        found = explain_declaration(declared, on.capabilities, on.name, extents, Pattern(absent or ()), how)
    return found, found, True


def _extents_of(texts: Sequence[str], declaration: Declaration) -> Extents:
    """Return live and padded sizes of texts such as `batch=37/48` and `hidden=64`.

    A request has one token by default.
    """
    extents: dict[Axis, tuple[int, int]] = {}
    extra = [BATCH] if TOKENS in declaration.axes else []  # TOKENS may depend on it
    axes = {axis.name.lower(): axis for axis in (*declaration.axes, *extra)}
    for text in texts:
        match = _SIZE.fullmatch(text)
        if match is None:
            exit_refused(f"expected AXIS=LIVE/PADDED or AXIS=SIZE, as in batch=37/48, got {text!r}", "--size")
        name, live, padded = match.groups()
        axis = axes.get(name.lower())
        if axis is None:
            exit_refused(f"{declaration.name} has no axis {name!r}{did_you_mean(name.lower(), axes)}", "--size")
        if axis in extents:
            exit_refused(f"{axis.name} is given twice", "--size")
        extents[axis] = (int(live), int(padded or live))
    usual = {TOKENS: extents.get(BATCH), WIDTH: (1, 1) if extents else None}
    return {**extents, **{a: both for a, both in usual.items() if both and a in declaration.axes and a not in extents}}


def _settings_of(texts: Sequence[str]) -> object:
    """Return settings of texts such as `swa`, `swa=false` and `attention.window=128`."""
    settings: dict[str, Any] = {}
    for text in texts:
        path, _, value = text.partition("=")
        *outer, last = path.split(".")
        if not all(part.isidentifier() for part in (*outer, last)):
            exit_refused(f"expected NAME or NAME=VALUE, as in attention.window=128, got {text!r}", "--set")
        holder = settings
        for part in outer:
            holder = holder.setdefault(part, {})
        try:  # a number, true or false if it reads as one, else the text
            holder[last] = json.loads(value.lower() if value.lower() in ("true", "false") else value or "true")
        except ValueError:
            holder[last] = value
    return settings


def backends() -> Result:
    """List the backends."""
    found = [_facts_of(name) for name in names()]
    able = {facts["name"]: facts["capabilities"] for facts in found if facts["capabilities"] is not None}
    fields: dict[str, Any] = next(iter(able.values()), {})
    facts = [{"capability": one, **{name: data[one] for name, data in able.items()}} for one in fields]
    shown = [{key: value for key, value in one.items() if key != "capabilities"} for one in found]
    return found, Page([Table("backends", shown), *([Table("capabilities", facts)] if facts else ())]), True


def _facts_of(name: str) -> dict[str, Any]:
    """Return facts about one backend. If it cannot be loaded, they include the error."""
    facts = {"name": name, "available": False, "device": None, "reason": "", "capabilities": None}
    try:
        available = load(name).is_available()
        facts["reason"] = available.reason
        if available:
            backend = load(name)()
            facts |= {"available": True, "device": str(backend.device), "capabilities": to_data(backend.capabilities)}
    except Exception as error:  # noqa: BLE001 - a plug-in may raise anything, and is reported, not hidden
        facts["reason"] = f"{type(error).__name__}: {error}"
    return facts


def bench(
    target: str | None,
    *,
    batches: str | None,
    size: Sequence[str] | None,
    setting: Sequence[str] | None,
    backend: str,
    slots: Iterable[int],
    quick: bool,
) -> Result:
    """Measure a runner, a declaration, or built-in decode steps."""
    named = None
    options = dict[str, Any]()
    if target is not None:
        named = find(target, _is_explained, _NEITHER)
        if isinstance(named, Runner):
            _refuse_own(size=size, set=setting, backend=backend != AUTO)
        else:
            extents = _extents_of(size or (), named.slotgraph)
            padded = {axis: most for axis, (_, most) in extents.items() if axis not in (TOKENS, WIDTH)}
            options = {"settings": _settings_of(setting) if setting else None}
            options |= {"buckets": [padded.pop(BATCH)]} if BATCH in padded else {}
            options |= {"sizes": padded}
    with Console(stderr=True).status("measuring"):
        found = measure_inputs(named, _batches(target, batches), slots=slots, quick=quick, backend=backend, **options)
    return found, found, True


def demo(backend: str) -> None:
    """Show a fault of handwritten fills, and how declared inputs avoid it."""
    with reported():
        show_demo(choose(backend), Console(highlight=False))


def suggest(target: str, name: str, output: pathlib.Path | None) -> None:
    """Write a declaration to start from, for sample batches."""
    with reported():
        why = "no batches: name several, or a function without arguments that returns them"
        source = suggested(find(target, lambda value: isinstance(value, list | tuple), why), name)
    _write(source, output)


def check(
    target: str,
    *,
    batches: str | None,
    only: Sequence[str] | None,
    read_outside: Sequence[str] | None,
    random: bool,
    rounds: int,
    seed: int,
) -> Result:
    """Check a runner. The command fails if something was found."""
    runner = captured(find(target, lambda value: isinstance(value, Runner | ModeRunner)))
    given = _batches(target, batches)
    options: dict[str, Any] = {"only": only or (), "read_outside": read_outside or (), "random": random}
    report = check_runner(runner, given, rounds=rounds, seed=seed, **options)
    return report.as_data(), report, report.ok


def replay(file: pathlib.Path, target: str | None, step: int | None) -> Result:
    """Run recorded steps again, or show the contents of the file. The command fails if a step differs or raises."""
    try:
        read = RecordedFile.read(file)
        if target is not None:
            given = {} if read.runner.ranks is None else {"ranks": RecordedRanks(read.runner.ranks)}
            report = replay_file(read, captured(find(target, given=given)), step)
            return report, report, report.ok
        found = read if step is None else read.only(step)[0]
    except RecordingError as error:
        exit_refused(printable(str(error)))
    return found, Page([*tables_of(found)]), True
