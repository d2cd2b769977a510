"""The pictures of the page on reading a runner are those that its runners have today."""

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import slotgraph
from slotgraph.runners.explained.pages import pictures

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "observe.md"
VARIABLE = "SLOTGRAPH_WRITE_PICTURES"
NAMES = ("fills", "memory")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The page's first block as a module."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    file = tmp_path_factory.mktemp("reading") / "reading_example.py"
    file.write_text(block[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_up_to_date(example: ModuleType, name: str) -> None:
    """A picture in the docs is what the example's runner is drawn as; with SLOTGRAPH_WRITE_PICTURES=1 it is made so."""
    found = pictures(slotgraph.explain(example.verify))
    assert tuple(found) == NAMES
    file = DOCS / "pictures" / f"reading-{name}.svg"
    if os.environ.get(VARIABLE) == "1":
        file.write_text(found[name], encoding="utf-8")
    assert file.read_text(encoding="utf-8") == found[name], f"draw it anew: {VARIABLE}=1 pytest {__file__}"
    assert f"](pictures/{file.name})" in PAGE.read_text(encoding="utf-8")
