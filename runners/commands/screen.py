"""Where commands print to."""

import os
from typing import Final

from rich.console import Console

WIDE: Final = 200
"""Columns in a pipe or file, where nothing needs to fit a screen and a folded name could not be searched for."""


def screen() -> Console:
    """Standard output: as wide as the terminal, or wide where it is none and nobody set COLUMNS."""
    console = Console(highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS"):
        return console
    return Console(highlight=False, width=WIDE)
