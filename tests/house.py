"""The figures of the house: how large it is, and how far a batch goes through it. A program: `make house`.

Each figure stands beside the most that it may come to. The exit code is 1 where one is over it.
"""

import ast
import collections
import functools
import io
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import rich.box
import rich.console
import rich.table
import torch

import slotgraph
from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, copied
from slotgraph.backends import load
from tests.runners import prefilled
from tests.test_house import FACE, MODULES, ROOT, circles, imports, tree

EMULATED: Final = frozenset({"operators.py", "recorder.py", "cpu_capture.py", "cpu.py"})
"""Files of backends/ that stand in for a device, which does by itself what they do."""
CALLED_AGAIN: Final = "cpu.py"
"""The file whose replay is the step itself."""


class Figure(NamedTuple):
    """One figure. most: what it may come to, None where nothing is said. more: what it is made of."""

    name: str
    value: int
    most: int | None = None
    more: str = ""


class Three(Inputs):
    """Three slots of a decode step."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    places: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


def step(view: Three) -> torch.Tensor:
    """A row a token."""
    return view.ids + view.places


def tokens_of(path: Path) -> int:
    """Names, operators and numbers of a file; strings and comments do not count, and so neither do docstrings."""
    kinds = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    return sum(one.type in kinds for one in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline))


def lines_of(paths: Iterable[Path]) -> int:
    """Lines of files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def sizes() -> Iterator[Figure]:
    """How large the library and its tests are."""
    own = [*MODULES, *FACE.glob("*.py")]
    tests = [path for path in (ROOT / "tests").rglob("*.py") if ".venv" not in path.parts]
    yield Figure("lines", lines_of(own), 20_000)
    yield Figure("tokens", sum(map(tokens_of, own)), 135_000)
    yield Figure("files", len(own), 150)
    yield Figure("lines of dataflow/", lines_of((ROOT / "dataflow").rglob("*.py")), 4_500)
    yield Figure("lines of tests/", lines_of(tests), 27_000)


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


def runners() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """A runner of each kind by each lowering, captured."""
    for name in ("cpu", "cpu-capture"):
        backend = load(name)()
        for lowering in backend.capabilities.lowerings:
            if lowering != "slot_by_slot":
                decode = DecodeRunner(Three, step, buckets=[8], backend=backend, lowering=lowering, progress=False)
                decode.capture()
                yield f"decode, {name}, {lowering}", decode
        eager = EagerRunner(Three, step, backend=backend)
        yield f"eager, {name}", eager


def path_of(runner: Callable[[Any], Any], batch: Any) -> tuple[int, int]:
    """Our own files and Python frames of one step like those before it, without gradients, as engines call it.

    On `cpu` a graph is the step called again: what is below a replay there stands for the device.
    """
    for _ in range(40):
        runner(batch)
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
            runner(batch)
        finally:
            sys.setprofile(None)
    return len(set(seen)), len(seen)


def paths() -> Iterator[Figure]:
    """How far a batch goes in a steady step of three slots."""
    batch = {"ids": torch.arange(5), "places": torch.arange(5), "lengths": torch.ones(5, dtype=torch.int32)}
    found = [(name, runner, batch) for name, runner in runners()]
    for kind in ("breakable", "piecewise"):
        prefill = prefilled.runner_of(kind, prefilled.Model(named=kind == "piecewise"), "cpu-capture")
        prefill.capture()
        found.append((f"{kind}, cpu-capture", prefill, prefilled.batch_of([3, 2], 0)))
    for name, runner, batch in found:
        files, frames = path_of(runner, batch)
        yield Figure(f"files of a step: {name}", files, 7)
        yield Figure(f"frames of a step: {name}", frames, 20)


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
