"""The modes of debugging: their names, and how users say which are on."""

import difflib
import os
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

from ..dataflow.errors import ConfigError
from .watching import Watcher

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
MakeWatcher: TypeAlias = Callable[[Any], Watcher]
_WATCHERS: Final[dict[str, MakeWatcher]] = {}
"""What makes the watcher of each mode that has one, in the order in which they watch."""
Wanted: TypeAlias = bool | str | Collection[str] | None
_WORDS: Final = {"0": OFF, "false": OFF, "off": OFF, "1": CHEAP, "true": CHEAP, "on": CHEAP}
"""What the environment may say in place of names."""


def register(mode: str, watcher: MakeWatcher) -> None:
    """Have a debug mode watch the steps of each runner that is captured while it is on."""
    _WATCHERS[mode] = watcher


def watchers_of(runner: object, modes: Collection[str]) -> list[Watcher]:
    """New watchers of a runner's steps, one for each of these modes that watches steps."""
    return [make(runner) for mode, make in _WATCHERS.items() if mode in modes]


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
