"""Environment variables: all that slotgraph reads. Nothing else in slotgraph reads a variable of that prefix."""

import functools
import os
from typing import Final

from . import log
from .errors import ConfigError, did_you_mean

BACKEND: Final = "SLOTGRAPH_BACKEND"
"""The backend where the option is "auto"."""
LOWERING: Final = "SLOTGRAPH_LOWERING"
"""The lowering where the option is "auto"."""
DEBUG: Final = "SLOTGRAPH_DEBUG"
"""The debug modes of runners without the option."""
NO_COPY: Final = "SLOTGRAPH_EAGER_NO_COPY"
"""Whether eager runners without the option pass the batch's own tensors to the step."""
TEST_BACKENDS: Final = "SLOTGRAPH_TEST_BACKENDS"
"""The backends that the pytest plugin's fixture takes."""
_PREFIX: Final = "SLOTGRAPH_"
VARIABLES: Final = (BACKEND, LOWERING, DEBUG, NO_COPY, TEST_BACKENDS)
_WORDS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("", "0", "false", "no", "off"), False),
}


def text_of(variable: str) -> str:
    """Return the text of an environment variable without spaces around it, or "" if it is not set."""
    return os.environ.get(variable, "").strip()


def switch_of(variable: str, *, or_names: bool = False) -> bool | str:
    """Return whether an environment variable is on. It is off if it is not set.

    Args:
        variable: Its name.
        or_names: Whether to return any other text as it is.

    Raises:
        ConfigError: The text is neither 1, true, yes, on nor 0, false, no, off, in upper or lower case.
    """
    text = text_of(variable)
    found = _WORDS.get(text.lower(), text)
    if isinstance(found, bool) or or_names:
        return found
    raise ConfigError(f"{variable}={text!r:.80}: use 1, true, yes or on, or 0, false, no or off, or unset it")


@functools.cache
def warn_of_unknown() -> None:
    """Log an event for each variable that begins with SLOTGRAPH_ and is none of these, once in a process."""
    ends = [name.removeprefix(_PREFIX) for name in VARIABLES]  # all names are alike in the beginning
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in VARIABLES:
            near = did_you_mean(name.removeprefix(_PREFIX), ends)
            log.warning("unknown_variable", variable=name, reason=f"there are {', '.join(VARIABLES)}{near}")
