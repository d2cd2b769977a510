"""Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

What fewer programs need is in `slotgraph.standard`, `.errors`, `.speculative`, `.ranks`, `.pool`, `.config`, `.testing`
and `.extend`.
"""

import importlib
from typing import TYPE_CHECKING

import slotgraph.dataflow.log  # noqa: F401 - it reads structlog's defaults before the user's own are set

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slotgraph import errors as errors
    from slotgraph import standard as standard
    from slotgraph._face import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary] - all of it
    from slotgraph._face import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import the face at the first use of a name: the command line's help needs no torch."""
        shown = globals()
        shown.update(vars(importlib.import_module("slotgraph._face")) | shown)
        if name in shown:
            return shown[name]
        raise AttributeError(f"module 'slotgraph' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """All names, also before their first use."""
        return [*__getattr__("__all__"), *globals()]
