"""Lowerings: how a plan is run. A new one is an object in this file, plus copies in `fill.writers` if none fit."""

from collections.abc import Mapping
from typing import Final, Literal

import attrs

from .capabilities import LoweringName

How = Literal["fused", "direct", "foreach", "single", "in place"]
"""How slots are copied.

By one fused kernel, directly by address in host memory, together by one foreach call, each by a single plain copy, or
not at all, since a producer wrote them in place.
"""


@attrs.frozen
class Lowering:
    """One way to run plans.

    Attributes:
        name: Its name, in options, plans and capabilities.
        copies: How slots on the device are copied, unless a slot rules it out.
        has_kernel: Whether a kernel of the device writes the slots, from data in a packet.
        is_in_graph: Whether a step's graph begins with that kernel.
        is_reference: Whether it fills slot by slot in plain code, without a bound plan.
        runs_ahead: Whether a step can be launched before the host has seen the last one.
    """

    name: LoweringName
    copies: How
    has_kernel: bool = False
    is_in_graph: bool = False
    is_reference: bool = False
    runs_ahead: bool = False


LOWERINGS: Final[Mapping[LoweringName, Lowering]] = {
    "in_graph": Lowering("in_graph", "fused", has_kernel=True, is_in_graph=True, runs_ahead=True),
    "fused": Lowering("fused", "fused", has_kernel=True),
    "direct": Lowering("direct", "direct", runs_ahead=True),
    "foreach": Lowering("foreach", "foreach", runs_ahead=True),
    "slot_by_slot": Lowering("slot_by_slot", "single", is_reference=True),
}
"""All lowerings by name, the one with the fewest calls first."""
