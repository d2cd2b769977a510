"""The fused fill over host memory, outside any runner: a packet for some buffers, and the kernel of one bucket."""

from collections.abc import Callable

import torch

from slotgraph.backends.cpu import HostFusion, HostUpload
from slotgraph.dataflow.bucket import Absent, Bucket
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.packet import UNIT, WORD, Feed, head_bytes, table_of

Kernel = Callable[[], None]


def feed_for(buffers: Buffers) -> Feed:
    """What gives a packet that is large enough for every bucket over some buffers."""
    bodies = sum(WORD * one.tensor.numel() + UNIT for one in buffers)
    return Feed(HostUpload, head_bytes(len(buffers)) + UNIT + bodies)


def kernel_of(bucket: Bucket, absent: Absent = frozenset()) -> Kernel:
    """What launches the kernel of a bucket."""
    fusion, planned = HostFusion(), bucket.planned(absent)
    table = torch.from_numpy(table_of(planned.lanes, fusion.block, planned.owner))
    return fusion.kernel(table, bucket.feed.upload.packet, [lane.target for lane in planned.lanes])
