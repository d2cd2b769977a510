"""Widths: batches whose requests have another number of tokens than graphs were captured for."""

from typing import Any

from ..dataflow.axes import BATCH, TOKENS, WIDTH, Sizes
from ..dataflow.declaration import Declaration
from ..dataflow.errors import BatchError, DeclarationError
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .decision import Decision


class Widths:
    """Tells batches of another width by their sizes on TOKENS and BATCH, each read by itself.

    width: tokens a request, in every bucket. Only required sources are believed: where they do not tell both axes, each
    batch counts as one of the captured width, and is refused where it is none. only: whether the step stands for that
    width alone.
    """

    def __init__(self, declaration: Declaration, width: int, fixed: Sizes, *, only: bool = False) -> None:
        self._width = width
        self._only = only
        self._name = declaration.name
        self._bound = [name for name, slot in declaration.slots.items() if WIDTH in slot.axes]
        self._size = _apart(declaration, fixed)
        self._tokens = declaration.varying.index(TOKENS) if self._size is not None else 0

    def of(self, batch: Any, side: Side) -> tuple[int, tuple[int, ...]] | None:
        """The width and live sizes of a batch whose requests have as many tokens each, but not as captured; or None."""
        if self._size is None:
            return None
        try:
            live = self._size(batch, side)
        except BatchError:  # which the captured width's own sizes word better
            return None
        tokens, requests = live[self._tokens], live[-1]
        if not tokens or not requests or tokens % requests or tokens == requests * self._width:
            return None
        return tokens // requests, live

    def decision(self, width: int) -> Decision:
        """Eager, for a batch of this width. BatchError where the step, or slots, would be of another than the batch."""
        said = f"requests have {_tokens(width)} each, and graphs were captured for {_tokens(self._width)}"
        if self._only:
            message = f"{said}, the only width of this runner's step: bring {_tokens(self._width)} a request"
            raise BatchError(message)
        if self._bound:
            names = ", ".join(map(repr, self._bound))
            message = f"{said}; slots {names} of {self._name} follow from WIDTH: make a runner with width={width}"
            raise BatchError(message)
        return Decision("eager", None, "width_differs", said)


def _apart(declaration: Declaration, fixed: Sizes) -> Sizer | None:
    """What reads TOKENS and BATCH apart; None where they cannot be, or where one may be absent."""
    if TOKENS not in declaration.varying or BATCH not in declaration.varying:
        return None
    try:
        size = Sizer(declaration, {}, fixed, BATCH)
    except DeclarationError:  # one of them follows from the other, and is told by nothing else
        return None
    return size if size.required else None


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
