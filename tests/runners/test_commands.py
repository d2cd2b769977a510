"""The command line: what it prints, where, and with which exit status; one line on stderr for what it cannot use."""

import collections
import contextlib
import importlib
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any, Final

import pytest
import torch
import typer.testing
from hypothesis import given
from hypothesis import strategies as st

from slotgraph import record
from slotgraph.backends import Availability, choose, names
from slotgraph.backends.cpu import CpuBackend
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError
from slotgraph.dataflow.shown import Table, cell, html
from slotgraph.runners.check.checks import CHECKS, CheckReport
from slotgraph.runners.commands import app as application
from slotgraph.runners.explained.declared import Explanation
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.serial import from_data
from slotgraph.runners.testing import bench
from slotgraph.runners.testing.bench import BenchReport
from slotgraph_cli import app
from tests.programs import python
from tests.runners.models import ready

DECLARATIONS = """
import torch
from slotgraph import BATCH, TOKENS, Axis, Inputs, Step, computed, copied

HIDDEN = Axis("HIDDEN", fixed=True)

def live_tokens(step: Step) -> int:
    return step.live(TOKENS)

class DecodeInputs(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    hidden: torch.Tensor | None = copied(TOKENS, HIDDEN, dtype=torch.float32, pad=0, default=None)
    count: torch.Tensor = computed(live_tokens, shape=1, dtype=torch.int32)
    swa: torch.Tensor = copied(TOKENS, dtype=torch.int32, pad=0, when="model.swa")

class Outer:
    class Nested(Inputs):
        input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
"""

BROKEN = """
import torch
from slotgraph import BATCH, Inputs, computed, copied

class BrokenInputs(Inputs):
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32)
    mask: torch.Tensor = computed(lambda lenz: lenz, shape=BATCH, dtype=torch.bool)
"""

SERVING = """
import torch
from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied

class DecodeInputs(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)

def step(view):
    if view.seq_lens.shape[0] == 4:
        raise ValueError("four is too many")
    return view.input_ids + 1

def make(buckets=(1, 2), step=step):
    return DecodeRunner(DecodeInputs, step, buckets=list(buckets), backend="cpu", progress=False)

def failing():
    return make((2, 4))

def number():
    return 3

made = make()
made.capture()
"""

DECODE = "explained_inputs:DecodeInputs"
MADE = "explained_serving:made"
SIZED = ("--size", "batch=7/8", "--size", "hidden=16")

MODULE: Final = """
import sys
import torch
from slotgraph import BATCH, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.graphs import ModeRunner

class Ids(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)

def make(step=lambda view: view.ids * 2, **options):
    return DecodeRunner(Ids, step, buckets=[2, 4], backend="cpu-capture", progress=False, **options)

def make_modes():
    return ModeRunner({"small": make(), "large": make(lambda view: view.ids * 2)})

def make_without_graphs():
    return make(graphs=False)

def make_quitting():
    return make(lambda view: sys.exit(0))

def quits():
    sys.exit(0)

def raises(rows, generator):
    raise KeyError("no such thing")

def three(rows, generator, more):
    return {"ids": torch.arange(rows)}

def leaves(rows, generator):
    sys.exit(0)

class Broken:
    def __iter__(self):
        yield {"ids": torch.arange(1)}
        raise ValueError("broken off")

broken = Broken()
large = [{"ids": torch.arange(9)}, {"ids": torch.arange(7)}]
empty = []
odd = [3, None]
"""

ENGINE = """
import torch
from slotgraph import BATCH, DecodeRunner, Inputs, copied

class DecodeInputs(Inputs):
    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1)

def make(step, **options):
    return DecodeRunner(DecodeInputs, step, buckets=[2, 4], backend="cpu-capture", progress=False, **options)

def make_sound():
    return make(lambda view: view.ids * view.weights)

faulty, captured = make(lambda view: view.ids * view.weights.softmax(0)), make_sound()
captured.capture()

def make_trouble():
    return 1 // 0

def make_batch(rows, generator):
    return {"ids": torch.arange(rows) + 1, "weights": torch.rand(rows, generator=generator)}

TWO = [make_batch(1, torch.Generator()), make_batch(3, torch.Generator())]
number = 5
model = torch.nn.Linear(2, 2)
"""

REPLAYED = """
import torch
from slotgraph import TOKENS, DecodeRunner, Inputs, copied, output

class DecodeInputs(Inputs):
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    window: torch.Tensor = copied(1, dtype=torch.int64, pad=0, source=lambda batch: batch["limits"]["window"])
    logits: torch.Tensor = output(TOKENS, 2, dtype=torch.float32)

class Model:
    window = 4                                    # a host value, which a graph freezes

    def __call__(self, view):
        far = (view.input_ids >= self.window).float()
        view.logits.copy_(torch.stack([far, view.input_ids.float()], 1))
        return view.logits

model = Model()

def right():
    return DecodeRunner(DecodeInputs, model, buckets=[4], backend="cpu-capture", progress=False)

def late():
    model.window = 7                              # in time for the graph, and not what was recorded
    return right()

nothing = 3
"""

FILES: Final = {
    "checked_engine": ENGINE,
    "explained_inputs": DECLARATIONS,
    "broken_inputs": BROKEN,
    "no_inputs": "import explained_nothing\n",
    "raising_inputs": "x = 1\nraise KeyError('oops')\n",
    "failing_module": MODULE,
    "explained_serving": SERVING,
    "replayed_runners": REPLAYED,
    "quits_at_once": "import sys\nsys.exit(0)\n",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A current directory with modules of a user's; what it brings to sys is taken back."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "no_text.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def run(*arguments: str) -> Any:
    """One command, in this process."""
    return typer.testing.CliRunner().invoke(app, arguments)


def explained(*arguments: str) -> Explanation:
    """What `slotgraph explain --format json` prints, read back."""
    result = run("explain", *arguments, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return from_data(json.loads(result.stdout), Explanation)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("target", ["explained_inputs:DecodeInputs", "explained_inputs.py:DecodeInputs"])
def test_explain_forms(target: str) -> None:
    """A module of the current directory and a file are found alike: with a plan, without sizes, as a diagram."""
    result = run("explain", target, *SIZED, "--backend", "cpu")
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("DecodeInputs on cpu", "BATCH=7/8", "live_tokens(step)", "input_ids[live:] = 0", "of buffers"):
        assert part in result.stdout
    assert "give the size of every axis" in run("explain", target).stdout
    diagram = run("explain", target, "--format", "mermaid").stdout
    assert diagram.startswith("flowchart LR\n")
    assert "given_step --> slot_count" in diagram


@pytest.mark.usefixtures("folder")
def test_explain_sizes() -> None:
    """The JSON is the explanation whole, its plan as asked for. TOKENS is BATCH unless given; names are in any case."""
    found = explained(DECODE, *SIZED)
    assert found.sizes == {"BATCH": (7, 8), "HIDDEN": (16, 16), "TOKENS": (7, 8)}
    assert found.plan is not None
    assert found.nbytes == 8 * (8 + 4 + 16 * 4 + 4) + 4
    assert explained(DECODE, *SIZED, "--size", "Tokens=9/10").sizes["TOKENS"] == (9, 10)
    assert explained("explained_inputs:Outer.Nested", "--size", "batch=2/4").sizes["TOKENS"] == (2, 4)
    for lowering in choose("cpu").capabilities.lowerings:
        options = ("--backend", "cpu", "--lowering", lowering, "--absent", "hidden")
        plan = explained(DECODE, *SIZED, *options).plan
        assert (plan and plan.lowering, plan and plan.absent) == (lowering, ("hidden",))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("settings", "switched_off"),
    [((), ()), (("--set", "model.swa"), ()), (("--set", "model.swa=False", "--set", "model.window=128"), ("swa",))],
)
def test_settings_switch_slots(settings: tuple[str, ...], switched_off: tuple[str, ...]) -> None:
    """Without settings all slots are shown; with them those that they enable."""
    found = explained(DECODE, *settings)
    assert found.disabled == switched_off
    assert ("swa" in [slot.name for slot in found.slots]) == (not switched_off)


@pytest.mark.usefixtures("folder")
def test_declaration_faults_stand_one_a_line() -> None:
    """A declaration that breaks rules fails with status 1, and all its faults are told."""
    result = run("explain", "broken_inputs:BrokenInputs")
    assert result.exit_code == 1
    first, second = result.stderr.splitlines()
    assert first.startswith(
        "DeclarationErrors: BrokenInputs breaks 2 rules: BrokenInputs.lens: slot 'lens': no tail rule"
    )
    assert "slot 'mask': it needs 'lenz'" in second


@pytest.mark.usefixtures("folder")
def test_a_runner_of_modes() -> None:
    """Its modes are captured, checked and explained together: as text, data and a diagram of their declaration."""
    target = "failing_module:make_modes"
    assert run("check", target).stdout.startswith("ModeRunner: no findings")
    shown = run("explain", target, "--capture").stdout
    assert "small: DecodeRunner of Ids" in shown
    assert "large: DecodeRunner of Ids" in shown
    assert [*json.loads(run("explain", target, "--format", "json").stdout)] == ["small", "large"]
    assert "flowchart" in run("explain", target, "--format", "mermaid").stdout
    assert "for a declaration" in run("explain", target, "--set", "x").stderr


@pytest.mark.usefixtures("folder")
def test_runner_and_function() -> None:
    """A runner is shown as it stands; a function's is captured where that is asked for, and what failed is told."""

    def why(*arguments: str) -> dict[int, str]:  # each bucket has no graph
        found = from_data(json.loads(run("explain", *arguments, "--format", "json").stdout), RunnerExplanation)
        return {bucket.rows: bucket.why for bucket in found.buckets}

    assert why(MADE) == why("explained_serving:make", "--capture") == {1: "", 2: ""}
    assert set(why("explained_serving.py:make").values()) == {"nothing is captured yet: call capture()"}
    assert "four is too many" in run("explain", "explained_serving:failing", "--capture").stderr
    found = why("explained_serving:failing", "--capture")
    assert (found[2], "four is too many" in found[4]) == ("", True)
    html = "<title>DecodeRunner of DecodeInputs on cpu (cpu)</title>"
    for form, part in {"table": "slots of DecodeInputs", "mermaid": "--> captured", "html": html}.items():
        assert part in run("explain", MADE, "--format", form).stdout


@pytest.mark.usefixtures("folder")
def test_every_command_prints_or_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same forms on the screen and in a file, 80 columns wide; what cannot be is refused before anything is run."""
    row = {"slots": 4, "live": 7, "padded": 8, "lowering": "per_slot", "host_us": 50.2, "gpu_us": None}
    measured = BenchReport([row, {**row, "lowering": "foreach"}], CONDITIONS)
    monkeypatch.setattr(application, "measure_inputs", lambda *_, **__: measured)
    report = CheckReport(runner="R", findings=(), steps={"poison": 3})
    monkeypatch.setattr(application, "check_runner", lambda *_, **__: report)
    monkeypatch.setenv("COLUMNS", "80")
    made = application.find(MADE)
    with record(made, "steps.safetensors"):
        made({"input_ids": [1, 2], "seq_lens": [3, 4]})
    commands = (("explain", DECODE, *SIZED), ("explain", MADE), ("backends",), ("bench", "--backend", "cpu"))
    for command in (*commands, ("check", MADE), ("replay", "steps.safetensors", MADE)):
        for form in ("table", "json", "mermaid", "html"):
            done, kept = (run(*command, "--format", form, *more) for more in ((), ("--output", "kept")))
            assert (done.exit_code, kept.exit_code, kept.stdout) in {(0, 0, ""), (2, 2, "")}, (command, done.stderr)
            if done.exit_code == 0:
                assert pathlib.Path("kept").read_text(encoding="utf-8") == done.stdout
                assert form != "table" or max(map(len, done.stdout.splitlines())) <= 80, command
            else:
                assert ("'table', 'json'" in done.stderr, form) == (True, "mermaid")
        for place, message in {"nowhere/kept": "there is no folder 'nowhere'", ".": "is a directory"}.items():
            refused = run(*command, "--output", place)
            assert (refused.exit_code, message in refused.stderr) == (2, True)


_CELLS = st.integers(-(10**9), 10**9) | st.lists(st.text("ab1", min_size=1, max_size=24), max_size=9).map(" ".join)


@given(st.integers(1, 12).flatmap(lambda n: st.lists(st.lists(_CELLS, min_size=n, max_size=n))))
def test_tables_lose_no_letter(rows: list[list[object]]) -> None:
    """At 80 columns a table has the letters of a wide one, and each line fits; a wide one breaks no word."""
    shown = Table("title " * 30, [{f"column {n}": value for n, value in enumerate(row)} for row in rows])
    narrow, wide = shown.lines(80), shown.lines(2000)
    assert max(map(len, narrow.splitlines())) <= 80
    letters, whole = (collections.Counter(re.sub(r"[\s─]", "", text)) for text in (narrow, wide))
    assert letters == whole
    words = {word for row in rows for value in row for word in cell(value).split()}
    assert words <= {*wide.split()}


def test_backends() -> None:
    """Every backend is listed, with its capability record where it can run, as data and as tables."""
    result = run("backends", "--format", "json")
    assert result.exit_code == 0
    found = {one["name"]: one for one in json.loads(result.stdout)}
    assert set(found) == set(names())
    assert found["cpu"]["available"]
    assert found["cpu"]["capabilities"]["lowerings"][0] == "direct"
    for part in ("cpu-capture", "foreach_device", "reason", "global, thread_local, relaxed"):
        assert part in run("backends").stdout


def test_backends_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is unavailable, and a plug-in that fails to load, are listed with the reason, and the status is 0."""

    def load(name: str) -> type[CpuBackend]:
        if name == "cpu":
            raise ImportError("libdevice.so is missing")
        return CpuBackend

    unavailable = classmethod(lambda _: Availability(available=False, reason="no [device] here"))
    monkeypatch.setattr(application, "load", load)
    monkeypatch.setattr(CpuBackend, "is_available", unavailable)
    monkeypatch.setattr(application, "names", lambda: ("cpu", "cpu-capture"))
    result = run("backends")
    assert result.exit_code == 0
    assert "ImportError: libdevice.so is missing" in result.stdout
    assert "no [device] here" in result.stdout
    assert "capability" not in result.stdout


NOT_UNDERSTOOD = [
    (("explained_inputz:DecodeInputs",), "no module 'explained_inputz'"),
    (("explained_input.py:DecodeInputs",), "no file 'explained_input.py'"),
    (("explained_inputs:decodeinput",), "has no 'decodeinput'; did you mean 'DecodeInputs'?"),
    (("explained_inputs",), "say which one, as in explained_inputs:DecodeInputs"),
    (("explained_inputs:HIDDEN",), "'HIDDEN' in explained_inputs is not a subclass of slotgraph.Inputs"),
    (("json:JSONDecoder",), "in json is not a subclass of slotgraph.Inputs, nor a runner"),
    (("what/is this:X",), "there is no module 'what/is this'"),
    ((DECODE, "--size", "bach=3"), "has no axis 'bach'; did you mean 'batch'?"),
    ((DECODE, "--size", "batch:3"), "expected AXIS=LIVE/PADDED"),
    ((DECODE, "--size", "batch=3"), "no size for HIDDEN"),
    ((DECODE, *SIZED, "--size", "batch=3"), "BATCH is given twice"),
    ((DECODE, "--size", "batch=9/8", "--size", "hidden=1"), "BATCH=9/8: expected at most"),
    ((DECODE, "--set", "=3"), "expected NAME or NAME=VALUE"),
    ((DECODE, "--absent", "swa"), "absent names 'swa', which is not an optional slot of"),
    ((DECODE, "--lowering", "foreech"), "lowering 'foreech': this backend has direct, foreach"),
    ((DECODE, "--format", "xml"), "'xml' is not one of 'table', 'json', 'html'"),
    ((MADE, "--size", "batch=3"), "--size: is for a declaration; a runner has its own"),
    ((MADE, "--set", "swa"), "--set: is for a declaration"),
    (("explained_serving:mad",), "explained_serving has no 'mad'; did you mean 'made'?"),
    (("explained_serving:number",), "'number' in explained_serving returned int, which is not a subclass"),
]
FAILS = [
    (("no_inputs:X",), "ModuleNotFoundError at no_inputs.py:1, `import explained_nothing`: No module"),
    (("raising_inputs.py:X",), "KeyError at raising_inputs.py:2, `raise KeyError('oops')`: 'oops'"),
    ((DECODE, "--set", "model.other"), "slot 'swa' exists when 'model.swa' is set"),
    ((DECODE, "--backend", "cpu-captur"), "no backend 'cpu-captur' (did you mean 'cpu-capture'?)"),
    ((DECODE, "--backend", "cpu"), "backend 'cpu' cannot run here: no such chip"),
]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("status", "table"), [(2, NOT_UNDERSTOOD), (1, FAILS)], ids=["not understood", "fails"])
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, status: int, table: Any) -> None:
    """A usage error exits with 2, a user's module or a backend that fails with 1; stderr says why, stdout is empty."""
    unavailable = classmethod(lambda _: Availability(available=False, reason="no such chip"))
    if table is FAILS:
        monkeypatch.setattr(CpuBackend, "is_available", unavailable)
    for arguments, message in table:
        result = run("explain", *arguments)
        assert (result.exit_code, result.stdout) == (status, ""), result.output
        assert message in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr


HELPS: Final = """
import sys
import slotgraph.__main__
from typer.testing import CliRunner
from slotgraph_cli import app

for command in ("", "demo", "suggest", "explain", "backends", "bench", "check", "replay"):
    print(CliRunner().invoke(app, [*command.split(), "--help"]).output)
print(CliRunner().invoke(app, ["--version"]).output)
completed = {"_SLOTGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": "slotgraph ex", "COMP_CWORD": "1"}
print("completed:", CliRunner().invoke(app, prog_name="slotgraph", env=completed).output)
print("imported:", {"torch", "numpy"} & {*sys.modules})
"""


def test_help_and_version() -> None:
    """Help is whole at 80 columns, its examples on lines of their own. Neither it nor completion imports torch."""
    done = python("-c", HELPS)
    shown = done.stdout.splitlines()
    assert (done.stderr, max(map(len, shown)) <= 80, "..." in done.stdout.replace("ARGS]...", "")) == ("", True, False)
    for command in ("demo", "suggest", "explain", "backends", "bench", "check", "replay"):
        assert any(line.startswith(f"    slotgraph {command}") for line in shown)
    assert [name for name in CHECKS if not any(line.startswith(f"  {name} ") for line in shown)] == []
    assert {"slotgraph 0.1.0", "completed: explain", "imported: set()"} <= set(shown)


COMPLETED: Final = """
import sys
import typer.testing
import slotgraph_cli

for words in sys.argv[1:]:
    given = {"COMP_WORDS": f"slotgraph {words}", "COMP_CWORD": str(words.count(" ") + 1)}
    env = {"_SLOTGRAPH_COMPLETE": "complete_bash", **given}
    print(typer.testing.CliRunner().invoke(slotgraph_cli.app, prog_name="slotgraph", env=env).output.split())
print({"torch", "numpy", "slotgraph"} & {*sys.modules})
"""


def test_completed_names() -> None:
    """Shells complete backends, lowerings and checks, those that the library has, and need no torch for that."""
    auto = ["auto", *names()]
    expected = {
        **{f"{command} --backend ": auto for command in ("explain x:y", "bench", "demo")},
        "demo --backend cpu": ["cpu", "cpu-capture"],
        "explain x:y --lowering ": ["auto", *LADDER],
        "explain x:y --lowering f": ["foreach", "fused"],
        "check x:y --only ": [*CHECKS],
        "check x:y --only poison --only pa": ["parity"],
        "check x:y --only nothing": [],
    }
    done = python("-c", COMPLETED, *expected)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [*(str(sorted(known)) for known in expected.values()), "set()"]


HUGE: Final = "9" * 23
LONG: Final = "9" * 5000
TARGETS: Final = (
    *("", ":", "failing_module:", "failing_module:make:x", "failing_module:quits", "failing_module:no_such_name"),
    *("quits_at_once:make", "quits_at_once.py:make", "no_text.py:make", "folder.py:make", "no_such_file.py:make"),
)
UNUSABLE: Final = [
    *(("check", "failing_module:make", option, HUGE) for option in ("--seed", "--rounds")),
    *(
        ("check", "failing_module:make", "--only", "coverage", "--batches", name)
        for name in ("raises", "three", "leaves", "broken", "large", "empty", "odd", "no_such_name")
    ),
    *(("check", f"failing_module:{name}") for name in ("make_without_graphs", "make_quitting")),
    *(("check", target) for target in TARGETS),
    ("explain", "failing_module:Ids", "--size", f"batch={LONG}"),
    *(("bench", "--slots", HUGE), ("bench", "--slotz", "3"), ("explian",), ()),
    *(("replay", file) for file in ("folder", "pipe", "no_such_file", "failing_module.py", "no_text.py")),
    ("replay", "failing_module.py", "failing_module:make", "--step", HUGE),
    ("backends", "--format", "no_such_format"),
]


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_used() -> None:
    """The status is not 0, the reason stands on stderr, and nothing was raised but what ends the command."""
    for arguments in UNUSABLE:
        done = run(*arguments)
        assert done.exit_code in (1, 2), (arguments, done.output)
        assert isinstance(done.exception, SystemExit), (arguments, done.exception)
        assert "Traceback" not in done.stderr
        assert done.output.strip(), arguments
    done = run("check", "failing_module:make", "--batches", "raises")
    assert 'KeyError at failing_module.py:26, `raise KeyError("no such thing")`' in done.stderr


@pytest.mark.usefixtures("folder")
def test_a_check_that_checked_nothing() -> None:
    """It fails, as a table and as data, and says why no batch was taken."""
    large = ("make", "--batches", "large"), "more than the largest bucket, 4"
    for (target, *batches), reason in ((("make_without_graphs",), "graphs are switched off"), large):
        for form in ("table", "json"):
            done = run("check", f"failing_module:{target}", "--format", form, *batches)
            assert done.exit_code == 1
            assert "nothing was checked: " in done.stdout
            assert reason in done.stdout
            assert form == "table" or '"ok": false' in done.stdout


def checked(arguments: str) -> Any:
    """The check, as a shell would call it."""
    return run("check", *arguments.split())


def cells_of(table: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    rows = (line.split() for line in table.splitlines())
    return {row[0]: row[1:] for row in rows if row and row[0] in CHECKS}


@pytest.mark.usefixtures("folder")
def test_check_finds() -> None:
    """A runner with a bug exits with 1; the table names check and slot, the sentence below it the row; or as data."""
    found = checked("checked_engine:faulty --seed 4")
    assert found.exit_code == 1
    cells = cells_of(found.stdout)
    assert list(cells) == ["poison", "parity", "addresses", "coverage", "races", "weights"]
    assert (cells["poison"], cells["races"]) == (["8", "1", "weights"], ["8", "0", "-"])
    assert "poison: live row 0 of the output changed" in found.stdout
    assert "when the tail of slot 'weights' held nan instead of 1.0" in found.stdout
    found = checked("checked_engine:faulty --format json --only poison --only coverage --rounds 1")
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert data["steps"] == {"poison": 6, "coverage": 6}
    assert [(one["check"], one["slot"]) for one in data["findings"]] == [("poison", "weights")]


@pytest.mark.usefixtures("folder")
def test_check_of_a_sound_runner() -> None:
    """A function that makes a runner, and one that is captured already; drawn batches, a function's, and a list."""
    for target in ("checked_engine:make_sound", "checked_engine.py:make_sound", "checked_engine:captured"):
        found = checked(target)
        assert (found.exit_code, found.stderr) == (0, "")
        assert "DecodeRunner: no findings (poison on " in found.stdout
    for name, steps in (("make_batch", "8"), ("TWO", "2")):
        found = checked(f"checked_engine.py:make_sound --batches {name} --only poison")
        assert (found.exit_code, cells_of(found.stdout)) == (0, {"poison": [steps, "0", "-"]})


NOT_CHECKED = {
    "number": (2, "'number' in checked_engine is not a runner, nor a function without"),
    "model": (2, "'model' in checked_engine is not a runner, nor a function without"),
    "make_trouble": (1, "ZeroDivisionError at checked_engine.py:19, `return 1 // 0`"),
    "captured --only poisson": (2, "checks are poison, parity, addresses, coverage, races, weights; did you mean"),
    "captured --only transition": (2, "check 'transition' is not for this runner: no slot has then="),
    "": (2, "expected MODULE:NAME, a module or a .py file and a name in it, as in my_engine.runners:decode"),
    "captured --batches number": (2, "'number' in checked_engine is no batches"),
    "captured --rounds 0": (2, "--rounds"),
}


@pytest.mark.usefixtures("folder")
def test_check_refuses() -> None:
    """What is not understood exits with 2, what a user's code raises with 1; each says what it was."""
    for arguments, (status, said) in NOT_CHECKED.items():
        found = checked(f"checked_engine:{arguments}")
        assert found.exit_code == status, arguments
        assert said in " ".join(found.stderr.split()), found.stderr


@pytest.mark.usefixtures("folder")
def test_what_a_target_is() -> None:
    """A target without a module or a name says what it must have."""
    for command, target in itertools.product(("check", "explain"), ("", ":", ":made", "checked_engine:")):
        found = run(command, target)
        assert found.exit_code == 2
        assert "expected MODULE:NAME, a module or a .py file and a name in it" in " ".join(found.stderr.split())
        assert f"got {target!r}" in " ".join(found.stderr.split())


def test_progress(folder: pathlib.Path) -> None:
    """At a terminal a bar on standard error has the time left; standard output has the report alone."""
    line = [sys.executable, "-m", "slotgraph", "check", "checked_engine.py:make_sound", "--rounds", "50"]
    shown, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=terminal, cwd=folder, env=environment) as done:
        os.close(terminal)
        told = b""
        with contextlib.suppress(OSError):  # as a terminal ends
            while chunk := os.read(shown, 4096):
                told += chunk
        report = done.stdout.read().decode() if done.stdout else ""
    os.close(shown)
    assert done.returncode == 0
    assert "DecodeRunner: no findings" in report
    assert "\x1b" not in report
    text = told.decode()
    assert "looking at batches" in text
    assert "checking poison" in text
    assert re.search(r"\d:\d\d:\d\d", text), text[-500:]


def test_replay(folder: pathlib.Path) -> None:
    """The exit status says whether all is the same; JSON says what differs, or what the file holds; 2 is a refusal."""
    sys.path.append(str(folder))
    runner = ready(importlib.import_module("replayed_runners").right())
    with record(runner, "home.safetensors", outputs=True):
        runner({"input_ids": [2, 5, 9], "limits": {"window": [7]}})
        with pytest.raises(BatchError):
            runner({"input_ids": [2.5], "limits": {"window": [7]}})
    assert run("replay", "home.safetensors", "replayed_runners:right", "--step", "0").exit_code == 0
    done = run("replay", "home.safetensors", "replayed_runners.py:late", "--format", "json")
    assert done.exit_code == 1
    first, last = json.loads(done.stdout)["steps"]
    assert first["outcome"] == "different"
    assert first["lines"][-1].startswith("outputs row 1, at [1, 0]: here ")
    assert last["outcome"] == "raised"
    assert json.loads(run("replay", "home.safetensors", "--format", "json").stdout)["format"] == 5
    assert "input_ids" in run("replay", "home.safetensors", "--step", "0").stdout
    for arguments, says in (
        (["nowhere.safetensors"], "No such file"),
        (["replayed_runners.py"], "replayed_runners.py: "),
        (["home.safetensors", "replayed_runners:decod"], "has no 'decod'"),
        (["home.safetensors", "replayed_runners:nothing"], "nothing"),
        (["home.safetensors", "replayed_runners:right", "--step", "7"], "no step 7: it has 0, 1"),
    ):
        done = run("replay", *arguments)
        assert done.exit_code == 2, done.output
        assert says in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_an_output_that_takes_nothing() -> None:
    """A full device and a pipe that nobody reads end a command without a traceback."""
    line = [sys.executable, "-m", "slotgraph", "explain", "failing_module:Ids"]
    with pathlib.Path("/dev/full").open("wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, check=False, timeout=300)
    assert done.returncode == 1
    assert done.stderr.decode() == "the output cannot be written: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, check=False, timeout=300)
    os.close(writing)
    assert done.returncode in (0, 1)
    assert done.stderr.decode() == ""


CONDITIONS: Final = {
    "target": "",
    "measured": "whole step",
    "ours": "in_graph",
    "device": "H200",
    "slotgraph": "0.1.0",
    "torch": "2.13.0",
    "date": "2026-11-23",
}


def test_bench_page_draws_every_figure() -> None:
    """Host and device have bars and a table each, with every way and ours marked; ratios are to ours; notes say why."""
    names = ("per_slot", "regrouped", "in_graph", "fused", "foreach", "slot_by_slot", "bare")
    rows: list[dict[str, Any]] = [
        {"slots": slots, "live": 7, "padded": 8, "lowering": name, "host_us": 10.25 + n, "gpu_us": 1000.5 * n or None}
        for n, (slots, name) in enumerate(itertools.product((4, 12), names))
    ]
    missing = {"slots": 4, "live": 7, "padded": 8, "lowering": "compiled", "note": "no compiler here"}
    page = html(BenchReport([*rows, {**missing, "host_us": None, "gpu_us": None}], CONDITIONS))
    by_table = [(slots, time) for slots in (4, 12) for time in ("host_us", "gpu_us")]
    shown = [(one, time) for slots, time in by_table for one in rows if one["slots"] == slots and one[time]]
    figures = [(one["lowering"], cell(one[time])) for one, time in shown]
    figures = [(f"{name} (ours)" if name == "in_graph" else name, figure) for name, figure in figures]
    assert re.findall(r'<div style="--part:[\d.]+%">([\w ()]+) <b>([\d.,]+)</b></div>', page) == figures
    parts = (f"<td>{figure}</td>" for _, figure in figures)
    title = "<title>slotgraph bench on H200; slotgraph 0.1.0, torch 2.13.0; 2026-11-23</title>"
    more = (
        title,
        "host microseconds of a whole step with 12 slots on H200",
        "device microseconds",
        "0.8 x",
        "--part:100.0%",
    )
    assert [part for part in (*parts, *more, "compiled: no compiler here") if part not in page] == []
    assert bench.ON_A_CPU not in page


@pytest.mark.slow
def test_bench_end_to_end(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The figures of one quick run, as data and, of the same, as tables."""
    quick, file = ("bench", "--quick", "--slots", "4", "--slots", "12", "--backend", "cpu"), tmp_path / "rows.json"
    result = run(*quick, "--json", str(file))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    data = json.loads(file.read_text(encoding="utf-8"))
    monkeypatch.setattr(application, "measure_inputs", lambda *_, **__: from_data(data, BenchReport))
    shown = " ".join(run(*quick).stdout.split())
    found = {(one["lowering"], one["slots"], one["live"], one["padded"]) for one in data["rows"]}
    steps = {"per_slot", "regrouped", *choose("cpu").capabilities.lowerings, "bare"}
    sizes = [(live, padded) for padded, lives in bench.SIZES.items() for live in lives]
    assert found == {(name, slots, *size) for name, slots, size in itertools.product(steps, (4, 12), sizes)}
    for one in data["rows"]:
        assert 0 < one["host_p10_us"] <= one["host_us"] <= one["host_p90_us"]
        assert [one["gpu_us"], one["gpu_p10_us"], one["gpu_p90_us"]] == [None] * 3
    told = {"backend": "cpu", "ours": "direct", "quick": True, "torch": torch.__version__}
    assert told.items() <= data["conditions"].items()
    for part in ("200/256", "4096/4096", "bench on cpu; slotgraph 0.1.0", "Ours is direct", bench.ON_A_CPU):
        assert part in shown


BENCHED: Final = {
    "checked_engine:make_sound": "bench of DecodeRunner of DecodeInputs on cpu; ",
    "checked_engine:make_sound --batches make_batch": "with 2 slots on cpu",
    "checked_engine:make_sound --batches TWO": " given/4\n",
    "explained_inputs:DecodeInputs --set model.swa --size batch=7/8 --size hidden=16 --backend cpu": " 6/8 ",
}


@pytest.mark.usefixtures("folder")
def test_bench_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner and a declaration, with batches that are drawn, of a function, and in a list."""
    monkeypatch.setattr(bench, "QUICK", (1, 2, 0))
    for arguments, part in BENCHED.items():
        found = run("bench", *arguments.split(), "--quick")
        assert (found.exit_code, found.stderr) == (0, ""), found.output
        assert part in found.stdout, found.stdout
        assert {"per_slot", "regrouped", "slot_by_slot", "bare"} <= {*found.stdout.split()}
        assert "(ours)" in found.stdout


NOT_BENCHED: Final = {
    "explained_serving:number": "'number' in explained_serving returned int, which is not a subclass",
    "explained_serving:make --size batch=4": "--size: is for a declaration; a runner has its own: leave it out",
    "explained_serving:make --backend cpu": "--backend: is for a declaration",
    "checked_engine:make_sound --batches number": "'number' in checked_engine is no batches",
    "replayed_runners:right": "a batch that suits a function cannot be drawn; give batches of your own",
    "--batches TWO": "--batches: is for a target: name one",
}


@pytest.mark.usefixtures("folder")
def test_bench_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not understood exits with 2, before anything is measured."""
    monkeypatch.setattr(bench, "measure", pytest.fail)
    for arguments, said in NOT_BENCHED.items():
        found = run("bench", *arguments.split())
        assert found.exit_code == 2, found.output
        assert said in " ".join(found.stderr.split()), found.stderr


def test_wrong_options_are_refused_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured whose figures could not be shown."""
    monkeypatch.setattr(bench, "measure", pytest.fail)
    for option, value, message in (
        ("--slots", "1", "greater than or equal to 2"),
        ("--slots", "x", "valid integer"),
        ("--output", "no/such/folder/figures.json", "there is no folder 'no/such/folder'"),
    ):
        result = run("bench", option, value)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_demo_shows_the_mistake_and_its_cure(backend: str) -> None:
    """The number by hand is wrong and the declared one right; the check names the slot; three ways are timed."""
    shown = run("demo", "--backend", backend).stdout
    words = " ".join(shown.split())
    assert "third request is 14; it should be 7" in words
    assert "third request is 7." in words
    assert "the tail of slot 'ids'" in words
    assert re.findall(r"^  (by hand|slotgraph|no inputs) +\u2588+ \d+ us$", shown, re.MULTILINE) == [
        "by hand",
        "slotgraph",
        "no inputs",
    ]


def test_suggest_writes_a_declaration(tmp_path: pathlib.Path) -> None:
    """From a list in a file, or from a function; to the screen or to a file."""
    samples = tmp_path / "some_samples.py"
    samples.write_text(
        "import torch\nbatches = [{'x': torch.ones(n)} for n in (2, 3)]\ndef make():\n    return batches\n"
    )
    shown = run("suggest", f"{samples}:batches", "--name", "Mine").stdout
    assert "class Mine(Inputs):" in shown
    assert "x: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=...)" in shown
    made = tmp_path / "inputs.py"
    assert run("suggest", f"{samples}:make", "--name", "Mine", "--output", str(made)).exit_code == 0
    assert made.read_text(encoding="utf-8") == shown
    refused = run("suggest", f"{samples}:torch")
    assert refused.exit_code == 2
    assert "no batches" in refused.stderr
