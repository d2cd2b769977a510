"""Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

Less common names are in `slotgraph.standard`, `.errors`, `.graphs`, `.speculative`, `.ranks`, `.pool`, `.config`,
`.testing`, `.attention`, `.extend`, `.reports`, `.metrics` and `.backends`.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

import slotgraph.dataflow.log  # noqa: F401 - it reads structlog's defaults before the user sets others

__version__ = "0.1.0"
# fmt: off
_SUBMODULES = {
    "attention", "backends", "config", "errors", "extend", "graphs", "metrics", "pool", "ranks", "reports",
    "speculative", "standard", "testing",
}
# fmt: on


def _publish(module: str) -> None:
    """Let the public classes and functions of a module carry its name, as tracebacks, `help` and pickles show it."""
    shown = vars(sys.modules[module])
    for name in shown["__all__"]:
        if isinstance(shown[name], type | types.FunctionType):
            shown[name].__module__ = module.removesuffix("._face")


if TYPE_CHECKING:
    from slotgraph import errors as errors
    from slotgraph import standard as standard
    from slotgraph._face import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary] - all of it
    from slotgraph._face import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """Import the public names at the first use of one, so that the command line's help needs no torch."""
        shown = globals()
        shown.update(vars(importlib.import_module("slotgraph._face")) | shown)
        if name in shown:
            return shown[name]
        raise AttributeError(f"module 'slotgraph' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return the public names, even before their first use, and the public submodules that are imported."""
        return [*__getattr__("__all__"), *_SUBMODULES.intersection(globals()), "__version__"]
