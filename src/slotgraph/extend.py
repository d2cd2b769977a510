"""For advanced declarations: slots and specifiers of your own, sources, roles, adopted memory, and types."""

from slotgraph import _publish
from slotgraph.dataflow.buffers import Exclusive
from slotgraph.dataflow.capabilities import DEVICE, HOST, FillRole, Role
from slotgraph.dataflow.slots import Slot, slot
from slotgraph.dataflow.sources import side
from slotgraph.dataflow.tails import once
from slotgraph.runners.steps.loop import LaunchedStep

__all__ = ["DEVICE", "HOST", "Exclusive", "FillRole", "LaunchedStep", "Role", "Slot", "once", "side", "slot"]

_publish(__name__)
