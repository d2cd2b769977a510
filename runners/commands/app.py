"""The command line: `slotgraph explain`, `backends`, `bench`, `check` and `replay`."""

import contextlib
import importlib.metadata
import inspect
import json
import operator
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Annotated, Any, Final, Literal, NoReturn

import typer
from rich.console import Console, RenderableType

from ...backends import choose, load, names
from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis
from ...dataflow.capabilities import AUTO, LADDER, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import (
    CaptureError,
    ConfigError,
    DeclarationErrors,
    RecordingError,
    SlotGraphError,
    did_you_mean,
    place_of,
)
from ...dataflow.inputs import Inputs
from ...dataflow.plan import Pattern
from ..check.checks import CHECKS
from ..check.checks import check as check_runner
from ..decode import GraphRunner
from ..explained.declared import Explanation, Extents, explain_declaration, mermaid
from ..explained.explanation import RunnerExplanation
from ..explained.explanation import explain as explain_runner
from ..explained.pages import WIDE, Table, html, printable, tables
from ..recording.records import RecordedFile, StepRecord, versions
from ..recording.replaying import RecordedRanks, ReplayReport, replay_file, tables_of
from ..runner import Runner
from ..serial import to_data
from ..testing.timing import THREADS
from .bench import FULL, QUICK, measured_rows, show_rows

FAILED: Final = 1  # a check failed, or a backend cannot run here; what was not understood exits with 2, as typer has it
_SIZE: Final = re.compile(r"(\w+)=(\d+)(?:/(\d+))?")

app = typer.Typer(
    name="slotgraph",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: examples stay as they were written, in a terminal and in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        typer.echo(f"slotgraph {importlib.metadata.version('slotgraph')}")
        raise typer.Exit


@app.callback()
def slotgraph(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

    \b
    Exit status: 0 where all went well, 1 where a check failed or a backend cannot run here, 2 where the command was
    not understood.
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    del version


def main() -> None:
    """Run the command line on this process's arguments."""
    try:
        app()
    except OSError as error:  # of printing: commands tell of all other files themselves
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still to be printed cannot be
        with contextlib.suppress(OSError):
            typer.echo(f"the output cannot be written: {error.strerror or error}", err=True)
        sys.exit(FAILED)


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


def show(form: str, data: Any, *shown: RenderableType) -> None:
    """Print data as JSON, or what shows it."""
    if form == "json":
        typer.echo(as_json(data), nl=False)
    else:
        screen().print(*shown, sep="\n")


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
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except DeclarationErrors as group:
        told = "\n  ".join((f"{group.message}:", *map(str, group.exceptions)))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a user's module raises can be anything
        place = "" if isinstance(error, SlotGraphError) else place_of(error)
        what = f"it ended the process with {error.code!r}" if isinstance(error, SystemExit) else str(error)
        told = f"{type(error).__name__}{place}: {what}"
    else:
        return
    typer.echo(told, err=True)
    raise typer.Exit(FAILED)


def is_explained(value: Any) -> bool:
    """Whether a value can be explained: a runner, or the class of a declaration."""
    is_class = isinstance(value, type) and issubclass(value, Inputs) and value is not Inputs
    return is_class or isinstance(value, Runner)


def are_batches(value: Any) -> bool:
    """Whether a value may be what a runner is checked with: several batches, or a function that makes one."""
    return callable(value) or (isinstance(value, Iterable) and not isinstance(value, str))


def find(
    target: str,
    is_wanted: Callable[[Any], bool] = lambda value: isinstance(value, Runner),
    why: str = "not a runner, nor a function without required arguments that makes one",
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


_Form = Annotated[Literal["table", "json"], typer.Option("--format", help="Tables, or JSON for scripts.")]
_A_RUNNER: Final = "A module or a .py file, and a runner in it, or a function that makes one."
_EXPLAINED: Final = (
    "A declaration's class, or a runner, or a function that makes one: a module or a .py file, and a name."
)
_Sizes = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="AXIS=LIVE/PADDED", help="An axis' size, as in batch=37/48; one number for both."),
]
_Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting that slots with `when=` ask for; no value means true."),
]
_Absent = Annotated[list[str] | None, typer.Option(metavar="SLOT", help="An optional slot that the batch has not.")]
_Lowering = Annotated[
    str, typer.Option(metavar="NAME", help=f"How the plan is run: {', '.join(LADDER)}, or what the backend prefers.")
]
_Backend = Annotated[str, typer.Option(metavar="NAME", help="A backend; see `slotgraph backends`.")]
_Output = Annotated[
    typer.FileTextWrite | None,
    typer.Option("--output", metavar="FILE", encoding="utf-8", help="Write it to this file, not to the screen."),
]
_Capture = Annotated[bool, typer.Option("--capture", help="Capture a runner's graphs first, if they are not.")]
_Format = Annotated[
    Literal["table", "mermaid", "json", "html"],
    typer.Option("--format", help="Tables, a mermaid diagram of the dependencies, JSON, or a runner's page."),
]


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help=_EXPLAINED)],
    *,
    size: _Sizes = None,
    setting: _Settings = None,
    absent: _Absent = None,
    backend: _Backend = AUTO,
    lowering: _Lowering = AUTO,
    capture: _Capture = False,
    form: _Format = "table",
    output: _Output = None,
) -> None:
    """Show a declaration's slots, dependencies and plan; or a runner's, with its buckets, graphs, memory and decisions.

    Without --size only the declaration is shown. Without --set every slot is shown, whatever its `when=` asks for.

    \b
    Examples:
      slotgraph explain my_engine.inputs:DecodeInputs
      slotgraph explain inputs.py:DecodeInputs --size batch=37/48 --size hidden=64 --lowering slot_by_slot
      slotgraph explain inputs.py:DecodeInputs --format mermaid > inputs.mmd
      slotgraph explain my_engine.serving:decode --capture --format html --output decode.html
    """  # noqa: D301 - as above
    of_a_step: dict[str, object] = {"--size": size, "--set": setting, "--absent": absent}
    of_a_step |= {"--backend": backend != AUTO, "--lowering": lowering != AUTO}
    found: Explanation | RunnerExplanation
    with reported():
        named = find(target, is_explained, "not a subclass of slotgraph.Inputs, nor a runner")
        if isinstance(named, Runner):
            for option in (name for name, given in of_a_step.items() if given):
                refuse("is for a declaration; a runner has its own: leave it out", option)
            if capture:
                try:
                    captured(named)
                except CaptureError as error:  # the explanation says why, by bucket
                    typer.echo(str(error), err=True)
            found = explain_runner(named)
        else:
            declared, on = named.slotgraph, choose(backend)
            declared = declared.under(_settings_of(setting)) if setting else declared
            extents, how = _extents_of(size or (), declared), chosen_lowering(on.capabilities, lowering)
            found = explain_declaration(declared, on.capabilities, on.name, extents, Pattern(absent or ()), how)
    if form == "table":
        screen(output=output).print(tables(found))
        return
    if form == "json":
        text = as_json(found)
    elif form == "mermaid":
        text = mermaid(found if isinstance(found, Explanation) else found.declaration)
    elif isinstance(found, Explanation):
        refuse("a page is made of a runner: name one, or take --format table, mermaid or json", "--format")
    else:
        text = html(found)
    typer.echo(text, output, nl=False)


def _extents_of(texts: Sequence[str], declaration: Declaration) -> Extents:
    """Live and padded sizes from texts such as `batch=37/48` and `hidden=64`; a request has one token by default."""
    extents: dict[Axis, tuple[int, int]] = {}
    beside = [BATCH] if TOKENS in declaration.axes else []  # which TOKENS can follow from
    axes = {axis.name.lower(): axis for axis in (*declaration.axes, *beside)}
    for text in texts:
        match = _SIZE.fullmatch(text)
        if match is None:
            refuse(f"expected AXIS=LIVE/PADDED or AXIS=SIZE, as in batch=37/48, got {text!r}", "--size")
        name, live, padded = match.groups()
        axis = axes.get(name.lower())
        if axis is None:
            refuse(f"{declaration.name} has no axis {name!r}{did_you_mean(name.lower(), axes)}", "--size")
        if axis in extents:
            refuse(f"{axis.name} is given twice", "--size")
        extents[axis] = (int(live), int(padded or live))
    usual = {TOKENS: extents.get(BATCH), WIDTH: (1, 1) if extents else None}
    return {**extents, **{a: both for a, both in usual.items() if both and a in declaration.axes and a not in extents}}


def _settings_of(texts: Sequence[str]) -> object:
    """Settings from texts such as `swa`, `swa=false` and `attention.window=128`."""
    settings: dict[str, Any] = {}
    for text in texts:
        path, _, value = text.partition("=")
        *outer, last = path.split(".")
        if not all(part.isidentifier() for part in (*outer, last)):
            refuse(f"expected NAME or NAME=VALUE, as in attention.window=128, got {text!r}", "--set")
        holder = settings
        for part in outer:
            holder = holder.setdefault(part, {})
        try:  # a number, true or false if it reads as one, else the text
            holder[last] = json.loads(value.lower() if value.lower() in ("true", "false") else value or "true")
        except ValueError:
            holder[last] = value
    return settings


@app.command()
def backends(*, form: _Form = "table") -> None:
    """List the backends: those that can run here, why others cannot, and what each device can do.

    \b
    Examples:
      slotgraph backends
      slotgraph backends --format json
    """  # noqa: D301 - as above
    found = [_facts_of(name) for name in names()]
    able = {facts["name"]: facts["capabilities"] for facts in found if facts["capabilities"] is not None}
    fields: dict[str, Any] = next(iter(able.values()), {})
    facts = [{"capability": one, **{name: data[one] for name, data in able.items()}} for one in fields]
    shown = [{key: value for key, value in one.items() if key != "capabilities"} for one in found]
    show(form, found, Table("backends", shown), *([Table("capabilities", facts)] if facts else ()))


def _facts_of(name: str) -> dict[str, Any]:
    """What is known of one backend; one that fails to load is listed with what it raised."""
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


_Slots = Annotated[
    list[int] | None,
    typer.Option(min=2, max=1000, help="A number of slots to declare; may be repeated. 4, 12 and 48 by default."),
]
_Json = Annotated[
    typer.FileTextWrite | None, typer.Option("--json", metavar="FILE", lazy=False, help="Write the figures as JSON.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="A few rounds only: seconds, and rough figures.")]


@app.command()
def bench(*, backend: _Backend = AUTO, slots: _Slots = None, json_file: _Json = None, quick: _Quick = False) -> None:
    """Measure what a step's inputs cost host and device, against hand-written fills and a bare replay.

    \b
    per_slot    by hand: one tail reset and one copy a slot
    regrouped   by hand: foreach copies, grouped anew in each step
    in_graph, fused, foreach, slot_by_slot
                this library by each lowering that the backend has, whole: from
                sizing to the outputs of the replay
    bare        the replay of a graph that holds the step alone, and no fill

    Each is first compared with the oracle, byte for byte. Then all take turns in one run, so that ratios hold where
    the machine is noisy.

    \b
    Examples:
      slotgraph bench --quick --slots 12
      slotgraph bench --backend cuda --json figures.json
    """  # noqa: D301 - as above
    with reported():
        on = choose(backend)
        with Console(stderr=True).status("measuring"):
            rows = measured_rows(on, sorted({*(slots or (4, 12, 48))}), QUICK if quick else FULL)
    ours = on.capabilities.lowerings[0]
    show_rows(rows, ours, screen(110))  # what does not fit a terminal is wrapped there, and not cut off
    if json_file is not None:
        about = {"ours": ours, "backend": on.name, "device": str(on.device), "threads": THREADS, "quick": quick}
        json_file.write(as_json({"rows": rows, "conditions": {**about, **versions()}}))


_Batches = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the module has to check with: a list of batches, or a function of rows and a torch.Generator.",
    ),
]
_Only = Annotated[
    list[str] | None, typer.Option(metavar="CHECK", help=f"One of the checks: {', '.join(CHECKS)}; may be repeated.")
]
_ReadOutside = Annotated[
    list[str] | None, typer.Option(metavar="SLOT", help="A slot that is read between fill and replay; may be repeated.")
]
_Rounds = Annotated[int, typer.Option(min=1, help="Batches of random rows for each bucket.")]
_Seed = Annotated[int, typer.Option(min=0, max=1 << 62, help="Where random batches begin.")]


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:RUNNER", help=_A_RUNNER)],
    *,
    batches: _Batches = None,
    only: _Only = None,
    read_outside: _ReadOutside = None,
    rounds: _Rounds = 2,
    seed: _Seed = 0,
    form: _Form = "table",
) -> None:
    """Check that a runner does what its declaration promises; it is captured first, if it is not yet.

    \b
    poison     poison in every tail changes no bit of a live row
    parity     a graph gives what its step gives, padded and not
    addresses  everything that a graph reads lives where it was
    coverage   every slot is written in each step or constant, and is read
    races      steps in flight give what each gives alone

    \b
    Examples:
      slotgraph check my_engine.runners:decode
      slotgraph check engine.py:make_runner --batches make_batch --only poison --only parity
      slotgraph check engine.py:make_runner --rounds 8 --seed 3 --format json
    """  # noqa: D301 - as above
    with reported():
        runner, given = captured(find(target)), None
        if batches is not None:
            why = "no batches: name several, or a function of two arguments, rows and a torch.Generator"
            given = find(f"{target.rpartition(':')[0] or target}:{batches}", are_batches, why)
        outside = read_outside or ()
        report = check_runner(runner, given, rounds=rounds, seed=seed, only=only or (), read_outside=outside)
    title, *lines = str(report).splitlines()
    found = {name: report.of(name) for name in report.steps}
    rows = [
        {"check": name, "steps": steps, "findings": len(found[name]), "slots": [o.slot for o in found[name] if o.slot]}
        for name, steps in report.steps.items()
    ]
    show(form, report.as_data(), Table(title, rows, "\n".join(lines)))
    if not report.ok:
        raise typer.Exit(FAILED)


_File = Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="A file that `slotgraph.record` wrote.")]
_OnRunner = Annotated[str | None, typer.Argument(metavar="MODULE:RUNNER", help=_A_RUNNER)]
_Step = Annotated[int | None, typer.Option("--step", metavar="K", help="Run this step alone, by its number.")]


@app.command()
def replay(file: _File, target: _OnRunner = None, *, step: _Step = None, form: _Form = "table") -> None:
    """Run recorded steps again, by the graph and eagerly, and show by slot and row where they differ first.

    Without a runner, show what the file holds. The file is data alone: nothing in it is run, the runner is yours.
    Exit status: 0 where graph and eager agree on every step, 1 where they differ or a step raises, 2 where the file or
    the runner was not understood, or they do not fit one another.

    \b
    Examples:
      slotgraph replay last.safetensors
      slotgraph replay last.safetensors my_engine.runners:decode
      slotgraph replay last.safetensors runners.py:make_decode --step 41 --format json
    """  # noqa: D301 - as above
    with reported():
        try:
            read = RecordedFile.read(file)
            found: RecordedFile | StepRecord | ReplayReport = read if step is None else read.only(step)[0]
            if target is not None:
                given = {} if read.runner.ranks is None else {"ranks": RecordedRanks(read.runner.ranks)}
                found = replay_file(read, captured(find(target, given=given)), step)
        except RecordingError as error:
            refuse(printable(str(error)))
    show(form, found, *tables_of(found))
    if isinstance(found, ReplayReport) and not found.ok:
        raise typer.Exit(FAILED)
