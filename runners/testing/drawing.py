"""Hypothesis, or the command that installs it."""

from .needed import need

need("hypothesis", "slotgraph.testing")

import hypothesis  # noqa: E402 - not before the line that tells who lacks it what to do
from hypothesis import strategies as st  # noqa: E402 - likewise

__all__ = ["hypothesis", "st"]
