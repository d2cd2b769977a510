"""Traffic: which memory the operators of a run read and write."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from ..backends.operators import (
    OperatorWatch,
    compiled_eagerly,
    is_composite,
    is_plain,
    run_under,
    storage_key,
    written,
)

T = TypeVar("T")
Writes = Callable[[torch.Tensor, str, Sequence[Any]], None]
Done = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


class Traffic(OperatorWatch):
    """Tells of each operator that is run.

    A kernel that does not go through torch's dispatcher, such as a bare Triton kernel, is not seen.

    Args:
        writes: Called before an operator writes memory that was there before the run: the tensor, the operator's name,
            and its positional arguments.
        done: Called after an operator that is no mere view: its name, the tensors that it took, and those it returned.
    """

    def __init__(self, *, writes: Writes | None = None, done: Done | None = None) -> None:
        super().__init__()
        self._writes = writes
        self._done = done
        self._made: set[int] = set()
        self._found: set[int] = set()

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tell of one operator, and run it."""
        plain = is_plain(operator)
        if plain and is_composite(operator):  # which inference mode leaves whole: its parts tell what it reads
            return self.take_apart(operator, args, kwargs)
        name = str(operator._schema.name) if plain else str(operator)  # noqa: SLF001 - no public name
        taken = list(_strided((args, kwargs)))
        if not name.startswith("aten::lift"):  # which hands on what was made of host data a moment before
            self._found.update({storage_key(tensor) for tensor in taken} - self._made)
        if self._writes is not None:
            # of an operator that takes functions nobody knows what these write
            for tensor in _strided(list(written(operator, args, kwargs))) if plain else taken:
                if storage_key(tensor) not in self._made:
                    self._writes(tensor, name, args)
        result = operator(*args, **kwargs)
        results = list(_strided(result))
        self._made.update({storage_key(tensor) for tensor in results} - self._found)
        if self._done is not None and not (plain and operator.is_view):
            self._done(name, taken, results)
        return result


def _strided(values: Any) -> Iterator[torch.Tensor]:
    """Tensors with memory that has an address."""
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_meta):
            yield leaf


def run_seen(traffic: Traffic, run: Callable[[], T]) -> T:
    """Run something while this thread's operators are looked at. Compiled functions run as they were written."""
    with compiled_eagerly():
        return run_under(traffic, run)
