"""A step's sizes: how many rows are live on each axis, and to how many they are padded."""

import attrs

from .axes import Axis, Dim, Sizes


@attrs.frozen
class Step:
    """The sizes of one step, as a computed slot sees them.

    live: rows that the batch brought, per axis. padded: rows of the bucket, per axis. Fixed axes stand in both.
    """

    live_sizes: Sizes
    padded_sizes: Sizes

    def live(self, size: Axis | Dim) -> int:
        """Rows that the batch brought on an axis, or an expression's value at these sizes."""
        return self.live_sizes[size] if isinstance(size, Axis) else Dim.of(size).at(self.live_sizes)

    def padded(self, size: Axis | Dim) -> int:
        """Rows of the bucket on an axis, or an expression's value at these sizes."""
        return self.padded_sizes[size] if isinstance(size, Axis) else Dim.of(size).at(self.padded_sizes)
