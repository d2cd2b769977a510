"""Small caches in plain dictionaries: a look-up costs nothing but the look-up."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_newest(cache: dict[K, V], size: int) -> dict[K, V]:
    """Make room for one more entry in a cache of a given size; the oldest goes first."""
    while len(cache) >= size:
        del cache[next(iter(cache))]
    return cache
