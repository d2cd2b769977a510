"""What torch_npu 2.13 says when a capture is refused, told apart; tests/npu meets what a stand-in can bring about."""

import pytest

from slotgraph.backends.faults import not_captured
from slotgraph.backends.npu_faults import ADVICE, CONDITIONS

_BEGIN = (
    "capture_begin:../torch_npu/csrc/core/npu/NPUGraph.cpp:318 NPU function error: "
    "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is {}\n[ERROR] 2026 (PID:1) ERR00100"
)
_PINNED = (
    "ACLGraph capture is not supported when pin_memory_expandable_segments=True. NPUExpandableHostAllocatorImpl "
    "overrides allocate/free/empty_cache/record_event and does not integrate with the base CachingHostAllocator's pool"
)
_DEFAULT = (
    "NPU graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them on the "
    "default stream.)"
)
_QUEUE = "Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture, please export TASK_QUEUE_ENABLE=1/0."
_MASK = "Cannot run aclop operators during NPU graph capture. Current working aclop is NonZero."
_ITEM = (
    "operator():../torch_npu/csrc/aten/common/LocalScalarDenseNpu.cpp:24 NPU function error: "
    "c10_npu::acl::AclrtSynchronizeStreamWithTimeout(copy_stream), error code is 107030"
)


def refuse(text: str) -> None:
    """A step that the device refuses."""
    raise RuntimeError(text)


def told(text: str) -> str:
    """What is made of an error that was raised from a line of this file."""
    with pytest.raises(RuntimeError) as caught:
        refuse(text)
    return str(not_captured(caught.value, ADVICE, CONDITIONS))


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        (_BEGIN.format(207005), "no streams left for another graph"),
        (_BEGIN.format(207008), "no streams left for another graph"),
        (_DEFAULT, "the current stream is the default one"),
        (_QUEUE, "set TASK_QUEUE_ENABLE=1 in the environment"),
        (_PINNED, "take pin_memory_expandable_segments out of PYTORCH_NPU_ALLOC_CONF"),
    ],
)
def test_conditions(text: str, way_out: str) -> None:
    """What is wrong whatever the step does is told as that, without a line of the step, and without a place in C++."""
    said = told(text)
    assert said.startswith("nothing can be captured as things are (")
    assert way_out in said
    assert ".cpp" not in said
    assert ".py" not in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "way_out"), [(_MASK, "no kernel that a graph can hold"), (_ITEM, "it waits for the device")]
)
def test_steps(text: str, way_out: str) -> None:
    """What a step does is told with its line."""
    said = told(text)
    assert said.startswith("a captured step cannot do what it does at test_npu_faults.py:")
    assert way_out in said
    assert ".cpp" not in said


def test_memory() -> None:
    """Too little memory is not taken for too few streams."""
    assert "the device's memory ran out" in told("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61 GiB total)")
    assert "tried to allocate 2.00 GiB" in told("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61 GiB total)")
