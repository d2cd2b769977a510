"""What there is one of: an object that holds fixed memory or counts with others, and so cannot be copied."""

from typing import NoReturn, SupportsIndex

from ..dataflow.errors import ReplayError


class Unique:
    """Refuses `copy.copy`, `copy.deepcopy` and pickle: a copy would use the same buffers, graphs and counters."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise ReplayError."""
        del protocol
        name = type(self).__name__
        message = (
            f"a {name} cannot be copied or pickled: the copy would share its memory, and each would overwrite what the "
            f"other has filled; make another {name}"
        )
        raise ReplayError(message)
