"""Declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs.

What fewer programs need is in `slotgraph.standard`, `.errors`, `.speculative`, `.ranks`, `.pool`, `.config`, `.testing`
and `.extend`.
"""

from slotgraph import errors as errors
from slotgraph import standard as standard
from slotgraph.dataflow.axes import BATCH, TOKENS, Axis, Step
from slotgraph.dataflow.capabilities import CACHE_LOC, SEQ_LEN_FILL
from slotgraph.dataflow.inputs import Inputs
from slotgraph.dataflow.slots import computed, constant, copied, output, staged
from slotgraph.dataflow.tails import keep
from slotgraph.runners.check.checks import check
from slotgraph.runners.debug import debugged
from slotgraph.runners.decode import DecodeRunner
from slotgraph.runners.eager import EagerRunner
from slotgraph.runners.explained.explanation import explain
from slotgraph.runners.input_buffers import InputBuffers
from slotgraph.runners.prefill import BreakableRunner, PrefillRunner
from slotgraph.runners.recording.recorder import record
from slotgraph.runners.stacked.replay import current_view, graph_break

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "BATCH", "CACHE_LOC", "SEQ_LEN_FILL", "TOKENS", "Axis", "BreakableRunner", "DecodeRunner", "EagerRunner",
    "InputBuffers", "Inputs", "PrefillRunner", "Step", "check", "computed", "constant", "copied", "current_view",
    "debugged", "explain", "graph_break", "keep", "output", "record", "staged",
]
# fmt: on
