"""What an NPU refuses while a step is captured, and the ways out."""

from typing import Final

_STREAMS_GONE: Final = (
    "the device has no streams left for another graph (2,048 in all; each graph takes at least one, and one more for "
    "each stream that the step forks to): capture fewer buckets or patterns, or fewer runners"
)
_ON_DEVICE: Final = (
    "it waits for the device, as item(), tolist(), cpu(), bool(), blocking copies, copies from memory that is not "
    "pinned, and synchronize do. Keep the value on the device (torch.where, index_select), or hand it to the step in a "
    "slot"
)
_EXPANDABLE: Final = (
    "take pin_memory_expandable_segments out of PYTORCH_NPU_ALLOC_CONF: a graph's pinned memory would be given to "
    "others while the graph reads it"
)
_NO_KERNEL: Final = (
    "this operator has no kernel that a graph can hold, as boolean masks and nonzero have none: use torch.where, "
    "masked_fill or an index of fixed size"
)
_BROKEN: Final = (
    "an operator or a copy, as one from memory that is not pinned, was refused where torch_npu's queue ran it; stderr "
    "has its message, and with ASCEND_LAUNCH_BLOCKING=1 the line is told"
)
CONDITIONS: Final = (
    ("207005", _STREAMS_GONE),
    ("207008", _STREAMS_GONE),
    ("stream resources are insufficient", _STREAMS_GONE),
    ("captured on a non-default stream", "the current stream is the default one: capture on another"),
    (
        "task_queue_enable = 2",
        "set TASK_QUEUE_ENABLE=1 in the environment, or call torch.npu.set_task_queue_enable(1) before capture",
    ),
    ("pin_memory_expandable_segments", _EXPANDABLE),
    ("the process exits for this inner error", _BROKEN),
)
"""By what torch_npu 2.13 says, in lower case; 207005 and 207008 are CANN's numbers, the one sign of too many graphs."""
ADVICE: Final = (
    ("aclop operators", _NO_KERNEL),
    ("stream synchronize failed", _ON_DEVICE),
    ("aclrtsynchronize", _ON_DEVICE),
    ("aclrtmemcpy", _ON_DEVICE),
)
"""Likewise, for what the step does."""
