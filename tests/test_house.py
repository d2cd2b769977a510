"""The house stands as it was drawn: links, packages, sizes of modules, and which folder knows which."""

import ast
import importlib
import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from slotgraph.backends import load, names

ROOT = Path(__file__).parents[1]
FOLDERS = ("dataflow", "backends", "runners")
FACE = ROOT / "src" / "slotgraph"
PAGES = ("__init__.py", "__main__.py", "errors.py", "standard.py", "testing.py")
FORBIDDEN = {
    "dataflow": {"backends", "runners"},
    "backends": {"runners"},
    "runners": set[str](),
}
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

CLOCKS = {
    "backends/test_contract.py",  # what events measure lies within what the host's clock measures
    "npu/test_standin_streams.py",  # as above
    "packing.py",  # a backend's own events
    "plugin/fake_device/slotgraph_fake_device.py",  # as above
    "soak.py",  # a program
}
"""Tests, apart from benchmarks, that read a clock: nowhere is what they read held to a bound in seconds."""

MODULE_LINES = 700
FUNCTION_LINES = 60
FACE_LINES = 60

each_module = pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
each_folder = pytest.mark.parametrize("folder", FOLDERS)


def tree(module: Path) -> ast.Module:
    """The module's syntax."""
    return ast.parse(module.read_text(encoding="utf-8"), module)


def dotted(module: Path) -> str:
    """The module's name within slotgraph: dataflow.axes for dataflow/axes.py, dataflow for dataflow/__init__.py."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = frozenset(map(dotted, MODULES))


def targets(module: Path, node: ast.ImportFrom, known: Collection[str] = NAMES) -> Iterator[str]:
    """The modules within slotgraph that a relative import loads."""
    here = dotted(module).split(".")
    package = here if module.name == "__init__.py" else here[:-1]
    base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else [])]
    for alias in node.names:
        name = ".".join([*base, alias.name])
        yield name if name in known else ".".join(base)


def is_type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: no function's body, nothing that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.stmt) and is_type_checking(child):
            continue
        yield child
        yield from at_import(child)


def relative_imports(nodes: Iterator[ast.AST]) -> Iterator[ast.ImportFrom]:
    """The relative imports among nodes."""
    return (node for node in nodes if isinstance(node, ast.ImportFrom) and node.level)


def imports(nodes: Callable[[ast.AST], Iterator[ast.AST]]) -> dict[str, set[str]]:
    """By module, the others that it imports, in those of its nodes."""
    found = {
        dotted(path): {target for node in relative_imports(nodes(tree(path))) for target in targets(path, node)}
        for path in MODULES
    }
    return {name: used - {name} for name, used in found.items()}


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


@each_folder
def test_links_resolve_and_are_relative(folder: str) -> None:
    """Each folder is linked from the package by a relative link that leads to it."""
    link = FACE / folder
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / folder


def test_face_holds_nothing_but_the_face() -> None:
    """The package's own folder has the face, its public submodules, the marker for type checkers and the three links.

    The face does not import `slotgraph.testing`, which needs hypothesis.
    """
    found = {path.name for path in FACE.iterdir() if path.name != "__pycache__"}
    assert found == {*PAGES, "py.typed", *FOLDERS}


def test_modules_outside_the_package_are_listed() -> None:
    """The pytest plugin stands beside the package: every run of pytest loads it, and the package would bring torch."""
    outside = sorted(path.stem for path in FACE.parent.glob("*.py"))
    assert outside == PYPROJECT["tool"]["setuptools"]["py-modules"] == ["slotgraph_pytest"]


@pytest.mark.parametrize("name", PAGES)
def test_face_is_short(name: str) -> None:
    """The face is a list of names, not a place for code."""
    assert len((FACE / name).read_text(encoding="utf-8").splitlines()) < FACE_LINES


def test_every_subpackage_is_listed() -> None:
    """A package on disk that pyproject does not list would be missing from the wheel."""
    on_disk = {"slotgraph"} | {f"slotgraph.{dotted(path)}" for path in MODULES if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_every_module_is_in_a_package() -> None:
    """A module in a folder without __init__.py would be missing from the wheel."""
    assert [path for path in MODULES if not (path.parent / "__init__.py").exists()] == []


@each_module
def test_module_is_short(module: Path) -> None:
    """A module has 700 lines at most: a longer one has two subjects. None is split because of its length alone."""
    assert len(module.read_text(encoding="utf-8").splitlines()) <= MODULE_LINES


@each_module
def test_functions_are_short(module: Path) -> None:
    """A function has 60 lines at most, its docstring included."""
    functions = (node for node in ast.walk(tree(module)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = {node.name: (node.end_lineno or node.lineno) - node.lineno + 1 for node in functions}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}


@each_module
def test_folders_import_relatively(module: Path) -> None:
    """No module of the folders names slotgraph in an import: type checkers would see two identities of one class."""
    found = [
        node.lineno
        for node in ast.walk(tree(module))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "slotgraph" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "slotgraph")
    ]
    assert found == []


@each_module
def test_imports_go_one_way(module: Path) -> None:
    """Imports go from runners to dataflow and backends, and no other way, wherever they stand in a module."""
    folder = module.relative_to(ROOT).parts[0]
    used = {
        target.split(".")[0] for node in relative_imports(ast.walk(tree(module))) for target in targets(module, node)
    }
    assert used & FORBIDDEN[folder] == set()
    assert used <= set(FOLDERS), "an import of the face, or one that leads out of the package"


@each_module
def test_no_assert(module: Path) -> None:
    """Python's -O removes asserts, so what must hold is raised as an error."""
    assert [node.lineno for node in ast.walk(tree(module)) if isinstance(node, ast.Assert)] == []


@each_module
def test_allocations_name_their_device(module: Path) -> None:
    """A default device, of the caller's or of the process, is that of no tensor that the library makes."""
    factories = {function.__name__ for function in _device_constructors()}
    calls = (node for node in ast.walk(tree(module)) if isinstance(node, ast.Call))
    found = {
        f"{node.lineno}: torch.{node.func.attr}"
        for node in calls
        if isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in factories
        and "device" not in {keyword.arg for keyword in node.keywords}
    }
    assert found == set()


def test_no_cycle_between_modules() -> None:
    """No module needs, while it is imported, one that needs it."""
    try:
        list(TopologicalSorter(imports(at_import)).static_order())
    except CycleError as error:
        pytest.fail("modules import one another in a circle: " + " -> ".join(error.args[1]))


def test_no_circles_by_any_import() -> None:
    """Nor are there any if imports inside functions and under TYPE_CHECKING count."""
    assert circles(imports(ast.walk)) == []


@pytest.mark.parametrize(
    "source",
    [
        "from .b import x",
        "def f():\n    from .b import x",
        "def f():\n    def g():\n        from . import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x",
        "import typing\nclass A:\n    if typing.TYPE_CHECKING:\n        from .b import x",
        "try:\n    from ..dataflow.b import x\nexcept ImportError:\n    x = None",
    ],
)
def test_a_circle_is_seen(source: str) -> None:
    """Wherever the import stands that closes it, and however long it is."""
    here = ROOT / "dataflow" / "a.py"
    known = {"dataflow.a", "dataflow.b"}
    used = {target for node in relative_imports(ast.walk(ast.parse(source))) for target in targets(here, node, known)}
    assert circles(
        {"dataflow.a": used, "dataflow.b": {"dataflow.c"}, "dataflow.c": {"dataflow.a"}, "dataflow.d": used}
    ) == [{"dataflow.a", "dataflow.b", "dataflow.c"}]


def test_tests_read_no_clock() -> None:
    """A bound on how long something takes fails on a loaded machine: tests judge figures that they make themselves."""
    clock = re.compile(r"\b(monotonic|perf_counter|process_time|thread_time|timeit|time\.time)(_ns)?\b")
    tests = ROOT / "tests"
    files = {path.relative_to(tests).as_posix() for path in tests.rglob("*.py") if path != Path(__file__)}
    reading = {name for name in files if clock.search((tests / name).read_text(encoding="utf-8"))}
    assert {name for name in reading if not name.startswith("benchmarks/")} == CLOCKS


def test_types_are_shipped() -> None:
    """The marker that lets type checkers read the installed package is there and goes into the wheel."""
    assert (FACE / "py.typed").exists()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"]["slotgraph"]


def test_version_is_the_installed_one() -> None:
    """What is installed is what pyproject.toml describes; where not, the environment is older than the file."""
    assert importlib.metadata.version("slotgraph") == PYPROJECT["project"]["version"]


def test_own_backends_have_their_modules() -> None:
    """Each backend that this package names is a module of its own, which exports the same name as all others."""
    for name in names():
        module = importlib.import_module(f"slotgraph.backends.{name.replace('-', '_')}")
        assert module.Adapter is load(name)
        assert module.Adapter.name == name


def test_constraints_pin_exactly() -> None:
    """Every line of constraints.txt pins one public version, so that two machines install the same."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in pins if line.count("==") != 1 or set(line) & set("+@/ ;")] == []
