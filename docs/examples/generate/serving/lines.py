"""Code lines of a part of a program: no blanks, no comments, no docstrings."""

import ast
import inspect
import textwrap
from typing import Any


def code_lines(part: Any) -> int:
    """Return the code lines of a module, a class or a function."""
    source = textwrap.dedent(inspect.getsource(part))
    texts = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = [line.strip() for number, line in enumerate(source.splitlines(), 1) if number not in texts]
    return sum(bool(line) and not line.startswith("#") for line in code)
