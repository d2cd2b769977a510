"""Clean tails: records which padded rows already hold the values of their tail rules."""

import attrs

from ..axes import Live


@attrs.define(eq=False)
class CleanTails:
    """Records up to which rows the tails in one block of memory may be dirty. Every fill of that memory uses it.

    Attributes:
        handed_out: Whether producers have references to the slots and may write them at any time.
        is_sent: Whether a packet was sent that no kernel has read yet.
    """

    handed_out: bool = False
    is_sent: bool = False
    _filled_by: object = None
    _live: Live = ()

    def begin(self, by: object, live: Live, padded: Live) -> Live | None:
        """Record that a fill begins. Until `done`, all tails count as dirty.

        Args:
            by: The writer of the tails, the same object for the same slots and padded sizes.
            live: Live rows on each axis.
            padded: Padded rows on each axis.

        Returns:
            The rows on each axis up to which tails may be dirty, or None if all of them are clean.
        """
        is_known = self._filled_by is by and not self.handed_out
        self._filled_by = None
        if not is_known:
            return padded
        last = self._live
        if last == live:
            return None
        for before, now in zip(last, live, strict=True):
            if before > now:
                return tuple(map(max, last, live))
        return None

    def done(self, by: object, live: Live) -> None:
        """Record that the fill is complete."""
        self._live = live
        self._filled_by = by  # last, so that an interrupt before it leaves every tail dirty

    def was(self, by: object, live: Live) -> bool:
        """Return whether the last fill had the same writer and live sizes, and nothing else wrote slots since."""
        return self._filled_by is by and self._live == live and not self.handed_out

    def last_of(self, by: object) -> Live | None:
        """Return the live sizes of the last fill, or None if the slots may hold anything else."""
        return self._live if self._filled_by is by and not (self.handed_out or self.is_sent) else None

    def forget(self) -> None:
        """Treat every tail as dirty, because something else wrote slots or a fill was interrupted."""
        self._filled_by = None
