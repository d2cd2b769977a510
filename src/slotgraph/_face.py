"""The public names of slotgraph.

Their first use imports this module, and torch with it; `import slotgraph` does not.
"""

import slotgraph.errors
import slotgraph.standard  # noqa: F401 - shown without a further import
from slotgraph import _publish
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
from slotgraph.runners.stacked.breaks import current_view, graph_break
from slotgraph.runners.suggested import suggest

# fmt: off
__all__ = [
    "BATCH", "CACHE_LOC", "SEQ_LEN_FILL", "TOKENS", "Axis", "BreakableRunner", "DecodeRunner", "EagerRunner",
    "InputBuffers", "Inputs", "PrefillRunner", "Step", "check", "computed", "constant", "copied", "current_view",
    "debugged", "explain", "graph_break", "keep", "output", "record", "staged", "suggest",
]
# fmt: on

_publish(__name__)
