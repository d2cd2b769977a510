"""Keywords of runners that are made of a decode runner, which hand them on."""

from typing import Any

from .config import Options
from .pool import Phase
from .ranks.group import Ranks


class SharedOptions(Options, total=False):
    """Those of `RunnerConfig`, and what a runner shares: memory with others of a pool, steps with those of ranks."""

    phase: Phase | None
    ranks: Ranks | None


def of_config(options: SharedOptions) -> dict[str, Any]:
    """Those of `RunnerConfig` alone."""
    return {name: value for name, value in options.items() if name in Options.__annotations__}
