"""Pages that list tests name those that there are, and all of them; no page puts off or denies what there is."""

import ast
import code
import importlib
import inspect
import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeGuard, get_args

import attrs
import pytest

import slotgraph
from slotgraph import BreakableRunner, DecodeRunner, EagerRunner, PrefillRunner
from slotgraph.backends import Capabilities
from slotgraph.config import RunnerConfig
from slotgraph.dataflow import environment
from slotgraph.extend import Slot
from slotgraph.graphs import GraphRunner
from slotgraph.runners.engine.config import keywords_of
from slotgraph.runners.engine.statistics import Statistics, Why
from slotgraph.speculative import DraftExtendRunner, DraftRunner, MultiLayerDraftExtendRunner
from tests.faults.planted import FAULTS

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = [
    path.relative_to(ROOT)
    for pattern in (
        "*.md",
        "docs/*.md",
        "docs/reference/*.md",
        "docs/decisions/*.md",
        "docs/examples/*/README.md",
        "tests/**/README.md",
    )
    for path in sorted(ROOT.glob(pattern))
]
INVARIANTS, HAZARDS = (
    (ROOT / name).read_text(encoding="utf-8") for name in ("tests/invariants/README.md", "docs/troubleshooting.md")
)
NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
PROJECTS: Final = {
    "SGLang": ("sglang", "sgl-project/sglang"),
    "vLLM": ("vllm", "vllm-project/vllm"),
    "TensorRT-LLM": ("trtllm", "NVIDIA/TensorRT-LLM"),
    "vllm-ascend": ("vllm_ascend", "vllm-project/vllm-ascend"),
    "Megatron-LM": ("megatron_lm", "NVIDIA/Megatron-LM"),
    "transformers": ("transformers", "huggingface/transformers"),
    "nano-vllm": ("nano_vllm", "GeeeekExplorer/nano-vllm"),
    "rtp-llm": ("rtp_llm", "alibaba/rtp-llm"),
}
LISTS: Final = {ROOT / "docs" / name for name in ("index.md", "changes.md", "reference.md", "configuration.md")}
"""Pages without programs."""
LINK: Final = re.compile(r"\]\(([^):#\s]*)(?:#([^)\s]+))?\)")
"""A link to a file of the repository, or to a heading."""
ROW: Final = re.compile(
    r"^\| \[(?P<project>[\w-]+) #(?P<number>\d+)\]\((?P<link>\S+)\) \| (?P<kind>[A-H]) \|(?P<rest>.*)\|$", re.MULTILINE
)


def docstrings(path: Path) -> dict[str, str]:
    """The docstrings of a module's tests, by name."""
    nodes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_docstring(node) or "" for node in nodes if node.name.startswith("test_")}


def test_every_invariant_has_tests_and_a_fault_that_they_catch() -> None:
    """The page names tests of other folders, too; each fault must be caught by a test that its section names."""
    named = NAMED.findall(INVARIANTS)
    assert [f"{path}::{name}" for path, name in named if name not in docstrings(ROOT / path)] == []
    assert INVARIANTS.count("tests/") == len(named) + 2, "a test is named in another form"
    ours = {name for path in (ROOT / "tests" / "invariants").glob("test_*.py") for name in docstrings(path)}
    assert ours - {name for _, name in named} == set()
    sections = re.split(r"^## \d+\. ", INVARIANTS.split("## What the CPU")[0], flags=re.MULTILINE)[1:]
    assert len(sections) == 14
    for section in sections:
        inside = {f"{path}::{name}" for path, name in NAMED.findall(section)}
        faults = re.findall(r"`([\w-]+)`", section.partition("- Faults: ")[2])
        assert faults, section
        for name in faults:
            assert inside.intersection(test.partition("[")[0] for test in FAULTS[name].tests), name


def test_no_page_denies_what_there_is() -> None:
    """No page says that something is not there yet, or that a public name does not exist."""
    faces = ("backends", *(path.stem for path in (ROOT / "src" / "slotgraph").glob("[a-z]*.py")))
    modules = [slotgraph, *(importlib.import_module(f"slotgraph.{face}") for face in faces)]
    public = {name for module in modules for name in getattr(module, "__all__", ())}
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        said = " ".join(page.read_text(encoding="utf-8").split())
        assert not re.search("not covered yet|in this release", said, re.IGNORECASE), page.name
        denied = re.findall(r"(?:there (?:is|are)|has|have) no `(?:\w+\.)*(\w+)", said, re.IGNORECASE)
        assert public.isdisjoint(denied), page.name


def test_the_table_and_the_scenarios_are_one_list() -> None:
    """Each report's tests have its project, number and class; each test has its row; links lead to the reports."""
    scenarios = docstrings(ROOT / "tests" / "regressions" / "test_reports.py")
    known = {name: said.partition(": ")[0] for name, said in scenarios.items()}
    named, found = list[str](), [match.groupdict() for match in ROW.finditer(HAZARDS)]
    for row in found:
        wrong, cure = (cell.strip() for cell in row["rest"].split(" | "))
        assert wrong
        assert cure
        prefix, repository = PROJECTS[row["project"]]
        names = [name for name in known if name.startswith(f"test_{prefix}_{row['number']}_")]
        assert names
        assert {known[name] for name in names} == {row["kind"]}
        named += names
        assert row["link"] == f"https://github.com/{repository}/issues/{row['number']}"
    assert sorted(named) == sorted(known)
    assert {row["kind"] for row in found} == set("ABCDEFGH")
    assert len({(row["project"], row["number"]) for row in found}) == len(found) >= 24


def slugs(page: Path) -> set[str]:
    """The anchors that a page's headings have on GitHub and in the book. Equal ones are numbered."""
    titles, seen, found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE), Counter[str](), set[str]()
    for title in titles:
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_to_files_and_headings_that_are_there(page: Path) -> None:
    """Links are relative, so that they hold in a checkout, on GitHub and in the book."""
    path = ROOT / page
    text = re.sub(r"^```.*?^```$|`[^`\n]+`", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name, heading in LINK.findall(text):
        target = (path.parent / name) if name else path
        assert target.exists(), name
        assert not heading or heading in slugs(target), f"{name}#{heading}"
    assert "github.com/slotgraph" not in text.replace("git clone https://github.com/slotgraph/slotgraph", "")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_are_plain_markdown(page: Path) -> None:
    """GitHub would show labels, comments and directives of Sphinx as text."""
    text = (ROOT / page).read_text("utf-8")
    assert re.findall(r"^(?:\([\w-]+\)=|% .*|:::.*)$", text, re.MULTILINE) == []
    assert re.findall(r"^```\{[\w-]+\}", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", [Path("README.md"), *(page for page in PAGES if page.parent.name == "docs")], ids=str)
def test_code_fits_a_page_on_github(page: Path) -> None:
    """A window 830 pixels wide shows 88 characters; what is longer scrolls sideways."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 88] == []


def test_the_reference_says_what_the_package_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed pages are those that docstrings, signatures and annotations make now."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    reference = importlib.import_module("reference")
    names = sorted(str(path.relative_to(ROOT)) for path in reference.stale())
    assert names == [], "not up to date: run `make reference`, and commit what it writes"
    values = [entry.value for own in reference.entries().values() for entry in own]
    classes = {base.__name__: base for kind in values if isinstance(kind, type) for base in kind.__mro__}
    hidden = [name.partition(".") for name in reference.HIDDEN]
    assert [name for kind, _, name in hidden if not hasattr(classes[kind], name)] == [], "docs/reference.toml"


@pytest.mark.parametrize("page", sorted({*ROOT.glob("docs/*.md")} - LISTS), ids=lambda page: page.name)
def test_each_page_starts_with_a_program(page: Path) -> None:
    """Within the first screen: five to fifteen lines that need nothing before them, and an answer. All blocks run."""
    before, first, second = page.read_text("utf-8").split("```python\n")[:3]
    program = first.partition("```")[0]
    assert before.count("\n") <= 15
    assert 5 <= len([line for line in program.splitlines() if line.strip()]) <= 15
    assert max(map(len, program.splitlines())) <= 88
    assert second.startswith(">>> ")


def test_the_index_leads_to_every_page() -> None:
    """Each page has its line there, of which the book makes its tree."""
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    named = re.findall(r"^- \[.+\]\(([\w-]+\.md)\): .+\.$", text, re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in ROOT.glob("docs/*.md") if path.name != "index.md")


class Prompt(code.InteractiveConsole):
    """A Python prompt that keeps the errors which it would show."""

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        raise sys.exception() or SyntaxError

    showtraceback = showsyntaxerror


@pytest.mark.parametrize("name", ["quick-start", "port-your-engine"])
def test_blocks_can_be_pasted_into_a_prompt(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These pages say so. At a prompt a blank line ends a body, and nothing else does."""
    page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    assert "Python prompt" in page
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    prompt = Prompt(vars(main))
    for skipped, block in re.findall(r"(<!-- skip: .*\n+)?^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        typed = (
            re.findall(r"^(?:>>>|\.\.\.) ?(.*)", block, re.MULTILINE) if block.startswith(">>>") else block.splitlines()
        )
        for line in typed if not skipped else ():
            if "torch.ones(3)" not in line:  # the batch that is refused
                prompt.push(line)
        assert not prompt.push("")


def test_pages_use_public_names_only() -> None:
    """Users copy from pages: each import there, and each dotted name of the package, is one of the reference."""
    modules = tomllib.loads((ROOT / "docs" / "reference.toml").read_text("utf-8"))["modules"]
    public = set(modules)
    for module in map(importlib.import_module, modules):
        public |= {f"{module.__name__}.{name}" for name in getattr(module, "__all__", vars(module))}
    private = list[str]()
    for page in (*ROOT.glob("[!C]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/examples/*/README.md")):
        text = page.read_text("utf-8")
        named = re.findall(r"(?<![\w./-])slotgraph(?:\.\w+)+", text)
        for module, many, one in re.findall(r"from (slotgraph[\w.]*) import (?:\(([^)]*)\)|(.*))", text):
            named += [f"{module}.{name}" for name in re.findall(r"\w+", many or one.partition("#")[0])]
        private += [f"{page.name}: {name}" for name in named if name not in public]
    assert private == []


def test_contributing_names_each_module() -> None:
    """The map in CONTRIBUTING has a line for each module, which is the first one of its docstring."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| `(\S+\.py)` \| (.+) \|$", page, re.MULTILINE))
    found = dict[str, str]()
    for folder in ("dataflow", "backends", "runners", "src"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(parent.is_symlink() for parent in path.parents):
                first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
                found[str(path.relative_to(ROOT))] = first.replace("\n", " ")
    assert named == found


def test_declare_names_what_a_slot_has() -> None:
    """The section on new kinds names each field of `Slot`, and in its table each method that a kind may override."""
    page = (ROOT / "docs" / "declare.md").read_text(encoding="utf-8")
    section = page.split("## New kinds of slots")[1].split("```python")[0]
    fields = section.split("with the fields")[1].split(";")[0]
    declared = [field.name for field in attrs.fields(Slot)]
    assert re.findall(r"`(\w+)`", fields) == declared
    public = {name for name in vars(Slot) if not name.startswith("_")}
    derived = {"axes", "declared_values", "is_state", "kind", "needs", "needs_rule", "varying"}
    named = re.findall(r"^\| `(\w+)(?:\(\w*\))?` \|", section, re.MULTILINE)
    assert set(named) == public - derived - {*declared}


@pytest.mark.parametrize("name", ["copied", "computed", "constant", "staged", "output"])
def test_declare_names_each_argument_of_a_specifier(name: str) -> None:
    """In a table for `copied`, and in the call for the others. `init` is for type checkers alone."""
    page = (ROOT / "docs" / "declare.md").read_text(encoding="utf-8")
    call = re.search(rf"^`{name}\(([^)]*)\)`", page, re.MULTILINE)
    assert call
    named = re.findall(r"\w+", call[1])
    if name == "copied":
        table = page.split("## Copied slots")[1].split("### Sources")[0]
        named = [
            one for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for one in re.findall(r"`\*?(\w+)`", row)
        ]
    parameters = inspect.signature(getattr(slotgraph, name)).parameters
    assert sorted(named) == sorted(parameters.keys() - {"init"})


def first_cells(page: str, head: str) -> list[str]:
    """The names in the first column of the table with this head."""
    rows = (ROOT / "docs" / page).read_text("utf-8").split(head)[1].split("\n\n")[0]
    return re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows.splitlines()[2:]))


def test_tables_of_decisions_capabilities_and_statistics_are_whole() -> None:
    """Each reason of a decision, each field of the capability record, and each key of `stats()` has its row."""
    assert first_cells("run.md", "| `why` | path | reason |") == [*get_args(Why)]
    fields = [field.name for field in attrs.fields(Capabilities)]
    assert sorted(first_cells("backends.md", "| fields | say |")) == sorted(fields)
    assert first_cells("observe.md", "| key | what it holds |") == [*Statistics.__annotations__]


def test_how_it_works_names_modules_and_classes_that_there_are() -> None:
    """Each path on the page is a file, and each class or method named with it is defined there."""
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:dataflow|backends|runners)/[\w/]+\.py)`(?:, `([\w.]+)`)?", page)
    assert len(named) > 20
    for path, name in named:
        assert (ROOT / path).is_file(), path
        for part in filter(None, name.split(".")):
            assert re.search(rf"^ *(?:class|def) {part}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE), (
                path,
                name,
            )


CONFIGURATION: Final = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
_GRAPHS: Final = (DecodeRunner, GraphRunner, PrefillRunner, BreakableRunner, DraftRunner)
RUNNERS: Final[list[type]] = [*_GRAPHS, DraftExtendRunner, MultiLayerDraftExtendRunner, EagerRunner]


def cells(head: str) -> dict[str, list[str]]:
    """The rows of the table with this head on the page of options, by their first cell."""
    table = CONFIGURATION.split(head)[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_each_option_is_named_with_its_type_default_and_runners() -> None:
    """The table of options is that of `RunnerConfig`, and says which runners use each."""
    fields, named = attrs.fields_dict(RunnerConfig), cells("| option | type |")
    assert [*named] == [*RunnerConfig.options()]
    for name, (kind, default, used, _) in named.items():
        field = fields[name]
        assert kind.strip("`").replace("\\|", "|") == getattr(field.type, "__name__", str(field.type))
        assert default.strip("`") == ("none" if field.default is None else json.dumps(field.default))
        users = [one.__name__ for one in RUNNERS if name in keywords_of(one)]
        groups = {"all": RUNNERS, "graphs": RUNNERS[:-1]}
        assert users == [one.__name__ for one in groups[used]] if used in groups else re.findall(r"\w+", used), name


def test_each_variable_of_the_environment_is_named() -> None:
    """The table of variables is that of the code, and no other module reads or names one."""
    assert [*cells("| variable | takes |")] == [*environment.VARIABLES]
    assert len({*environment.VARIABLES}) == len(environment.VARIABLES)
    for folder in ("dataflow", "backends", "runners", "src"):
        for path in (ROOT / folder).rglob("*.py"):
            if not any(one.is_symlink() for one in (path, *path.parents)) and path.name != "environment.py":
                texts = [node.value for node in ast.walk(ast.parse(path.read_text("utf-8"))) if is_text(node)]
                assert [text for text in texts if text in environment.VARIABLES] == [], path


def is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    """Whether a node is a text."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
