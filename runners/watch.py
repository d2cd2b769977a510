"""The watch over a step that is to be captured in parts: what its graphs would read of what changes by step."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..dataflow.binding import span
from ..dataflow.errors import CaptureError
from .running import running


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Looks at every operator outside of breaks.

    forbidden: slots over requests, by name: a graph that reads one holds for one number of requests alone.
    given: tensors that the captured part was handed; `read` are the places of those that its graphs read.
    """

    def __init__(self, forbidden: Mapping[str, torch.Tensor], given: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: set[int] = set()
        self._forbidden = [(*span(tensor), name) for name, tensor in forbidden.items() if tensor.numel()]
        places = [(place, one) for place, one in enumerate(given) if isinstance(one, torch.Tensor) and one.numel()]
        self._given = [(*span(tensor), place) for place, tensor in places]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note what an operator reads, and run it. CaptureError where no graph may read that."""
        del types
        step = running()
        if step is None or step.inside is None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.numel():
                    self._note(leaf, func)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: torch.Tensor, func: Any) -> None:
        address = tensor.data_ptr()
        for low, high, name in self._forbidden:
            if low <= address < high:
                message = (
                    f"{func} reads slot {name!r}, whose rows are requests, outside of a break: its graph would hold "
                    f"for one number of requests. Read it in a break, which gets each step's own rows when it is "
                    f"handed view.{name} or the view"
                )
                raise CaptureError(message)
        self.read.update(place for low, high, place in self._given if low <= address < high)
