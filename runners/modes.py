"""The modes of debugging: their names, and how users say which are on."""

import difflib
import os
from collections.abc import Collection
from typing import Final, TypeAlias

from ..dataflow.errors import ConfigError

VARIABLE: Final = "SLOTGRAPH_DEBUG"
"""The environment's word, where a runner is not told."""
GENERATIONS: Final = "generations"
ADDRESSES: Final = "addresses"
STREAMS: Final = "streams"
POISON: Final = "poison"
PARITY: Final = "parity"
MODES: Final = (GENERATIONS, ADDRESSES, STREAMS, POISON, PARITY)
"""Stale outputs; moved memory; sources of other streams; tails that reach live rows; graphs unlike their step."""
CHEAP: Final = frozenset({GENERATIONS, ADDRESSES, STREAMS})
"""What `True` means: the modes that run no step a second time."""
OFF: Final[frozenset[str]] = frozenset()
Wanted: TypeAlias = bool | str | Collection[str] | None
_WORDS: Final = {"0": OFF, "false": OFF, "off": OFF, "1": CHEAP, "true": CHEAP, "on": CHEAP}
"""What the environment may say in place of names."""


def modes_of(wanted: Wanted) -> frozenset[str]:
    """The modes that are on: of a bool, of names, of one text with commas, or, for None, of the environment.

    ConfigError names the nearest mode to one that is unknown.
    """
    if wanted is None:
        said = os.environ.get(VARIABLE, "").strip()
        word = _WORDS.get(said.lower())
        return _named(said, VARIABLE) if word is None else word
    if isinstance(wanted, bool):
        return CHEAP if wanted else OFF
    return _named(wanted, "option 'debug'")


def _named(wanted: str | Collection[str], said: str) -> frozenset[str]:
    names = [one.strip() for one in (wanted.split(",") if isinstance(wanted, str) else wanted)]
    for name in filter(None, names):
        if name not in MODES:
            near = difflib.get_close_matches(name, MODES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"modes are {', '.join(MODES)}"
            message = f"{said}: unknown debug mode {name!r}: {hint}"
            raise ConfigError(message)
    return frozenset(filter(None, names))
