"""What a runner is made of, for all that looks at runners: checks, records, pictures, books."""

from collections.abc import Collection, Mapping
from typing import Generic

import attrs

from ..dataflow.axes import Sizes
from ..dataflow.bucket import Absent
from ..dataflow.sizing import Sizer
from .config import RunnerConfig
from .coordination import Coordinator
from .decision import Tally
from .eagerly import Eagerly
from .graphs import GraphSet
from .pool import Seat
from .stage import Stage, V
from .watching import Watch


@attrs.frozen(eq=False)
class Parts(Generic[V]):
    """The parts of one runner.

    name: in events. sizes: each bucket's padded sizes, by its rows; none of a runner that captures nothing.
    patterns: of absent slots, that graphs are captured for. graphs: the captured ones, with buffers and filler; None
    of a runner that captures nothing. eager: what runs the batches that no graph takes. size: tells a batch's live
    sizes, one for each varying axis, and at last those of the leading axis. tally: its books. watch: its watchers.
    seat: where its buffers come from, which tells the layout of memory that it shares; None where they grow.
    coordinator: of the same runner on all ranks.
    """

    name: str
    config: RunnerConfig
    stage: Stage[V]
    sizes: Mapping[int, Sizes]
    patterns: Collection[Absent]
    graphs: GraphSet[V] | None
    eager: Eagerly[V]
    coordinator: Coordinator
    size: Sizer
    tally: Tally
    watch: Watch
    seat: Seat[V] | None = None
