"""The command line: `slotgraph explain`, `backends`, `bench`, `check` and `replay`."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console

from ...backends import choose, load, names
from ...dataflow.axes import BATCH, TOKENS, WIDTH, Axis
from ...dataflow.capabilities import AUTO, LADDER, chosen_lowering
from ...dataflow.declaration import Declaration
from ...dataflow.errors import CaptureError, RecordingError, did_you_mean
from ...dataflow.plan import Pattern
from ..check.checks import CHECKS
from ..check.checks import check as check_runner
from ..explained.declared import Explanation, Extents, explain_declaration, mermaid
from ..explained.explanation import RunnerExplanation
from ..explained.explanation import explain as explain_runner
from ..explained.pages import Table, html, printable, tables
from ..recording.records import RecordedFile, StepRecord, versions
from ..recording.replaying import RecordedRanks, Replayed, ReplayReport, replay_file
from ..runner import Runner
from ..serial import to_data
from ..testing.timing import THREADS
from .bench import FULL, QUICK, measured_rows, show_rows
from .shared import (
    FAILED,
    FormOption,
    OutputOption,
    are_batches,
    as_json,
    captured,
    find,
    is_explained,
    refuse,
    reported,
    screen,
    show,
)

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
    output: OutputOption = None,
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
        named = find(target, is_explained, "no subclass of slotgraph.Inputs, nor a runner")
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
    elif form == "json":
        typer.echo(as_json(found), output, nl=False)
    elif form == "mermaid":
        typer.echo(mermaid(found if isinstance(found, Explanation) else found.declaration), output, nl=False)
    elif isinstance(found, Explanation):
        refuse("a page is made of a runner: name one, or take --format table, mermaid or json", "--format")
    else:
        typer.echo(html(found), output, nl=False)


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
def backends(*, form: FormOption = "table") -> None:
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
        kind = load(name)
        available = kind.is_available()
        facts["reason"] = available.reason
        if available:
            backend = kind()
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

    Each is first held to the oracle, byte for byte; then all take turns in one run, so that ratios can be trusted where
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
    form: FormOption = "table",
) -> None:
    """Hold a runner to what its declaration promises; it is captured first, if it is not yet.

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
        told = only or (), read_outside or ()
        report = check_runner(runner, given, rounds=rounds, seed=seed, only=told[0], read_outside=told[1])
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
def replay(file: _File, target: _OnRunner = None, *, step: _Step = None, form: FormOption = "table") -> None:
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
    show(form, found, *_shown(found))
    if isinstance(found, ReplayReport) and not found.ok:
        raise typer.Exit(FAILED)


def _shown(found: RecordedFile | StepRecord | ReplayReport) -> Iterator[Table]:
    """What a file holds and its last step, one step, or steps that were run again."""
    if isinstance(found, StepRecord):
        yield _step(found, "" if found.raised is None else found.raised.traceback)
    elif isinstance(found, ReplayReport):
        notes = [f"note: {note}" for note in found.notes]
        notes += [f"step {one.number}: {line}" for one in found.steps for line in one.lines]
        results = [
            {**_decided(step), "result": step.outcome, "why": step.decision and step.decision.reason}
            for step in found.steps
        ]
        yield Table(f"{found.file} on {found.runner}", results, "\n".join(notes))
    else:
        facts, ranks = found.runner.facts, found.runner.ranks
        rows = [
            {
                **_decided(step),
                "live": dict(step.live),
                "absent": step.absent,
                "values": f"{len(step.slots) - len(step.missing())} of {len(step.slots)}",
                "outputs": None if step.outputs is None else len(step.outputs),
                "replays": step.replays,
                "raised": step.raised and step.raised.kind,
            }
            for step in found.steps
        ]
        title = f"{found.name}: {facts.get('kind')} over {facts.get('inputs')} on {facts.get('backend')}"
        title += "" if ranks is None else f", rank {ranks.rank} of {ranks.size}"
        recorded = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        yield Table(title, rows, "\n".join((f"recorded with {recorded}", *found.notes)))
        for last in found.steps[-1:]:
            yield _step(last, f"where it was raised: --step {last.number}")


def _decided(step: StepRecord | Replayed) -> dict[str, Any]:
    decision = step.decision
    return {"step": step.number, "path": decision and decision.path, "bucket": decision and decision.bucket}


def _step(step: StepRecord, place: str) -> Table:
    """One step: what the batch brought. place: where it raised."""
    rows = [{"slot or field": one.name, "what it brought": str(one)} for one in (*step.slots, *step.fields)]
    lines = list(step.notes)
    if step.messages:
        brought = "; ".join(", ".join(map(str, one.live[: len(step.live)])) for one in step.messages)
        lines.append(f"ranks brought {brought}; alone, this one: {step.alone}")
    if step.raised is not None:
        lines += [f"it raised {step.raised.kind}: {step.raised.message}", place]
    decided = "no decision" if step.decision is None else step.decision.reason
    return Table(f"step {step.number}: {decided}", rows, "\n".join(lines))
