"""The ways to run the fused kernel: in plain code, in Triton's interpreter on host memory, and on a device."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import torch

from slotgraph.backends.cuda import CudaBackend
from slotgraph.backends.host_fill import BLOCK, fill_lanes
from slotgraph.dataflow.binding import span

KERNEL = "slotgraph.backends.cuda_kernel"


@attrs.frozen
class Launch:
    """What one launch is given: the table and the packet, the buffers and the sources that these point to."""

    table: torch.Tensor
    packet: torch.Tensor
    buffers: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    block: int


@attrs.frozen
class Way:
    """One way to run the kernel.

    blocks: elements for each table row that are tried. exact: whether a converted NaN must have the reference's very
    bits. Torch has no one answer on the CPU: they hang on how many elements there are, and so on its vector code.
    programs: about how many one launch may have at most; the interpreter takes a millisecond for each.
    """

    device: torch.device
    blocks: tuple[int, int, int]
    exact: bool
    run: Callable[[Launch], None]
    programs: int = 1 << 30


def way(name: str) -> Way:
    """A way by its name; skips with the reason where it cannot be gone."""
    if name == "cuda":
        return on_device()
    if name == "interpreter":
        module = interpreted()
        return Way(torch.device("cpu"), (8, 64, 1024), exact=False, run=watched(module), programs=48)
    return Way(torch.device("cpu"), (8, 64, BLOCK), exact=False, run=by_host)


def need_triton() -> None:
    """Skip where there is none."""
    if sys.platform != "linux" or importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, or not made for this system: it is for Linux")


def by_host(launch: Launch) -> None:
    """The same in plain code."""
    fill_lanes(launch.table, launch.packet, list(launch.buffers))


def by_triton(module: Any, launch: Launch) -> None:
    """The kernel of a module, compiled or interpreted."""
    kernel = module.fill_lanes[(len(launch.table),)]
    kernel(launch.table, launch.packet, BLOCK=launch.block, num_warps=module.WARPS)


def on_device() -> Way:
    """The compiled kernel on the current device."""
    available = CudaBackend.is_available()
    if not available:
        pytest.skip(f"cuda: {available.reason}")
    need_triton()
    module = importlib.import_module(KERNEL)
    device = torch.device("cuda", torch.cuda.current_device())
    exact = torch.cuda.get_device_capability(device) >= (8, 0)  # before, torch rounds to bfloat16 in code of its own
    return Way(device, (8, 64, module.BLOCK), exact=exact, run=lambda launch: by_triton(module, launch))


def interpreted() -> ModuleType:
    """The kernel's module once more, under another name, for Triton's interpreter."""
    need_triton()
    triton = importlib.import_module("triton")  # as it is: only our module is to be interpreted
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip(
            f"triton {triton.__version__}: its interpreter leaves the language changed, for compiled kernels too"
        )
    found = importlib.util.find_spec(KERNEL)
    assert found is not None
    spec = importlib.util.spec_from_file_location(KERNEL + "_interpreted", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec.loader.exec_module(module)
    return module


def watched(module: ModuleType) -> Callable[[Launch], None]:
    """A module's kernel in the interpreter, every access of which is held to what a device would take."""

    def run(launch: Launch) -> None:
        tensors = (launch.table, launch.packet, *launch.buffers, *launch.sources)
        with watch([span(tensor) for tensor in tensors]), np.errstate(all="ignore"):  # float16 overflows as it should
            by_triton(module, launch)

    return run


@contextmanager
def watch(spans: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Refuse accesses of the interpreter's outside some spans, and at addresses that only a host forgives."""
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store
    lows, highs = (np.array(ends, np.uint64) for ends in zip(*spans, strict=True))

    def check(pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        check_access(pointers.data, np.broadcast_to(mask.data, pointers.data.shape), size, lows, highs)

    def checked_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", checked_load)
        patch.setattr(builder, "create_masked_store", checked_store)
        yield


Words = npt.NDArray[np.uint64]


def check_access(addresses: Words, mask: npt.NDArray[np.bool_], size: int, lows: Words, highs: Words) -> None:
    """Whether each access lies in one of the spans and at a multiple of its size; rows of two go in one access."""
    used = addresses[mask]
    assert ((used[:, None] >= lows) & (used[:, None] + np.uint64(size) <= highs)).any(axis=1).all(), "out of bounds"
    assert not (used % size).any(), "misaligned"
    if addresses.ndim > 1:
        assert (mask[:, 0] == mask[:, 1]).all(), "half of a pair"
        assert not (addresses[mask[:, 0], 0] % (2 * size)).any(), "misaligned pair"
