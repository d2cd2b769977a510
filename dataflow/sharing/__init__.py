"""Sharing: memory of several runners, laid out by the lifetimes that their slots declare, and proven."""

from .layout import Layout, Place, check_layout, lay_out
from .lifetimes import Carry, Member, Schedule

__all__ = ["Carry", "Layout", "Member", "Place", "Schedule", "check_layout", "lay_out"]
