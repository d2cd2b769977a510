"""The field's declarations, ready to subclass: what decode, prefill and speculative steps read in LLM engines."""

from slotgraph.runners.standard import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]
from slotgraph.runners.standard import __all__ as __all__  # noqa: PLC0414 - for type checkers
