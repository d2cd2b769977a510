"""Likeness: one look that tells whether sources are of the kinds seen before."""

import operator
from collections.abc import Sequence
from typing import Final

import numpy as np

from .gather import Sources, chosen
from .guard import guard_over
from .kinds import Kind

_ARRAY_FACTS: Final = operator.attrgetter("__class__", "dtype", "shape", "strides")


class Alike:
    """Whether sources are like those that it was made for.

    Tensors by one guard; arrays by dtype, shape and strides; lists by their type, since a carrier tells their length.
    Nothing is asked of sources of a loose kind. tensors: which are tensors. only_tensors, only_arrays: whether all are.
    guard: what is asked of the tensors.
    """

    def __init__(self, kinds: Sequence[Kind], sources: Sources) -> None:
        strict = [(index, kind.host) for index, kind in enumerate(kinds) if not kind.loose]
        arrays = [index for index, host in strict if host is np.ndarray]
        self.only_arrays = len(arrays) == len(kinds)
        self.tensors = tuple(index for index, host in strict if host is None)
        self.only_tensors = len(self.tensors) == len(kinds)
        self._chosen = chosen(self.tensors)
        self.guard = guard_over(self._chosen(sources))
        self._arrays = [(index, _ARRAY_FACTS(sources[index])) for index in arrays]
        self._lists = [(index, host) for index, host in strict if host not in (None, np.ndarray)]

    def __call__(self, sources: Sources) -> bool:
        """Whether all are."""
        for index, kind in self._lists:
            if type(sources[index]) is not kind:
                return False
        try:
            for index, facts in self._arrays:
                if _ARRAY_FACTS(sources[index]) != facts:
                    return False
        except AttributeError:  # no array
            return False
        return self.guard(*self._chosen(sources))
