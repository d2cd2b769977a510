"""The table of hazards and the scenarios are one list."""

import ast
import re
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
PAGE: Final = HERE.parents[1] / "docs" / "troubleshooting.md"
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


def rows() -> list[dict[str, str]]:
    """All rows of the table: project, number, link, kind, and the rest."""
    found = map(ROW.match, PAGE.read_text(encoding="utf-8").splitlines())
    return [match.groupdict() for match in found if match is not None]


def scenarios() -> dict[str, str]:
    """The class that each test is about, by its name."""
    nodes = ast.parse((HERE / "test_reports.py").read_text(encoding="utf-8")).body
    tests = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: (ast.get_docstring(node) or "").partition(": ")[0] for node in tests}


def test_the_table_and_the_scenarios_are_one_list() -> None:
    """Each report's tests have its project, number and class; each test has its row; links lead to the reports."""
    known, named, found = scenarios(), list[str](), rows()
    for row in found:
        wrong, cure, tests = (cell.strip() for cell in row["rest"].split(" | "))
        assert wrong
        assert cure
        prefix, repository = PROJECTS[row["project"]]
        names = re.findall(r"`(test_\w+)`", tests)
        assert names
        for name in names:
            assert name.startswith(f"test_{prefix}_{row['number']}_")
            assert known[name] == row["kind"]
        named += names
        assert row["link"] == f"https://github.com/{repository}/issues/{row['number']}"
    assert sorted(named) == sorted(known)
    assert {row["kind"] for row in found} == set("ABCDEFGH")
    assert len({(row["project"], row["number"]) for row in found}) == len(found) >= 24
