"""The pages' Python blocks run as tests: in page order, with one namespace a page."""

import doctest
import sys
from pathlib import Path
from types import ModuleType

import pytest
from sybil import Sybil
from sybil.document import Document
from sybil.parsers.myst import DocTestDirectiveParser, PythonCodeBlockParser, SkipParser

collect_ignore = ["conf.py", "reference.py"]  # one needs Sphinx, the other this folder on its path
collect_ignore_glob = ["_build/*", "examples/*.py"]  # programs, run by their own tests

_ROOT = Path(__file__).parents[1]


class Page(Document):
    """A page whose namespace is a real module's, so that classes defined in it find the names of their annotations."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        module = ModuleType("page_" + Path(path).stem.replace("-", "_").lower())
        sys.modules[module.__name__] = module
        self.namespace = module.__dict__


_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_collect = Sybil(
    parsers=[
        DocTestDirectiveParser(optionflags=_OPTIONS),
        PythonCodeBlockParser(doctest_optionflags=_OPTIONS),
        SkipParser(),
    ],
    path=str(_ROOT),
    pattern="*.md",
    document_types={".md": Page},
).pytest()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a page; README.md lies outside this folder, so this very file stands for it."""
    return _collect(_ROOT / "README.md" if file_path == Path(__file__) else file_path, parent)
