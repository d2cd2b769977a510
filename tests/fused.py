"""The fused fill outside any runner: a packet for some buffers, and the kernel of one bucket."""

from collections.abc import Callable
from typing import Any

import torch

from slotgraph.backends import Fusion
from slotgraph.backends.cpu import HOST_FUSION, HostUpload
from slotgraph.dataflow.bucket import Absent, Bucket
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.packet import UNIT, WORD, Feed, head_bytes, table_of

Kernel = Callable[[], None]


def feed_for(buffers: Buffers, upload: Callable[[int], Any] = HostUpload) -> Feed:
    """What gives a packet that is large enough for every bucket over some buffers."""
    bodies = sum(WORD * one.tensor.numel() + UNIT for one in buffers)
    return Feed(upload, head_bytes(len([*buffers])) + UNIT + bodies)


def kernel_of(bucket: Bucket, absent: Absent = frozenset(), fusion: Fusion | None = None) -> Kernel:
    """What launches the kernel of a bucket, on the host where no other is given."""
    fusion, planned, packet = fusion or HOST_FUSION, bucket.planned(absent), bucket.feed.upload.packet
    table = torch.from_numpy(table_of(planned.lanes, fusion.block, planned.owner)).to(packet.device)
    return fusion.kernel(table, packet, [lane.target for lane in planned.lanes])
