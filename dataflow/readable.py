"""Readable memory: whether a tensor's elements lie where its address says, as every copy takes for granted."""

from typing import Any, Final

import torch

NOT_TOLD: Final = (AttributeError, TypeError, ValueError, RuntimeError)
"""What is raised by something that is no tensor, or by a tensor that does not tell its shape, strides or address."""
_PLAIN: Final = vars(torch.Tensor)["__torch_dispatch__"]
_HAS_STORAGE: Final = torch._C._has_storage  # noqa: SLF001 - no public name


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind a tensor that has elements."""
    return bool(tensor.data_ptr() or not tensor.numel())


def unreadable(source: Any) -> str:
    """Why the elements of a tensor cannot be read at its address, and the way out; nothing where they can.

    Nothing is said of what is no tensor. A nested tensor must be asked nothing but whether it is one.
    """
    if not isinstance(source, torch.Tensor):
        return ""
    if source.is_nested or source.layout != torch.strided:
        return f"a {'nested' if source.is_nested else source.layout} tensor; pass a dense one"
    kind = type(source)
    if getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN:
        return f"a {kind.__name__}, which has no memory of its own; pass the plain tensor in it, as `.to_local()` gives"
    if not _HAS_STORAGE(source):
        return "a tensor inside of a torch.func transform; run the step outside of vmap and grad"
    return _without_memory(source)


def _without_memory(source: torch.Tensor) -> str:
    try:
        if source.device.type == "meta" or has_memory(source):  # of the former the device is wrong
            return ""
    except NOT_TOLD as error:
        return f"a {type(source).__name__} that cannot be read: {error}"
    return "a tensor without memory of its own, such as one whose storage was freed; pass one that has some"
