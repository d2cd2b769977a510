"""Clean tails: which padded rows are known to hold what their rules say."""

from ..axes import Live


class CleanTails:
    """Records up to which rows the tails in one memory may be dirty. Every fill of the memory asks it.

    Attributes:
        handed_out: Whether producers have references to the slots, so that they may write them at any time.
    """

    __slots__ = ("_filled_by", "_live", "handed_out")

    def __init__(self) -> None:
        self.handed_out = False
        self._filled_by: object = None
        self._live: Live = ()

    def begin(self, by: object, live: Live, padded: Live) -> Live | None:
        """Record that a fill begins, and forget what is known until it is done.

        Args:
            by: What resets the tails, the same object for the same slots and padded sizes.
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
        """Record that a fill wrote all that it had to."""
        self._live = live
        self._filled_by = by  # last, so that an interrupt before it leaves every tail dirty

    def was(self, by: object, live: Live) -> bool:
        """Return whether the last fill was this one, with these live sizes, and nobody else wrote slots since."""
        return self._filled_by is by and self._live == live and not self.handed_out

    def forget(self) -> None:
        """Treat every tail as dirty, because somebody else wrote slots or a fill was interrupted."""
        self._filled_by = None
