"""Faults: each can be planted and taken back, names tests that there are, and stands in the table of promises."""

import hashlib
import inspect
import re
from pathlib import Path
from typing import Final

import pytest

from tests.faults.planted import FAULTS
from tests.faults.planting import Fault

ROOT: Final = Path(__file__).parents[1]
TABLE: Final = (ROOT / "docs/decisions/tests-and-tools.md").read_text(encoding="utf-8")
ROWS: Final = [
    (promise, faults.split(", "), before.split(", "))
    for promise, faults, before in re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", TABLE, re.MULTILINE)[1:]
]
BEFORE: Final = 195, "1aeda407a663229c"
"""How many bugs were planted as text, and a digest of their names."""


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_planted_and_taken_back(fault: Fault) -> None:
    """What it replaces is there, another thing stands there while it is planted, and then the first one again."""
    old = inspect.getattr_static(fault.owner, fault.attribute)
    with fault.plant():
        assert inspect.getattr_static(fault.owner, fault.attribute) is not old
    assert inspect.getattr_static(fault.owner, fault.attribute) is old
    assert fault.seen.endswith(".")
    for test in fault.tests:
        path, _, name = test.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not name or f"def {name.partition('[')[0]}(" in text, test


def test_the_table_has_all_faults_and_all_bugs_of_before() -> None:
    """Each promise has its faults, in their order, and each bug that was planted as text is under one promise."""
    found = dict[str, list[str]]()
    for fault in FAULTS.values():
        found.setdefault(fault.promise, []).append(fault.name)
    assert {promise: faults for promise, faults, _ in ROWS} == found
    before = sorted(name for _, _, names in ROWS for name in names)
    digest = hashlib.sha256(" ".join(before).encode()).hexdigest()[:16]
    assert (len(set(before)), digest) == BEFORE
