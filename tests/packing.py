"""Packets without a device: a CPU that packs uploads as one does, and the fused fill outside of any runner."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, final

import attrs
import pytest
import torch

from slotgraph.backends import Backend, Capabilities, Fusion, Graph, Interruption, Upload, load
from slotgraph.backends.cpu import HOST_FUSION, HostBackend, HostUpload
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.backends.ring import ring_on
from slotgraph.dataflow.axes import Live
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.computation import Computation
from slotgraph.dataflow.fill.bucket import Bucket, run_all
from slotgraph.dataflow.guard import without_gradients
from slotgraph.dataflow.packet import UNIT, WORD, Feed, head_bytes
from slotgraph.dataflow.views import Views

NAME = "packing"
Kernel = Callable[[], None]


@attrs.frozen(eq=False)
class Filled:
    """A bucket after a fill outside of any runner: its slots, and the functions that the device still has to run."""

    views: Views
    on_device: Sequence[Computation] = ()

    def compute_on_device(self, batch: Any = None) -> None:
        """Run them."""
        run_all(self.on_device, batch)


def filled(bucket: Bucket, batch: Any, live: Live, side: Mapping[str, Any] = MappingProxyType({})) -> Filled:
    """Fill a bucket as runners do, without the functions on the device."""
    plan, taken = bucket.admit(bucket.table.gather(batch, side), live)
    without_gradients(plan.write, taken, live, batch)
    shown = bucket.at(live)
    return Filled(shown.shown(), shown.functions.on_device)


class Streams:
    """The names of torch's device modules, over work that is done when the call returns."""

    class Event:
        """A point that has passed when it is recorded."""

        recorded = False

        def record(self, stream: int) -> None:
            self.recorded = stream == 0

        def query(self) -> bool:
            return self.recorded

        def synchronize(self) -> None:
            assert self.recorded, "nobody recorded it"

    @staticmethod
    def current_stream(device: torch.device) -> int:
        assert device.type == "cpu"
        return 0

    @staticmethod
    def synchronize(device: torch.device) -> None:
        assert device.type == "cpu"


def host_memory(nbytes: int) -> torch.Tensor:
    """Memory that is full of what must not be read."""
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu")


@final
class PackingBackend(HostBackend):
    """Captures as cpu-capture does; lists and arrays are host data, tensors lie where slots do. uploads: all so far."""

    name: ClassVar[str] = NAME

    def __init__(self) -> None:
        self._inner = CpuCaptureBackend()
        self.uploads: list[Upload] = []

    @property
    def capabilities(self) -> Capabilities:
        """As a device's: one dtype a call, and host data in a packet."""
        return attrs.evolve(self._inner.capabilities, packed_uploads=True, foreach_mixed=False)

    def upload(self, nbytes: int) -> Upload:
        self.uploads.append(ring_on(self.device, nbytes, Streams, host_memory))
        return self.uploads[-1]

    def capture(self, step: Callable[[], Any], **options: Any) -> Graph:
        return self._inner.capture(step, **options)

    def interrupt(self, run: Interruption) -> Any:
        return self._inner.interrupt(run)


def backend_of(name: str, lowering: str | None = None) -> Backend:
    """Make an adapter of the project's, or the one above; skip the test where it cannot run, or lacks the lowering."""
    if name == NAME:
        return PackingBackend()
    available = load(name).is_available()
    if not available:
        pytest.skip(f"{name}: {available.reason}")
    made = load(name)()
    if lowering not in (None, "auto", *made.capabilities.lowerings):
        pytest.skip(f"{name} has no lowering {lowering!r}")
    return made


def feed_for(buffers: Buffers, upload: Callable[[int], Any] = HostUpload) -> Feed:
    """What gives a packet that is large enough for every bucket over some buffers."""
    bodies = sum(WORD * one.tensor.numel() + UNIT for one in buffers)
    return Feed(upload, head_bytes(len([*buffers]), len([*buffers]) + 8) + UNIT + bodies)


def kernel_of(bucket: Bucket, fusion: Fusion | None = None) -> Kernel:
    """What launches the kernel of a bucket, on the host where no other is given."""
    fusion, packet = fusion or HOST_FUSION, bucket.feed.upload.packet
    table = torch.from_numpy(bucket.table_of_lanes(fusion.block)).to(packet.device)
    return fusion.kernel(table, packet, [lane.target for lane in bucket.lanes])
