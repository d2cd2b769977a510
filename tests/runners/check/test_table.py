"""The page's table of planted bugs says what the checks say of them."""

import re

from tests.runners.check.table import PAGE, table


def _numberless(line: str) -> str:
    """A line without its numbers, in which releases of torch may differ."""
    return re.sub(r"-?\d+(\.\d+)?", "#", line)


def test_table() -> None:
    """Every bug, check, slot and message, in this order, but for numbers."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    begin = next(at for at, line in enumerate(lines) if line.startswith("| planted bug |"))
    expected = table()
    assert [*map(_numberless, lines[begin : begin + len(expected)])] == [*map(_numberless, expected)]
