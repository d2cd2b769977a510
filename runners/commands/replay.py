"""`slotgraph replay`: what a recorded file holds, and its steps run again on a runner."""

import pathlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ...dataflow.errors import RecordingError
from ..explained.tables import Table, printable
from ..recording.files import RecordedFile
from ..recording.ranks import RecordedRanks
from ..recording.records import Header, StepRecord
from ..recording.replaying import ReplayReport, replay_file
from .lookup import captured, find_runner
from .screen import FAILED, Form, FormOption, reported, show

_File = Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="A file that `slotgraph.record` wrote.")]
_Target = Annotated[
    str | None,
    typer.Argument(metavar="MODULE:RUNNER", help="A module or a .py file, and a runner or a function that makes one."),
]
_Step = Annotated[int | None, typer.Option("--step", metavar="K", help="Run this step alone, by its number.")]


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
                found = read.header if step is None else read.steps(step)[0]
            else:
                found = replay_file(read, captured(find_runner(target, **_given(read))), step)
        except RecordingError as error:
            raise typer.BadParameter(printable(str(error))) from error
    show(form, found, *_shown(found, file))
    if isinstance(found, ReplayReport) and not found.ok:
        raise typer.Exit(FAILED)


def _given(read: RecordedFile) -> dict[str, Any]:
    """What a function that makes the runner gets, where it takes it: `ranks`, those of the file."""
    ranks = read.header.runner.ranks
    return {} if ranks is None else {"ranks": RecordedRanks(ranks)}


def _shown(found: Header | StepRecord | ReplayReport, file: pathlib.Path) -> Iterator[Table]:
    """Tables of what a file holds, of one step, or of steps that were run again."""
    if isinstance(found, Header):
        yield from _holds(found, file)
    elif isinstance(found, ReplayReport):
        lines = [f"note: {note}" for note in found.notes]
        lines += [f"step {step.number}: {line}" for step in found.steps for line in step.lines]
        rows = [
            {"step": one.number, "path": one.path, "bucket": one.bucket, "result": one.outcome, "why": one.reason}
            for one in found.steps
        ]
        yield Table(f"{found.file} on {found.runner}", rows, "\n".join(lines))
    else:
        yield _step(found, traceback=True)


def _holds(header: Header, file: pathlib.Path) -> Iterator[Table]:
    runner = header.runner
    rank = "" if runner.ranks is None else f", rank {runner.ranks.rank} of {runner.ranks.size}"
    recorded = ", ".join(f"{name} {version}" for name, version in header.versions)
    rows = [
        {
            "step": step.number,
            "path": step.path,
            "bucket": step.bucket,
            "live": dict(step.live),
            "absent": step.absent,
            "values": f"{len(step.slots) - len(step.missing())} of {len(step.slots)}",
            "outputs": None if step.outputs is None else len(step.outputs),
            "replays": step.replays,
            "raised": step.raised and step.raised.kind,
        }
        for step in header.steps
    ]
    kind, inputs, backend = (runner.facts.get(name) for name in ("kind", "inputs", "backend"))
    title = f"{file.name}: {kind} over {inputs} on {backend}{rank}"
    yield Table(title, rows, "\n".join((f"recorded with {recorded}", *header.notes)))
    if header.steps:
        yield _step(header.steps[-1])


def _step(step: StepRecord, *, traceback: bool = False) -> Table:
    """One step: what the batch brought."""
    rows = [{"slot or field": one.name, "what it brought": str(one)} for one in (*step.slots, *step.fields)]
    lines = list(step.notes)
    if step.ranks is not None:
        brought = "; ".join(f"{axis} {', '.join(map(str, rows))}" for axis, rows in step.ranks.live)
        lines.append(f"ranks brought {brought}; alone, this one: {step.ranks.alone}")
    if step.raised is not None:
        lines.append(f"it raised {step.raised.kind}: {step.raised.message}")
        lines.append(step.raised.traceback if traceback else f"where it was raised: --step {step.number}")
    return Table(f"step {step.number}: {step.reason or 'no decision'}", rows, "\n".join(lines))
