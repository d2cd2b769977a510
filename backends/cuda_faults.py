"""What CUDA refuses while a step is captured, and the ways out."""

from typing import Final

_ON_DEVICE: Final = (
    "it waits for the device, as item(), tolist(), cpu(), bool(), nonzero, x[mask], unique, torch.tensor(device=...), "
    "blocking copies and synchronize do. Keep the value on the device (torch.where, index_select), or hand it to the "
    "step in a slot"
)
_STREAMS: Final = (
    "it uses a stream or an event that is no part of this capture. Let the other stream wait for the current one "
    "first, and the current one for it before the step ends"
)
_CAUGHT: Final = "an operation of the step was refused, and the step went on after it: let its error through"
ADVICE: Final = (
    (
        "unless the cpu tensor is pinned",
        "copy from a slot with placement='host', which is pinned, or from a device slot",
    ),
    ("operation not permitted when stream is capturing", _ON_DEVICE),
    ("previous error during capture", _CAUGHT),
    ("uncaptured work in another stream", _STREAMS),
    ("legacy stream depend on a capturing", _STREAMS),
    ("unjoined work", _STREAMS),
    ("last recorded in a capturing stream", _STREAMS),
    ("outside graph capture", "a graph draws from the device's default generator alone: leave out generator="),
    ("not registered to the graph", "a graph draws from the device's default generator alone: leave out generator="),
    (
        "cublas_status_not_initialized",
        "its libraries set themselves up at first use: capture after a warm-up, as warmups= does",
    ),
    ("cuda graph is empty", "nothing was recorded: the step works on another stream or device, or does nothing at all"),
)
