"""The fused fill over host memory, outside any runner: a packet for some buffers, and the kernel of one bucket."""

from collections.abc import Callable

import torch

from slotgraph.backends.host_fusion import HostFusion
from slotgraph.backends.host_upload import HostUpload
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.cargo import UNIT
from slotgraph.dataflow.feed import Feed, Feeder
from slotgraph.dataflow.fused import FusedFill
from slotgraph.dataflow.lanes import WORD, head_bytes, table_of

Kernel = Callable[[], None]


def feeder_for(buffers: Buffers) -> Feeder:
    """What gives a packet that is large enough for every bucket over some buffers."""
    bodies = sum(WORD * one.tensor.numel() + UNIT for one in buffers)
    return Feeder(HostUpload, head_bytes(len(buffers)) + UNIT + bodies)


def feed_for(buffers: Buffers) -> Feed:
    """The same, made."""
    return feeder_for(buffers)()


def kernel_of(fused: FusedFill) -> Kernel:
    """What launches the kernel of a fused fill."""
    fusion, lanes = HostFusion(), fused.packer.lanes
    table = torch.from_numpy(table_of(lanes, fusion.block, fused.packer.owner))
    return fusion.kernel(table, fused.feed.upload.packet, [lane.target for lane in lanes])
