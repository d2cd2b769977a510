"""docs/invariants.md and the tests are one list: each test that it names is there, and each of ours is named."""

import ast
import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = (ROOT / "docs" / "invariants.md").read_text(encoding="utf-8")
NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
SECTIONS: Final = re.split(r"^## \d+\. ", PAGE.split("## What the CPU")[0], flags=re.MULTILINE)[1:]


def names_in(path: Path) -> set[str]:
    """The names of a module's tests."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_test_of_the_page_is_there() -> None:
    """By file and name, wherever it stands."""
    named = NAMED.findall(PAGE)
    assert [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)] == []
    assert PAGE.count("tests/") == len(named) + 2, "a test is named in another form"


def test_every_test_of_ours_is_on_the_page() -> None:
    """Under the invariant that it holds."""
    named = {name for _, name in NAMED.findall(PAGE)}
    ours = {
        name for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__) for name in names_in(path)
    }
    assert ours - named == set()


def test_every_invariant_has_both_tests() -> None:
    """One that holds it and one with a planted fault, through the public interface."""
    assert len(SECTIONS) == 14
    for section in SECTIONS:
        ours = {name for path, name in NAMED.findall(section) if path.startswith("tests/invariants/")}
        planted = {name for name in ours if name.startswith("test_planted_")}
        assert planted, section
        assert ours - planted, section
    assert "\ninvariants\n" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
