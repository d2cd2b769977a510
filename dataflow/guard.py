"""What a step asks of torch: guards over tensors seen before, and no modes and gradients while it runs."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

Guard = Callable[..., bool]
T = TypeVar("T")
outside_inference: Final = functools.partial(torch.inference_mode, mode=False)
"""A block that makes ordinary tensors, which may be written in any mode."""
_FACTS: Final = operator.attrgetter("__class__", "dtype", "device", "shape")
IS_NESTED: Final = operator.attrgetter("is_nested")
POINTER: Final = torch.Tensor.data_ptr
_C: Final[Any] = torch._C  # noqa: SLF001 - what torch.compile guards its own inputs with has no public name
FUNCTION_MODES: Final[Callable[[], int]] = _C._len_torch_function_stack  # noqa: SLF001 - it has no public name
"""How many modes watch torch's functions in this thread."""
_IS_TRIED: Final = [*map(int, torch.__version__.split(".")[:2])] <= [2, 13]
"""Whether torch's own guards were tried with this version of it; with other arguments than these they may crash."""


def below_modes(call: Callable[..., T], *args: Any) -> T:
    """Call what only looks at tensors without modes that watch torch's functions, which would double a step's time."""
    if not FUNCTION_MODES():
        return call(*args)
    with _C.DisableTorchFunction():
        return call(*args)


def own_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """A guard that takes as many tensors as it is made over; False where one differs, or is not at all its places.

    Ask it of tensors alone, none of them nested: torch's own guards end the process at a nested one.
    """
    firsts = {id(one): place for place, one in reversed([*enumerate(tensors)])}
    if len(firsts) == len(tensors):
        if not tensors or not _IS_TRIED:
            return plain_guard(tensors)
        sizes, strides = [list(one.shape) for one in tensors], [list(one.stride()) for one in tensors]
        guards = _C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # noqa: SLF001
        return guards.check  # type: ignore[no-any-return] # which is in C
    places, once = [firsts[id(one)] for one in tensors], sorted(firsts.values())
    check = own_guard([tensors[place] for place in once])  # torch's own refuse a tensor at several places

    def check_all(*found: Any) -> bool:
        are_again = all(one is found[place] for one, place in zip(found, places, strict=True))
        return are_again and check(*[found[place] for place in once])

    return check_all


def plain_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """The same in plain Python, for a torch that was not tried."""
    wanted = [_facts(one) for one in tensors]

    def check(*found: Any) -> bool:
        try:
            return [_facts(one) for one in found] == wanted
        except (AttributeError, RuntimeError, ValueError):  # no tensor, or one without sizes or strides
            return False

    return check


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (*_FACTS(tensor), tensor.stride(), tensor.is_neg(), tensor.is_conj(), tensor.is_inference())


GRADIENTS: Final = torch.is_grad_enabled
_SET: Final[Callable[[bool], None]] = torch._C._set_grad_enabled  # noqa: SLF001 - what `no_grad` calls has no public name


def without_gradients(function: Callable[..., T], *args: Any) -> T:
    """Call a function with gradients off, and leave them as they were."""
    if not GRADIENTS():
        return function(*args)
    try:
        try:
            _SET(False)  # noqa: FBT003 - torch's own
            return function(*args)
        finally:
            _SET(True)  # noqa: FBT003 - as above
    finally:  # an interrupt may come before the line above has run
        _SET(True)  # noqa: FBT003 - as above
