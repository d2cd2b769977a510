"""`slotgraph replay`: what a recorded file holds, and its steps run again on a runner."""

import pathlib
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ...dataflow.errors import RecordingError
from ..recording.files import RecordedFile
from ..recording.ranks import RecordedRanks
from ..recording.records import Header, StepRecord
from ..recording.replaying import ReplayReport, replay_file
from .failures import FAILED, reported
from .lookup import captured, find_runner
from .screen import Form, FormOption, show, table

_File = Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="A file that `slotgraph.record` wrote.")]
_Target = Annotated[
    str | None,
    typer.Argument(metavar="MODULE:RUNNER", help="A module or a .py file, and a runner or a function that makes one."),
]
_Step = Annotated[int | None, typer.Option("--step", metavar="K", help="Run this step alone, by its number.")]
_NUMBERS: Final = ("step", "bytes", "replays")


def replay(file: _File, target: _Target = None, *, step: _Step = None, form: FormOption = Form.TABLE) -> None:
    """Run recorded steps again, by the graph and eagerly, and show by slot and row where they differ first.

    Without a runner, show what the file holds. The file is data alone: nothing in it is run, the runner is yours.
    Exit status: 0 where graph and eager agree on every step, 1 where they differ or a step raises, 2 where the file or
    the runner was not understood, or they do not fit one another.

    \b
    Examples:
      slotgraph replay last.safetensors
      slotgraph replay last.safetensors my_engine.runners:decode
      slotgraph replay last.safetensors runners.py:make_decode --step 41 --format json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    with reported():
        found: Header | StepRecord | ReplayReport
        try:
            read = RecordedFile.read(file)
            if target is None:
                found = read.header if step is None else _only(read, step)
            else:
                found = replay_file(read, captured(find_runner(target, **_given(read))), step)
        except RecordingError as error:
            raise typer.BadParameter(printable(str(error))) from error
    show(form, found, _shown(found, file))
    if isinstance(found, ReplayReport) and not found.ok:
        raise typer.Exit(FAILED)


def _given(read: RecordedFile) -> dict[str, Any]:
    """What a function that makes the runner gets, where it takes it: `ranks`, those of the file."""
    ranks = read.header.runner.ranks
    return {} if ranks is None else {"ranks": RecordedRanks(ranks)}


def printable(text: str) -> str:
    """Text of a file that may hold anything, without what would command a terminal or cannot be printed."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def _only(read: RecordedFile, number: int) -> StepRecord:
    for step in read.header.steps:
        if step.number == number:
            return step
    known = ", ".join(str(step.number) for step in read.header.steps) or "none"
    message = f"{read.path.name} has no step {number}: it has {known}"
    raise RecordingError(message)


def _shown(found: Header | StepRecord | ReplayReport, file: pathlib.Path) -> RenderableType:
    """Tables of what a file holds, of one step, or of steps that were run again."""
    if isinstance(found, Header):
        return Group(*_holds(found, file))
    if isinstance(found, ReplayReport):
        return Group(*_replayed(found))
    return Group(*_step(found), *([_text(found.raised.traceback)] if found.raised is not None else []))


def _text(*parts: Any, style: str = "") -> Text:
    return Text(printable("".join(map(str, parts))), style=style)


def _holds(header: Header, file: pathlib.Path) -> Iterator[RenderableType]:
    runner = header.runner
    rank = "" if runner.ranks is None else f", rank {runner.ranks.rank} of {runner.ranks.size}"
    yield _text(f"{file.name}: {runner.kind} over {runner.inputs} on {runner.backend}{rank}", style="bold")
    yield _text("recorded with ", ", ".join(f"{name} {version}" for name, version in header.versions))
    yield from (_text(note) for note in header.notes)
    made = table("step", "path", "bucket", "live", "absent", "values", "outputs", "replays", "raised", right=_NUMBERS)
    for step in header.steps:
        missing, live = len(step.missing()), ", ".join(f"{axis}={rows}" for axis, rows in step.live)
        values = f"{len(step.slots)}, {missing} without data" if missing else len(step.slots)
        kept = None if step.outputs is None else len(step.outputs)
        raised = None if step.raised is None else step.raised.kind
        cells = (step.path, step.bucket, live, ", ".join(step.absent), values, kept, step.replays, raised)
        made.add_row(_text(step.number), *(_text("-" if cell in (None, "") else cell) for cell in cells))
    yield made
    if header.steps:
        last = header.steps[-1]
        yield from _step(last)
        if last.raised is not None and last.raised.traceback:
            yield _text(f"where it was raised: --step {last.number}")


def _step(step: StepRecord) -> Iterator[RenderableType]:
    """One step: what the batch brought."""
    yield _text(f"step {step.number}: {step.reason or 'no decision'}", style="bold")
    made = table("slot or field", "what it brought")
    for kind, values in (("", step.slots), ("field ", step.fields)):
        for value in values:
            made.add_row(_text(kind, value.name), _text(value))
    yield made
    if step.ranks is not None:
        brought = "; ".join(f"{axis} {', '.join(map(str, rows))}" for axis, rows in step.ranks.live)
        yield _text(f"ranks brought {brought}; alone, this one: {step.ranks.alone}")
    yield from (_text(note) for note in step.notes)
    if step.raised is not None:
        yield _text(f"it raised {step.raised.kind}: {step.raised.message}")


def _replayed(report: ReplayReport) -> Iterator[RenderableType]:
    yield _text(f"{report.file} on {report.runner}", style="bold")
    yield from (_text("note: ", note) for note in report.notes)
    made = table("step", "path", "bucket", "result", "why this path", right=_NUMBERS)
    for step in report.steps:
        bucket = "-" if step.bucket is None else step.bucket
        made.add_row(*map(_text, (step.number, step.path or "-", bucket, step.outcome, step.reason or "-")))
    yield made
    for step in report.steps:
        yield from (_text(f"step {step.number}: {line}") for line in step.lines)
