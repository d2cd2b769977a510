"""A step run as it is written, on the very view that its graph is replayed on."""

from typing import Any

import torch

from ...dataflow.axes import BATCH
from ...dataflow.binding import span
from ...dataflow.bucket import Absent
from ...dataflow.inputs import Inputs
from ..captured import Captured
from ..parts import Parts
from ..running import Running, under_way


def graph_of(parts: Parts[Any], view: Inputs) -> Captured | None:
    """The graph of the bucket whose padded rows a filled view has; None where there is none, or it runs eagerly."""
    info, graphs, declaration = view._slotgraph_view, parts.graphs, parts.stage.declaration  # noqa: SLF001 - for runners
    if info is None or info.exact or graphs is None:
        return None
    told = [axis for axis in declaration.varying if axis != BATCH or parts.tally.path == "graph"]
    absent = absent_in(parts, view)
    for rows, sizes in parts.sizes.items():
        if all(sizes[axis] == info.step.padded_sizes[axis] for axis in told):
            return graphs.captured.get((rows, absent))
    return None


def absent_in(parts: Parts[Any], view: Inputs) -> Absent:
    """Optional slots that a view is without."""
    values = view.__dict__
    return frozenset(name for name, _ in parts.stage.declaration.optional if values[name] is None)


def ran_eagerly(parts: Parts[Any], view: Inputs) -> Any:
    """Run the step without its graph, on a view that is filled: what its graph would leave, padded rows and all."""
    captured = graph_of(parts, view)
    with torch.no_grad():
        if captured is not None and parts.tally.path == "graph":  # of which the graph alone computes on the device
            bucket, varying = captured.filling.bucket, parts.stage.declaration.varying
            bucket.ready(tuple(bucket.sizes[axis] for axis in varying), absent_in(parts, view)).compute_on_device()
        return under_way(Running(view), parts.stage.run, view)


def slot_spans(parts: Parts[Any]) -> list[tuple[int, int]]:
    """Addresses of all slots, those of the buffers that steps without a graph use among them."""
    found = [parts.eager.buffers, None if parts.graphs is None else parts.graphs.buffers]
    return [span(one.tensor) for buffers in found if buffers is not None for one in buffers if one.nbytes]
