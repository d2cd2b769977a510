"""Logging: events go to structlog if it is configured, else to the standard library's logger `slotgraph`.

Nothing is written to stdout, and no handler is added: without any logging setup, Python prints warnings to stderr.
"""

import functools
import logging
from typing import Any, Final

import structlog

NAME: Final = "slotgraph"


def _settings() -> dict[str, Any]:
    """Return structlog's current settings.

    The list of processors is copied, since `capture_logs()` changes it in place.
    """
    settings = structlog.get_config()
    return {**settings, "processors": list(settings["processors"])}


_DEFAULTS: Final = None if structlog.is_configured() else _settings()
"""structlog's settings unless it is configured, which print to stdout. None if it was configured before this import."""


def _log(level: int, event: str, /, **keys: Any) -> None:
    """Log an event at a level."""
    if structlog.is_configured() and _settings() != _DEFAULTS:  # `capture_logs()` leaves it configured, with defaults
        getattr(structlog.get_logger(NAME), logging.getLevelName(level).lower())(event, **keys)
        return
    logger = logging.getLogger(NAME)
    if logger.isEnabledFor(level):
        text = " ".join(f"{key}={value!r}" for key, value in keys.items())
        logger.log(level, "%s: %s", event, text, extra={"event": event, **keys}, stacklevel=2)


debug: Final = functools.partial(_log, logging.DEBUG)
info: Final = functools.partial(_log, logging.INFO)
warning: Final = functools.partial(_log, logging.WARNING)
