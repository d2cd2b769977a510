"""Aliases: the tensors that steps and callers get, whose shapes they may change without harm to the next fill."""

from collections.abc import Callable, Mapping

import torch

from .errors import ReplayError
from .guard import untouched


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor over the same memory; no inference tensor, whatever mode is on."""
    with torch.inference_mode(mode=False):
        return tensor.detach()


def _never() -> bool:
    return False


class Aliases:
    """Aliases of some tensors, by name, for code that is not ours.

    They are the same ones at each call, until somebody has changed one in place (`unsqueeze_`, `resize_`, `set_`,
    `.data =`): then all are made anew.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        self._tensors = tensors
        self._made: Mapping[str, torch.Tensor | None] = {}
        self._addresses: Mapping[str, int] = {}
        self._untouched: Callable[[], bool] = _never

    def __call__(self) -> Mapping[str, torch.Tensor | None]:
        """The aliases; None where there is no tensor. ReplayError where somebody resized their memory itself."""
        if not self._untouched():
            self._make()
        return self._made

    def _make(self) -> None:
        present = {name: one for name, one in self._tensors.items() if one is not None}
        now = {name: one.data_ptr() for name, one in present.items()}
        moved = [name for name, address in self._addresses.items() if now[name] != address]
        if moved:
            message = (
                f"the memory of {', '.join(map(repr, moved))} was resized in place, and graphs go on reading what it "
                "was: do not resize tensors of a view, and make a new runner"
            )
            raise ReplayError(message)
        self._made = {**self._tensors, **{name: alias(one) for name, one in present.items()}}
        self._addresses = now
        self._untouched = untouched([one for one in self._made.values() if one is not None])
