"""Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs."""

from slotgraph import errors, standard
from slotgraph.dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Step
from slotgraph.dataflow.binding import Exclusive
from slotgraph.dataflow.capabilities import CACHE_LOC, DEVICE, HOST, SEQ_LEN_FILL, FillRole, Role
from slotgraph.dataflow.errors import SlotGraphError
from slotgraph.dataflow.inputs import Inputs
from slotgraph.dataflow.slots import Slot
from slotgraph.dataflow.sources import side
from slotgraph.dataflow.specifiers import computed, constant, copied, host_parameter, output, slot, staged
from slotgraph.dataflow.tails import keep, once
from slotgraph.runners.breakable import BreakableRunner
from slotgraph.runners.buckets import Buckets
from slotgraph.runners.check.checks import check
from slotgraph.runners.config import RunnerConfig
from slotgraph.runners.debug import debugged
from slotgraph.runners.decode import DecodeRunner
from slotgraph.runners.draft import DraftRunner
from slotgraph.runners.draft_extend import DraftExtendRunner, MultiLayerDraftExtendRunner
from slotgraph.runners.eager import EagerRunner
from slotgraph.runners.explained.explanation import explain
from slotgraph.runners.input_buffers import InputBuffers
from slotgraph.runners.pool import InputPool
from slotgraph.runners.prefill import PrefillRunner
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.ranks.pipeline import PipelineStage
from slotgraph.runners.recording.recorder import record
from slotgraph.runners.running import current_view
from slotgraph.runners.stacked.breaks import graph_break

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "BATCH", "CACHE_LOC", "DEVICE", "HOST", "SEQ_LEN_FILL", "TOKENS", "WIDTH", "Axis", "BreakableRunner", "Buckets",
    "DecodeRunner", "DraftExtendRunner", "DraftRunner", "EagerRunner", "Exclusive", "FillRole", "InputBuffers",
    "InputPool", "Inputs", "MultiLayerDraftExtendRunner", "PipelineStage", "PrefillRunner", "Ranks", "Role",
    "RunnerConfig", "Slot", "SlotGraphError", "Step", "check", "computed", "constant", "copied", "current_view",
    "debugged", "errors", "explain", "graph_break", "host_parameter", "keep", "once", "output", "record", "side",
    "slot", "staged", "standard",
]
# fmt: on
