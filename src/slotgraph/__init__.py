"""Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

Less common names are in `slotgraph.standard`, `.errors`, `.speculative`, `.ranks`, `.pool`, `.config`, `.testing`,
`.extend`, `.reports`, `.metrics` and `.backends`.
"""

import importlib
from typing import TYPE_CHECKING

import slotgraph.dataflow.log  # noqa: F401 - it reads structlog's defaults before the user sets others

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slotgraph import errors as errors
    from slotgraph import standard as standard
    from slotgraph._face import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary] - all of it
    from slotgraph._face import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import the public names at the first use of one, so that the command line's help needs no torch."""
        shown = globals()
        shown.update(vars(importlib.import_module("slotgraph._face")) | shown)
        if name in shown:
            return shown[name]
        raise AttributeError(f"module 'slotgraph' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, even before their first use."""
        return [*__getattr__("__all__"), *globals()]
