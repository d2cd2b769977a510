"""The command line: an application on top of the library, one module a command."""

from .app import main

__all__ = ["main"]
