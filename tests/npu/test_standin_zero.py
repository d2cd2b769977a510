"""The stand-in with no device: what detection sees where the package is, and no NPU."""

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.modes("zero")


def test_torch_npu_imports_and_finds_no_device(npu: Any) -> None:
    """The package is there, the device is not."""
    assert not npu.is_available()
    assert npu.device_count() == 0


def test_a_tensor_is_refused_with_the_reason(npu: Any) -> None:
    """The wheel's own error, for an invalid device."""
    assert npu.device_count() == 0
    with pytest.raises(RuntimeError, match="107001"):
        torch.zeros(3, device="npu")
