"""Code lines of a module, part by part: those that hold more than a comment, a docstring or nothing."""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_NO_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
REST: Final = "imports, names"
"""What stands in no part: imports, constants, and the line that begins a class of methods."""
_DEFINES = ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(path: Path) -> dict[str, int]:
    """How many code lines each part has, by name: functions, methods and declarations, and the rest."""
    text = path.read_text(encoding="utf-8")
    numbers = numbered_code(text)
    counts: dict[str, int] = {}
    for name, part in parts(ast.parse(text)):
        own = numbers & set(range(_first(part), (part.end_lineno or part.lineno) + 1))
        numbers -= own
        counts[name] = counts.get(name, 0) + len(own)
    return {REST: len(numbers), **counts}


def parts(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, methods, and classes that have none: declarations."""
    for statement in module.body:
        if isinstance(statement, ast.ClassDef):
            methods = [part for part in statement.body if isinstance(part, _DEFINES)]
            yield from ((method.name, method) for method in methods)
            if not methods:
                yield statement.name, statement
        elif isinstance(statement, _DEFINES):
            yield statement.name, statement


def _first(part: ast.stmt) -> int:
    """A part begins with its decorators."""
    decorators: list[ast.expr] = getattr(part, "decorator_list", [])
    return min([part.lineno, *(one.lineno for one in decorators)])


def numbered_code(text: str) -> set[int]:
    """The numbers of lines that hold code."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    spans = ((token.start[0], token.end[0]) for token in tokens if token.type not in _NO_CODE)
    numbers = {number for first, last in spans for number in range(first, last + 1)}
    return numbers - set(_in_docstrings(ast.parse(text)))


def _in_docstrings(module: ast.Module) -> Iterator[int]:
    """Lines of all strings that stand for themselves, which are docstrings of something."""
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
