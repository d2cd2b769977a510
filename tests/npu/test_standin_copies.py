"""The stand-in's memory: what is copied arrives, when it is read, and that stale memory is seen to be stale."""

import ctypes
from typing import Any

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]

POISON = 0xA5

both = pytest.mark.modes("eager", "lazy")
only_lazy = pytest.mark.modes("lazy")


def numbers(dtype: torch.dtype = torch.int64, count: int = 7) -> torch.Tensor:
    """Some random values."""
    return torch.randint(0, 2 if dtype is torch.bool else 100, (count,)).to(dtype)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_what_is_copied_arrives(npu: Any, dtype: torch.dtype, *, pinned: bool) -> None:
    """Each dtype goes to the device, to another place there, and back."""
    source = numbers(dtype)
    on_device = torch.empty_like(source, device="npu")
    on_device.copy_(source.pin_memory() if pinned else source, non_blocking=pinned)
    assert torch.equal(on_device.clone().cpu(), source)
    npu.synchronize()


@both
def test_device_memory_that_nobody_wrote_is_poison() -> None:
    """A fresh tensor holds a pattern, not zeros that a test would take for right."""
    assert (torch.empty(3 << 20, dtype=torch.uint8, device="npu").cpu() == POISON).all()


@both
def test_device_memory_that_was_given_back_is_poison(npu: Any) -> None:
    """What a stale address reads after the free is the pattern, not the last values."""
    tensor = torch.full((5 << 20,), 7, dtype=torch.uint8, device="npu")
    npu.synchronize()
    address = tensor.data_ptr()
    assert ctypes.string_at(address, 8) == b"\7" * 8
    del tensor
    npu.empty_cache()
    assert ctypes.string_at(address, 8) == bytes([POISON] * 8)


@only_lazy
def test_a_source_overwritten_in_flight_corrupts_the_copy() -> None:
    """An asynchronous copy from pinned memory reads it when it runs, not when it is called."""
    source, target = numbers().pin_memory(), torch.empty(7, dtype=torch.int64, device="npu")
    target.copy_(source, non_blocking=True)
    source.fill_(-1)
    assert target.cpu().tolist() == [-1] * 7


@only_lazy
def test_a_pageable_source_is_read_in_the_call() -> None:
    """The device cannot read pageable memory later, so non_blocking means nothing for it."""
    source, target = numbers(), torch.empty(7, dtype=torch.int64, device="npu")
    before = source.clone()
    target.copy_(source, non_blocking=True)
    source.fill_(-1)
    assert torch.equal(target.cpu(), before)


@only_lazy
def test_a_result_is_not_there_before_somebody_waits(npu: Any) -> None:
    """An asynchronous copy to pinned memory has not written it when the call returns."""
    source, target = numbers().to("npu"), torch.full((7,), -1).pin_memory()
    npu.synchronize()
    target.copy_(source, non_blocking=True)
    assert target.tolist() == [-1] * 7
    npu.synchronize()
    assert torch.equal(target, source.cpu())


@pytest.mark.modes("zero")
def test_torch_npu_imports_and_finds_no_device(npu: Any) -> None:
    """The package is there, the device is not."""
    assert not npu.is_available()
    assert npu.device_count() == 0


@pytest.mark.modes("zero")
def test_a_tensor_is_refused_with_the_reason(npu: Any) -> None:
    """The wheel's own error, for an invalid device."""
    assert npu.device_count() == 0
    with pytest.raises(RuntimeError, match="107001"):
        torch.zeros(3, device="npu")
