"""The command line: `slotgraph demo`, `suggest`, `explain`, `backends`, `bench`, `check` and `replay`.

It is outside of the package, which imports torch, so that help, version and completion respond at once.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

import typer

_AUTO: Final = "auto"

app = typer.Typer(
    name="slotgraph",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: examples stay as they were written, in a terminal and in a pipe
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:  # noqa: FBT001 - the signature of an option's callback
    if asked:
        typer.echo(f"slotgraph {importlib.metadata.version('slotgraph')}")
        raise typer.Exit


def _in_a_folder(file: pathlib.Path | None) -> pathlib.Path | None:
    if file is not None and not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(file.parent)!r}")
    return file


def _completed(*names: str, group: str = "") -> Callable[[str], list[str]]:
    """Return the completion of an option that takes one of these names, or of a group of entry points.

    A test compares the names with those of the library, which is too slow to import for a completion.
    """

    def complete(incomplete: str) -> list[str]:
        known = {*names, *importlib.metadata.entry_points(group=group).names}
        return sorted(name for name in known if name.startswith(incomplete))

    return complete


_FORMAT: Final = typer.Option("--format", help="How to show it: JSON for scripts, html as a page.")
_Form = Annotated[Literal["table", "json", "html"], _FORMAT]
_Output = Annotated[
    pathlib.Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        dir_okay=False,
        writable=True,
        callback=_in_a_folder,
        help="Write it to this file, not to the screen.",
    ),
]
_Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        autocompletion=_completed(
            _AUTO, "cpu", "cpu-capture", "cuda", "npu", "accelerator", group="slotgraph.backends"
        ),
        help="A backend; see `slotgraph backends`.",
    ),
]
_Size = Annotated[
    list[str] | None,
    typer.Option("--size", metavar="AXIS=LIVE/PADDED", help="An axis' size, as in batch=37/48; one number for both."),
]
_Setting = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting that slots with `when=` ask for; no value means true."),
]
_Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="NAME",
        help="What the module has to run with: a list of batches, or a function of rows and a torch.Generator.",
    ),
]
_A_RUNNER: Final = "A module or a .py file, and a runner in it, or a function that makes one."
_EXPLAINED: Final = (
    "A declaration's class, or a runner, or a function that makes one: a module or a .py file, and a name."
)


@app.callback()
def slotgraph(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

    Exit status: 0 if all went well, 1 if a check failed or a backend cannot run on this machine, 2 if the command was
    not understood.
    """
    del version


def _commands() -> Any:
    """Return what the commands do."""
    from slotgraph.runners.commands import app as commands  # noqa: PLC0415 - it imports torch

    return commands


def _do(command: str, given: Mapping[str, Any]) -> None:
    """Run a command with its arguments."""
    commands = _commands()
    commands.run(getattr(commands, command), **given)


def main() -> None:
    """Run the command line on this process's arguments."""
    try:
        app()
    except OSError as error:  # raised by writing output: commands report errors of all other files themselves
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # flushing the rest of the output at exit would raise again
        with contextlib.suppress(OSError):
            typer.echo(f"the output cannot be written: {error.strerror or error}", err=True)
        sys.exit(1)


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help=_EXPLAINED)],
    *,
    size: _Size = None,
    setting: _Setting = None,
    absent: Annotated[
        list[str] | None, typer.Option(metavar="SLOT", help="An optional slot that the batch has not.")
    ] = None,
    backend: _Backend = _AUTO,
    lowering: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=_completed(_AUTO, "in_graph", "fused", "direct", "foreach", "slot_by_slot"),
            help="How the plan is run, as `slotgraph backends` lists it for the backend.",
        ),
    ] = _AUTO,
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture a runner's graphs first, if they are not.")
    ] = False,
    form: Annotated[Literal["table", "json", "html", "mermaid"], _FORMAT] = "table",
    output: _Output = None,
) -> None:
    """Show a declaration with its plan, or a runner.

    For a declaration, show its slots, dependencies and, with --size, the plan. For a runner, also show its buckets,
    graphs, memory and decisions. Html is a page, mermaid a diagram of the dependencies. Without --set every slot is
    shown, whatever its `when=` asks for.

    \b
    Examples:
      slotgraph explain my_engine.inputs:DecodeInputs
      slotgraph explain inputs.py:DecodeInputs --size batch=37/48
      slotgraph explain inputs.py:DecodeInputs --format mermaid > inputs.mmd
      slotgraph explain engine.py:make --capture --format html --output page.html
    """
    _do("explain", locals())


@app.command()
def backends(*, form: _Form = "table", output: _Output = None) -> None:
    """List the backends, and why some cannot run here.

    \b
    Examples:
      slotgraph backends
      slotgraph backends --format json
    """
    _do("backends", locals())


@app.command()
def bench(
    target: Annotated[str | None, typer.Argument(metavar="MODULE:NAME", help=_EXPLAINED)] = None,
    *,
    batches: _Batches = None,
    size: _Size = None,
    setting: _Setting = None,
    backend: _Backend = _AUTO,
    slots: Annotated[
        list[int], typer.Option(min=2, max=1000, help="Without a target, a number of slots; may be repeated.")
    ] = [4, 12, 48],  # noqa: B006 - nothing changes it
    quick: Annotated[bool, typer.Option("--quick", help="A few rounds, and nothing is compiled.")] = False,
    form: _Form = "table",
    output: _Output = None,
    data: Annotated[
        pathlib.Path | None,
        typer.Option("--json", metavar="FILE", callback=_in_a_folder, help="The same as --format json --output FILE."),
    ] = None,
) -> None:
    """Measure what a step's inputs cost host and device.

    A runner is measured in its largest bucket, with its own step; a declaration with the smallest step there is, and so
    are decode steps of our own, without a target.

    \b
    per_slot    by hand: one tail reset and one copy a slot
    regrouped   by hand: foreach copies, grouped anew in each step
    compiled    by hand, under torch.compile: of a target, without --quick
    in_graph, fused, direct, foreach, slot_by_slot
                this library by each lowering that the backend has, whole: from
                sizing to the outputs of the replay
    bare        the replay of a graph that holds the step alone, and no fill

    Each is first compared with the oracle, byte for byte. Then all alternate in one run, so that ratios hold on a
    noisy machine.

    \b
    Examples:
      slotgraph bench --quick --slots 12
      slotgraph bench engine.py:make_runner --batches make_batch
      slotgraph bench inputs.py:DecodeInputs --size batch=512 --backend cuda
      slotgraph bench --format html --output figures.html
    """
    if data:
        form = "json"
        output = data
    del data
    _do("bench", locals())


@app.command()
def demo(*, backend: _Backend = _AUTO) -> None:
    """Show in seconds why inputs are declared.

    A wrong number by hand, the same step declared, what a check finds, and what inputs cost here.

    \b
    Examples:
      slotgraph demo
      slotgraph demo --backend cuda
    """
    _commands().demo(backend)


@app.command()
def suggest(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:BATCHES", help="A module or a .py file, and a list of sample batches in it, or a function."
        ),
    ],
    *,
    name: Annotated[str, typer.Option(metavar="NAME", help="The name of the class.")] = "StepInputs",
    output: _Output = None,
) -> None:
    """Write a declaration to start from, for sample batches.

    The batches differ in size, and sizes that move together become one axis. What
    samples cannot tell stays open: above all what padded rows hold.

    \b
    Examples:
      slotgraph suggest my_engine.samples:batches
      slotgraph suggest samples.py:make_batches --output inputs.py
    """
    _commands().suggest(target, name, output)


@app.command()
def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:RUNNER", help=_A_RUNNER)],
    *,
    batches: _Batches = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK",
            autocompletion=_completed("poison", "parity", "addresses", "coverage", "races", "weights", "transition"),
            help="One of the checks above; may be repeated. All by default.",
        ),
    ] = None,
    read_outside: Annotated[
        list[str] | None,
        typer.Option(metavar="SLOT", help="A slot that is read between fill and replay; may be repeated."),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="The step draws random numbers on purpose, as a sampler does.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of random rows for each bucket.")] = 2,
    seed: Annotated[int, typer.Option(min=0, max=1 << 62, help="Where random batches begin.")] = 0,
    form: _Form = "table",
    output: _Output = None,
) -> None:
    """Check that a runner does what its declaration promises.

    The runner is captured first, if it is not yet.

    \b
    poison     poison in every tail changes no bit of a live row, nor do random
               numbers
    parity     a graph gives what its step gives, padded and not
    addresses  everything that a graph reads is still where it was
    coverage   every slot is written in each step or constant, and is read
    races      steps in flight give what each gives alone
    weights    a step changes no weight, and its graph sees each change
    transition slots that advance hold what their rules say, step by step

    \b
    Examples:
      slotgraph check my_engine.runners:decode
      slotgraph check engine.py:make --batches make_batch --only poison
      slotgraph check engine.py:make --rounds 8 --seed 3 --format json
    """
    _do("check", locals())


@app.command()
def replay(
    file: Annotated[pathlib.Path, typer.Argument(metavar="FILE", help="A file that `slotgraph.record` wrote.")],
    target: Annotated[str | None, typer.Argument(metavar="MODULE:RUNNER", help=_A_RUNNER)] = None,
    *,
    step: Annotated[int | None, typer.Option("--step", metavar="K", help="Run this step alone, by its number.")] = None,
    form: _Form = "table",
    output: _Output = None,
) -> None:
    """Run recorded steps again, by the graph and eagerly.

    The first differences are shown by slot and row. Without a runner, show what the file holds. The file contains only
    data: nothing in it is run, and the runner is your own. Exit status: 0 if graph and eager agree on every step, 1 if
    they differ or a step raises, 2 if the file or the runner was not understood, or they do not fit one another.

    \b
    Examples:
      slotgraph replay last.safetensors
      slotgraph replay last.safetensors my_engine.runners:decode
      slotgraph replay last.safetensors engine.py:make --step 41 --format json
    """
    _do("replay", locals())
