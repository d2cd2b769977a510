"""`slotgraph check`: a runner held to what its declaration promises, bucket by bucket, slot by slot."""

from typing import Annotated, Any

import typer

from ..check.checks import CHECKS
from ..check.checks import check as check_runner
from ..explained.tables import Table
from .lookup import captured, find_batches, find_runner
from .screen import FAILED, Form, FormOption, parted, reported, show

_Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:RUNNER", help="A module or a .py file, and a runner in it, or a function that makes one."
    ),
]
_Batches = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What the module has to check with: a list of batches, or a function of rows and a torch.Generator.",
    ),
]
_Only = Annotated[
    list[str] | None, typer.Option(metavar="CHECK[,CHECK]", help=f"Some of the checks: {', '.join(CHECKS)}.")
]
_ReadOutside = Annotated[
    list[str] | None,
    typer.Option("--read-outside", metavar="SLOT[,SLOT]", help="Slots that are read between fill and replay."),
]
_Rounds = Annotated[int, typer.Option(min=1, help="Batches of random rows for each bucket.")]
_Seed = Annotated[int, typer.Option(min=0, max=1 << 62, help="Where random batches begin.")]


def check(
    target: _Target,
    *,
    batches: _Batches = None,
    only: _Only = None,
    read_outside: _ReadOutside = None,
    rounds: _Rounds = 2,
    seed: _Seed = 0,
    form: FormOption = Form.TABLE,
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
      slotgraph check engine.py:make_runner --batches make_batch --only poison,parity
      slotgraph check engine.py:make_runner --rounds 8 --seed 3 --format json
    """  # noqa: D301 - \b is what keeps the next paragraph's lines apart in the help
    with reported():
        runner, given = captured(find_runner(target)), None if batches is None else find_batches(target, batches)
        named: dict[str, Any] = {"only": parted(only), "read_outside": parted(read_outside)}
        report = check_runner(runner, given, rounds=rounds, seed=seed, **named)
    lines = str(report).splitlines()
    rows = [
        {
            "check": name,
            "steps": steps,
            "findings": len(report.of(name)),
            "slots": [one.slot for one in report.of(name) if one.slot],
        }
        for name, steps in report.steps.items()
    ]
    show(form, report.as_data(), Table(lines[0], rows, "\n".join(lines[1:])))
    if not report.ok:
        raise typer.Exit(FAILED)
