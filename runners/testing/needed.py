"""What this package needs beside slotgraph's own dependencies: who lacks it is told the command that installs it."""

import importlib
from typing import Final

COMMAND: Final = "pip install 'slotgraph[testing]'"


def need(package: str, what: str) -> None:
    """ModuleNotFoundError with the command, where a package is not there. what: needs it, in words."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        message = f"{what} needs {package}, which is not installed: {COMMAND}"
        raise ModuleNotFoundError(message, name=package) from error
