"""The table of hazards and the scenarios are one list."""

import ast
import re
from pathlib import Path
from typing import Final

import attrs
import pytest

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "hazards.md"
PROJECTS: Final = {
    "SGLang": ("sglang", "sgl-project/sglang"),
    "vLLM": ("vllm", "vllm-project/vllm"),
    "TensorRT-LLM": ("trtllm", "NVIDIA/TensorRT-LLM"),
    "vllm-ascend": ("vllm_ascend", "vllm-project/vllm-ascend"),
    "Megatron-LM": ("megatron_lm", "NVIDIA/Megatron-LM"),
    "nano-vllm": ("nano_vllm", "GeeeekExplorer/nano-vllm"),
}
ROW: Final = re.compile(
    r"\| \[(?P<project>[\w-]+) #(?P<number>\d+)\]\((?P<link>\S+)\) \| (?P<kind>[A-H]) \|(?P<rest>.*)\|$"
)


@attrs.frozen
class Row:
    """One report: of which project, its number, its link, its class, and its tests."""

    project: str
    number: str
    link: str
    kind: str
    tests: tuple[str, ...]


def rows() -> list[Row]:
    """All rows of the table."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        match = ROW.match(line)
        if match is not None:
            wrong, cure, tests = (cell.strip() for cell in match["rest"].split(" | "))
            assert wrong
            assert cure
            named = tuple(re.findall(r"`(test_\w+)`", tests))
            found.append(Row(match["project"], match["number"], match["link"], match["kind"], named))
    return found


def scenarios() -> dict[str, str]:
    """The class that each test's module is about, by the test's name."""
    found: dict[str, str] = {}
    for path in sorted(HERE.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kind = re.match(r"Class ([A-H]): ", ast.get_docstring(tree) or "")
        if kind is not None:
            found |= {
                node.name: kind[1]
                for node in tree.body
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            }
    return found


def test_each_scenario_has_its_row() -> None:
    """Every test is in the table, once, and every test of the table is there."""
    named = [name for row in rows() for name in row.tests]
    assert sorted(named) == sorted(scenarios())


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.project}-{row.number}")
def test_row_is_about_its_tests(row: Row) -> None:
    """A row's tests have its project, its number and its class, and its link leads to that report."""
    prefix, repository = PROJECTS[row.project]
    assert row.tests
    for name in row.tests:
        assert name.startswith(f"test_{prefix}_{row.number}_")
        assert scenarios()[name] == row.kind
    assert row.link == f"https://github.com/{repository}/issues/{row.number}"


def test_every_class_is_there() -> None:
    """All eight classes have a scenario, and there are two dozen reports, none of them twice."""
    found = rows()
    assert {row.kind for row in found} == set("ABCDEFGH")
    assert len({(row.project, row.number) for row in found}) == len(found) >= 24
