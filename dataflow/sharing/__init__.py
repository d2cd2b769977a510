"""Sharing: memory of several runners, laid out by the lifetimes that their slots declare, and proven."""

from .first_fit import lay_out
from .layout import Layout, Place
from .lifetimes import Member, Schedule
from .proof import check_layout
from .shared_allocations import Carry

__all__ = ["Carry", "Layout", "Member", "Place", "Schedule", "check_layout", "lay_out"]
