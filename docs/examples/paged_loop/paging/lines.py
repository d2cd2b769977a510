"""Code lines of both ways, part by part: no blanks, no comments, no docstrings."""

import ast
import inspect
from types import ModuleType

from paging import by_hand, engine, inputs, runner


def table() -> list[str]:
    """Return a line for each part that differs. What both ways share is in neither column."""
    rows = {
        "declarations": (lines_of(inputs, "DecodeInputs", "PrefillInputs"), 0),
        "model runner": (lines_of(runner, "ModelRunner"), lines_of(by_hand, "HandRunner")),
        "the loop": (lines_of(engine, "LLMEngine.run", "LLMEngine.decide"), lines_of(by_hand, "HandEngine.run")),
    }
    ours, others = (sum(column) for column in zip(*rows.values(), strict=True))
    cells = [(name, str(one), str(other or "")) for name, (one, other) in rows.items()]
    whole = [("code lines", "slotgraph", "by hand"), *cells, ("in all", str(ours), str(others))]
    return [f"{name:12} {one:>10} {other:>8}".rstrip() for name, one, other in whole]


def lines_of(module: ModuleType, *names: str) -> int:
    """Return the code lines of these classes and methods, named as in `Class.method`."""
    source = inspect.getsource(module)
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {node.name: node, **{f"{node.name}.{method.name}": method for method in methods}}
    return sum(_code_lines(found[name], source.splitlines()) for name in names)


def _code_lines(node: ast.stmt, lines: list[str]) -> int:
    whole = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    docstrings = [
        range(part.lineno, (part.end_lineno or part.lineno) + 1)
        for part in ast.walk(node)
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
    ]
    texts = [lines[number - 1].strip() for number in whole if not any(number in span for span in docstrings)]
    return sum(bool(text) and not text.startswith("#") for text in texts)
