"""What the tests of interruptions share: calls as a runner makes them, and the backends that can be interrupted."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from slotgraph.backends import Backend

Body = Callable[[], Any]


@attrs.define(eq=False)
class Call:
    """An interruption as a runner makes one: it answers, or writes its answer to the places that it is given."""

    body: Body
    asked: list[bool] = attrs.field(factory=list)

    def __call__(self, places: Sequence[Any] | None) -> Any:
        """Call the body; note whether there were places."""
        self.asked.append(places is not None)
        answer = self.body()
        for place, leaf in zip(places or (), pytree.tree_leaves(answer) if places else (), strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(leaf)
        return answer


def between(backend: Backend, body: Body) -> Any:
    """A call of the body between two graphs."""
    return backend.interrupt(Call(body))
