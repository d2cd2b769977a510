"""For advanced declarations: slots and specifiers of your own, sources, tails, roles, plans, watchers, and types."""

from slotgraph import _publish
from slotgraph.dataflow.buffers import Exclusive
from slotgraph.dataflow.capabilities import DEVICE, HOST, FillRole, Role
from slotgraph.dataflow.plan import Pattern, plan_fill
from slotgraph.dataflow.ragged import Changed, Ragged
from slotgraph.dataflow.slots import Group, Slot, slot
from slotgraph.dataflow.sources import Compute, Path, Source, compute_of, fills, side
from slotgraph.dataflow.tails import Pad, once
from slotgraph.runners.engine.hooks import Watcher
from slotgraph.runners.steps.loop import LaunchedStep

# fmt: off
__all__ = [
    "DEVICE", "HOST", "Changed", "Compute", "Exclusive", "FillRole", "Group", "LaunchedStep", "Pad", "Path", "Pattern",
    "Ragged", "Role", "Slot", "Source", "Watcher", "compute_of", "fills", "once", "plan_fill", "side", "slot",
]
# fmt: on

_publish(__name__)
