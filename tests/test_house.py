"""The house stands as it was drawn: links, packages, sizes of modules, and which folder knows which.

`make house` runs this file as a program. It prints how large the house is, how its modules hang together, and how far a
batch goes through it. The exit code is 1 if modules import in circles or a batch goes further than it may.
"""

import ast
import collections
import functools
import importlib
import importlib.metadata
import inspect
import io
import pickle
import pkgutil
import re
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import rich.box
import rich.console
import rich.table
import torch
import typer.testing
from torch.utils._device import _device_constructors

import slotgraph
import slotgraph.attention
from slotgraph import BATCH, TOKENS, EagerRunner, InputBuffers, Inputs, copied
from slotgraph.backends import load, names
from slotgraph.errors import SlotGraphError
from slotgraph_cli import app
from tests.runners import prefilled
from tests.runners.models import decoder, ready

ROOT = Path(__file__).parents[1]
FOLDERS = ("dataflow", "backends", "runners")
FACE = ROOT / "src" / "slotgraph"
SHOWN = (
    "__init__ __main__ _face attention config errors extend graphs metrics pool ranks reports speculative standard "
    "testing"
)
PAGES = tuple(f"{name}.py" for name in SHOWN.split())
FORBIDDEN = {"dataflow": {"backends", "runners"}, "backends": {"runners"}, "runners": set[str]()}
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

MODULE_LINES, FUNCTION_LINES, FACE_LINES = 700, 60, 60


@functools.cache
def tree(module: Path) -> ast.Module:
    """The module's syntax."""
    return ast.parse(module.read_text(encoding="utf-8"), module)


def dotted(module: Path) -> str:
    """The module's name within slotgraph: dataflow.axes for dataflow/axes.py, dataflow for dataflow/__init__.py."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = frozenset(map(dotted, MODULES))


def targets(module: Path, node: ast.ImportFrom) -> Iterator[str]:
    """The modules within slotgraph that a relative import loads."""
    here = dotted(module).split(".")
    package = here if module.name == "__init__.py" else here[:-1]
    base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
    for alias in node.names:
        name = ".".join([*base, alias.name])
        yield name if name in NAMES else ".".join(base)


def imports() -> dict[str, set[str]]:
    """By module, the others that it imports, wherever the imports stand."""
    found = dict[str, set[str]]()
    for path in MODULES:
        nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) and node.level]
        found[dotted(path)] = {target for node in nodes for target in targets(path, node)} - {dotted(path)}
    return found


def circles(graph: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """The largest sets of modules each of which reaches all others of its set."""

    def reached(name: str) -> set[str]:
        seen, waiting = set[str](), [name]
        while waiting:
            fresh = set(graph.get(waiting.pop(), ())) - seen
            seen |= fresh
            waiting += fresh
        return seen

    reach = {name: reached(name) for name in graph}
    found = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in graph}
    return sorted((circle for circle in found if circle), key=sorted)


def test_the_package_and_its_links() -> None:
    """Links are relative, beside them is the face alone, and pyproject.toml lists all that a wheel needs."""
    for folder in FOLDERS:
        link = FACE / folder
        assert (link.is_symlink(), link.readlink().is_absolute(), link.resolve()) == (True, False, ROOT / folder)
    found = {path.name for path in FACE.iterdir() if path.name != "__pycache__"}
    assert found == {*PAGES, "py.typed", *FOLDERS}
    assert [n for n in PAGES if len((FACE / n).read_text(encoding="utf-8").splitlines()) >= FACE_LINES] == []
    tools = PYPROJECT["tool"]["setuptools"]
    assert sorted(path.stem for path in FACE.parent.glob("*.py")) == tools["py-modules"]
    assert PYPROJECT["project"]["scripts"] == {"slotgraph": "slotgraph_cli:main"}  # a module that starts without torch
    on_disk = {"slotgraph"} | {f"slotgraph.{dotted(path)}" for path in MODULES if path.name == "__init__.py"}
    assert set(tools["packages"]) == on_disk
    assert [path for path in MODULES if not (path.parent / "__init__.py").exists()] == []
    assert "py.typed" in tools["package-data"]["slotgraph"]


def found_in(look: Callable[[ast.Module], Iterable[object]]) -> dict[str, list[object]]:
    """By module, what is found in its code, of those where something is."""
    found = {path.relative_to(ROOT).as_posix(): list(look(tree(path))) for path in MODULES}
    return {name: faults for name, faults in found.items() if faults}


def test_modules_and_functions_are_short() -> None:
    """A module has 700 lines at most, and a function 60: a longer one has two subjects."""

    def long(module: ast.Module) -> Iterator[object]:
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    yield node.name, lines

    assert found_in(long) == {}
    assert [path for path in MODULES if len(path.read_text(encoding="utf-8").splitlines()) > MODULE_LINES] == []


def test_imports_go_one_way() -> None:
    """Imports go from runners to dataflow and backends, and no other way, wherever they stand in a module."""
    for name, used in imports().items():
        folders = {target.split(".")[0] for target in used}
        assert folders & FORBIDDEN[name.split(".")[0]] == set(), name
        assert folders <= set(FOLDERS), f"{name}: an import of the face, or one that leads out of the package"


def test_allocations_name_their_device() -> None:
    """A default device, of the caller's or of the process, is that of no tensor that the library makes."""
    factories = {function.__name__ for function in _device_constructors()}

    def placeless(module: ast.Module) -> Iterator[object]:
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and ast.unparse(node.func.value) == "torch"
                and node.func.attr in factories
                and "device" not in {keyword.arg for keyword in node.keywords}
            ):
                yield f"{node.lineno}: torch.{node.func.attr}"

    assert found_in(placeless) == {}


def test_no_circles() -> None:
    """No modules import one another in a circle. Imports inside functions and under TYPE_CHECKING count."""
    assert circles(imports()) == []


def test_version_is_the_installed_one() -> None:
    """What is installed is what pyproject.toml describes; where not, the environment is older than the file."""
    assert importlib.metadata.version("slotgraph") == PYPROJECT["project"]["version"]


def test_own_backends_have_their_modules() -> None:
    """Each backend that this package names has a module of its own."""
    for name in names():
        kind = load(name)
        assert (kind.name, kind.__module__) == (name, f"slotgraph.backends.{name.replace('-', '_')}")


def test_constraints_pin_exactly() -> None:
    """Every line of constraints.txt pins one public version, so that two machines install the same."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if line.count("==") != 1 or set(line) & set("+@/ ;")] == []


MODULES_SHOWN = {info.name for info in pkgutil.iter_modules(slotgraph.__path__) if not info.ispkg}
SHOWING = sorted(MODULES_SHOWN - {"__main__", "_face", "errors", "standard", "testing"})


def test_the_face_is_small() -> None:
    """What most programs need, and the modules beside it without a further import."""
    assert len(slotgraph.__all__) <= 25
    for name in ("errors", "standard"):
        assert importlib.import_module(f"slotgraph.{name}") is getattr(slotgraph, name)


@pytest.mark.parametrize("name", SHOWING)
def test_every_submodule_shows_what_it_says(name: str) -> None:
    """And nothing that another one, or the face, shows too."""
    module = importlib.import_module(f"slotgraph.{name}")
    shown = set(module.__all__)
    assert {one for one in vars(module) if one.isidentifier() and not one.startswith("_")} == shown
    others = [set(importlib.import_module(f"slotgraph.{one}").__all__) for one in SHOWING if one != name]
    assert shown.isdisjoint(set(slotgraph.__all__).union(*others))


def test_the_face_shows_nothing_else() -> None:
    """Completion has the public names, the public submodules that are imported, and the version."""
    others = set(dir(slotgraph)) - {*slotgraph.__all__, "__version__"}
    assert {"backends", "errors", "standard"} <= others <= {"backends", *MODULES_SHOWN} - {"__main__", "_face"}


@pytest.mark.parametrize("name", ["", *SHOWING, "standard", "testing"])
def test_public_names_carry_the_public_module(name: str) -> None:
    """Classes and functions do: pickle finds them there, and `inspect` still finds what functions and methods say."""
    module = importlib.import_module(f"slotgraph.{name}".rstrip("."))
    values = {one: getattr(module, one) for one in module.__all__}
    defined = {one: value for one, value in values.items() if inspect.isclass(value) or inspect.isfunction(value)}
    assert defined
    for one, value in defined.items():
        assert (value.__module__, pickle.loads(pickle.dumps(value))) == (module.__name__, value)  # noqa: S301 - ours
        if inspect.isfunction(value):
            assert f"def {one}(" in inspect.getsource(value)


def below(kind: type[Any]) -> Iterator[type[Any]]:
    """All subclasses of a class that slotgraph itself defines."""
    for one in kind.__subclasses__():
        yield from below(one)
        if one.__module__.startswith("slotgraph."):
            yield one


def test_errors_and_declarations_are_public() -> None:
    """Each error can be imported from `slotgraph.errors`, each ready-made declaration from its public module."""
    errors = [one for one in below(SlotGraphError) if one.__name__.endswith(("Error", "Errors"))]
    inputs = [one for one in below(slotgraph.Inputs) if "slotgraph" in vars(one)]  # the others are of views
    ready = {
        module: [one for one in inputs if one.__module__ == module.__name__]
        for module in (slotgraph.standard, slotgraph.attention)
    }
    assert len(errors) > 10
    assert [len(declared) > 5 for declared in ready.values()] == [True, True]
    public: list[tuple[Any, list[Any]]] = [(slotgraph.errors, [SlotGraphError, *errors]), *ready.items()]
    for module, classes in public:
        assert [one for one in classes if getattr(module, one.__name__, None) is not one] == []


@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
def test_the_example_passes_its_own_check(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved to a file, its runner has no finding, by the command that the README names."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    code = "".join(block for block in blocks if ">>>" not in block)
    assert code.count("buckets=[") == 1
    file = tmp_path / "read_me_example.py"
    file.write_text(code.replace("buckets=[", f'backend="{backend}", buckets=['), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "read_me_example", raising=False)
    done = typer.testing.CliRunner().invoke(app, ["check", f"{file}:runner", "--seed", "0"])
    assert done.exit_code == 0, done.output
    assert "no findings" in done.stdout


EMULATED = frozenset({"operators.py", "recorder.py", "cpu_capture.py", "cpu.py"})
"""Files of backends/ that stand in for a device, which does by itself what they do."""
CALLED_AGAIN = "cpu.py"
"""The file whose replay is the step itself."""


class Figure(NamedTuple):  # one figure. most: what it may come to, None where nothing is said. more: what it is made of
    name: str
    value: int
    most: int | None = None
    more: str = ""


class Three(Inputs):  # three slots of a decode step
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


class Growing(Three):  # which knows its next step
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda ids: ids + 1)


def step(view: Three) -> torch.Tensor:
    """A row a token."""
    return view.ids + view.places


def tokens_of(path: Path) -> int:
    """Names, operators and numbers of a file; strings and comments do not count, and so neither do docstrings."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    return sum(one.type in kinds for one in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline))


def code_lines_of(path: Path) -> int:
    """Lines of a file that hold a name, an operator or a number."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    found = tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
    return len({one.start[0] for one in found if one.type in kinds})


def sizes() -> Iterator[Figure]:
    """How large the library and its tests are, in tokens. They have no limit: one that moves is none."""
    own = [*MODULES, *FACE.glob("*.py"), *FACE.parent.glob("*.py")]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if ".venv" not in path.parts]
    tokens = sum(map(tokens_of, own))
    yield Figure("tokens", tokens)
    yield Figure("tokens in ten code lines", round(10 * tokens / sum(map(code_lines_of, own))))
    yield Figure("files", len(own))
    yield Figure("tokens of tests/", sum(map(tokens_of, tests)))


def depth(graph: Mapping[str, Iterable[str]]) -> int:
    """Modules on the longest way through imports that have no circle."""

    @functools.cache
    def floors(name: str) -> int:
        return 1 + max((floors(other) for other in graph.get(name, ())), default=0)

    return max(map(floors, graph))


def structure() -> Iterator[Figure]:
    """How modules hang together, and names that have two meanings."""
    graph = imports()
    found = circles(graph)
    yield Figure("modules in circles of imports", sum(map(len, found)), 0)
    if not found:
        inside = {name: {one for one in used if one.startswith("runners")} for name, used in graph.items()}
        yield Figure("floors of runners/", depth({n: used for n, used in inside.items() if n.startswith("runners")}), 9)
    nodes = [node for path in MODULES for node in ast.walk(tree(path))]
    classes = collections.Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    twice = sorted(name for name, count in classes.items() if count > 1 and not name.startswith("_"))
    yield Figure("names of several classes", len(twice), 0, ", ".join(twice))
    yield Figure("names in the face", len(slotgraph.__all__), 24)


def path_of(run: Callable[[], object]) -> tuple[int, int]:
    """Our own files and Python frames of one call, without gradients, as engines call it.

    On `cpu` a graph is the step called again: what is below a replay there stands for the device.
    """
    seen, below = list[str](), 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal below
        path = Path(frame.f_code.co_filename)
        if path.name == CALLED_AGAIN and frame.f_code.co_name == "replay":
            below += {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and "slotgraph" in path.parts and path.name not in EMULATED and not below:
            seen.append(str(path))

    with torch.no_grad():
        sys.setprofile(note)
        try:
            run()
        finally:
            sys.setprofile(None)
    return len(set(seen)), len(seen)


def batch_of(rows: int) -> dict[str, torch.Tensor]:
    """A batch of three slots."""
    return {"ids": torch.arange(rows), "places": torch.arange(rows), "lengths": torch.ones(rows, dtype=torch.int32)}


Call = Callable[[], object]


def known(runner: Callable[[Any], object], batch: Any) -> Call:
    """Run a batch until nothing about it is new; the call that runs it again."""
    for _ in range(40):
        runner(batch)
    return lambda: runner(batch)


def never_seen(runner: Callable[[Any], object]) -> Call:
    """The call of a size that never came, after other sizes."""
    for rows in (7, 3, 6, 2):
        runner(batch_of(rows))
    batch = batch_of(5)
    return lambda: runner(batch)


def an_edit(runner: Any) -> Call:
    """The call of a step for which two requests change."""
    steps = runner.steps(batch_of(5))
    few = torch.arange(2)
    last = next(steps)

    def go_on() -> None:
        nonlocal last
        last.edit([1, 2], places=few)
        last = next(steps)

    for _ in range(5):
        go_on()
    return go_on


def calls() -> Iterator[tuple[str, Call]]:
    """Calls whose way through the house is counted, by name."""
    for name in ("cpu", "cpu-capture"):
        backend = load(name)()
        for lowering in filter("slot_by_slot".__ne__, backend.capabilities.lowerings):
            make: Any = functools.partial(decoder, Three, step, buckets=[8], backend=backend, lowering=lowering)
            yield f"a known step: {name}, {lowering}", known(make(), batch_of(5))
        yield f"a known step: eager, {name}", known(EagerRunner(Three, step, backend=backend), batch_of(5))
    for kind in ("breakable", "piecewise"):
        prefill = ready(prefilled.runner_of(kind, prefilled.Model(named=kind == "piecewise"), "cpu-capture"))
        yield f"a known step: {kind}, cpu-capture", known(prefill, prefilled.batch_of([3, 2], 0))
    for lowering in ("direct", "foreach", "in_graph"):
        make = functools.partial(decoder, step=step, buckets=[8], backend="cpu-capture", lowering=lowering)
        yield f"a size never seen: {lowering}", never_seen(make(Three))
        first = make(Three)
        yield f"a first batch: {lowering}", functools.partial(first, batch_of(5))
        buffers = InputBuffers(Three, {BATCH: 8, TOKENS: 8}, backend="cpu-capture", lowering=lowering)
        yield f"a fill of InputBuffers: {lowering}", known(buffers.at({BATCH: 8, TOKENS: 8}).fill, batch_of(5))
        yield f"an edit: {lowering}", an_edit(make(Growing, output_rows=None))


def paths() -> Iterator[Figure]:
    """How far a batch of three slots goes."""
    for name, call in calls():
        files, frames = path_of(call)
        is_known = name.startswith("a known step")
        is_whole = is_known and not any(kind in name for kind in ("eager", "breakable", "piecewise"))
        yield Figure(f"files of {name}", files, 6 if is_whole else None)
        yield Figure(f"frames of {name}", frames, 14 if is_whole else None)


def main() -> int:
    """Print the table; the exit code."""
    figures = [*sizes(), *structure(), *paths()]
    table = rich.table.Table("figure", "now", "at most", "", box=rich.box.SIMPLE)
    for one in figures:
        most = "" if one.most is None else f"{one.most:,}"
        over = one.most is not None and one.value > one.most
        table.add_row(one.name, f"[red]{one.value:,}[/]" if over else f"{one.value:,}", most, one.more)
    rich.console.Console().print(table)
    return int(any(one.most is not None and one.value > one.most for one in figures))


if __name__ == "__main__":
    sys.exit(main())
