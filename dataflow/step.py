"""A step's sizes: how many rows are live on each axis, and to how many they are padded."""

import attrs

from .axes import Axis, Dim, Sizes
from .errors import DeclarationError


@attrs.frozen
class Step:
    """The sizes of one step, as a computed slot sees them.

    live_sizes: rows that the batch brought, per axis. padded_sizes: rows of the bucket, per axis. Fixed axes are in
    both. An axis that the batch does not tell is in neither. slot: the computed slot whose function is given this
    step, for error messages.
    """

    live_sizes: Sizes
    padded_sizes: Sizes
    slot: str | None = attrs.field(default=None, kw_only=True, eq=False, repr=False)

    def of(self, slot: str) -> "Step":
        """The same sizes, as the function of one computed slot is given them."""
        return Step(self.live_sizes, self.padded_sizes, slot=slot)

    def live(self, size: Axis | Dim) -> int:
        """Rows that the batch brought on an axis, or an expression's value at these sizes.

        Raises DeclarationError for an axis that the batch does not tell.
        """
        return self._at(size, self.live_sizes)

    def padded(self, size: Axis | Dim) -> int:
        """Rows of the bucket on an axis, or an expression's value at these sizes.

        Raises DeclarationError for an axis that the batch does not tell.
        """
        return self._at(size, self.padded_sizes)

    def _at(self, size: Axis | Dim, sizes: Sizes) -> int:
        try:
            return sizes[size] if isinstance(size, Axis) else Dim.of(size).at(sizes)
        except KeyError as error:
            raise DeclarationError(self._untold(error.args[0])) from None

    def _untold(self, axis: Axis) -> str:
        """The message for an axis that has no size in this step."""
        who = "a function" if self.slot is None else f"slot {self.slot!r}: its function"
        if axis.fixed:
            return (
                f"{who} asks for the size of {axis}, which no slot has: declare a slot with a dim of {axis}, so that "
                "the runner knows its size"
            )
        told = ", ".join(sorted(one.name for one in self.live_sizes if not one.fixed)) or "none"
        return (
            f"{who} asks for the size of {axis}, which this step does not know (it knows {told}): declare a copied "
            f"slot with a dim of {axis}, or give an EagerRunner relations= from which {axis} follows"
        )
