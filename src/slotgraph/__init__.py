"""slotgraph: declare a captured step's inputs once; get the buffers, the fills, the padding, the views and the proofs."""

from .dataflow.axes import BATCH, TOKENS, Axis
from .dataflow.capabilities import DEVICE, HOST
from .dataflow.errors import SlotGraphError
from .dataflow.inputs import Inputs
from .dataflow.roles import CACHE_LOC, SEQ_LEN_FILL, FillRole, Role
from .dataflow.slots import Slot
from .dataflow.sources import side
from .dataflow.specifiers import computed, constant, copied, output, slot, staged
from .dataflow.step import Step
from .dataflow.tails import keep, once
