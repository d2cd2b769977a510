"""Guards, which test whether tensors are like those seen before, and calls without torch's modes and gradients."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

Guard = Callable[..., bool]
T = TypeVar("T")
outside_inference: Final = functools.partial(torch.inference_mode, mode=False)
"""A context in which torch makes ordinary tensors, which may be written in any mode."""
POINTER: Final = torch.Tensor.data_ptr
_C: Final[Any] = torch._C  # noqa: SLF001 - what torch.compile guards its own inputs with has no public name
FUNCTION_MODES: Final[Callable[[], int]] = _C._len_torch_function_stack  # noqa: SLF001 - it has no public name
"""Return how many modes intercept torch's functions in this thread."""


def below_modes(call: Callable[..., T], *args: Any) -> T:
    """Call a function that only inspects tensors without torch's function modes, which would double a step's time."""
    if not FUNCTION_MODES():
        return call(*args)
    with _C.DisableTorchFunction():
        return call(*args)


Free = Sequence[Sequence[int]]
"""For each tensor, the dims whose size a guard leaves free."""
_Sizes = list[int | None]


def own_guard(tensors: Sequence[torch.Tensor], free: Free | None = None) -> Guard:
    """Make a guard: a function that returns whether a list of tensors is like the given ones, in the same order.

    Pass it only tensors that have a shape: torch's own guards end the process at a nested one.

    Args:
        tensors: The tensors that the guard accepts.
        free: Dims whose size may be any, by default none. `dense_places` returns what else must be checked then.
    """
    free = [()] * len(tensors) if free is None else free
    make = torch_guard if tensors and _IS_TRUSTED else plain_guard
    firsts = {id(one): place for place, one in reversed([*enumerate(tensors)])}
    if len(firsts) == len(tensors):
        return make(tensors, free)
    places = [firsts[id(one)] for one in tensors]
    once = sorted(firsts.values())
    check = make([tensors[place] for place in once], [free[place] for place in once])

    def check_all(*found: Any) -> bool:  # torch's own guard rejects lists with the same tensor twice
        are_again = all(one is found[place] for one, place in zip(found, places, strict=True))
        return are_again and check(*[found[place] for place in once])

    return check_all


def dense_places(tensors: Sequence[torch.Tensor], free: Free) -> list[int]:
    """Return which tensors must also be contiguous, since their strides follow from free sizes."""
    return [place for place, one in enumerate(tensors) if None in _strides_of(one, free[place])]


def _sizes_of(tensor: torch.Tensor, free: Sequence[int]) -> _Sizes:
    """Return a tensor's sizes, with None for those that are free."""
    return [None if dim in free else size for dim, size in enumerate(tensor.shape)]


def _strides_of(tensor: torch.Tensor, free: Sequence[int]) -> _Sizes:
    """Return a tensor's strides, with None for those that follow from free sizes."""
    strides = tensor.stride()
    if not free or not tensor.is_contiguous():
        return [*strides]
    dense = 1
    found = list[int | None]()
    last = max(free)
    for dim in range(tensor.dim() - 1, -1, -1):
        if strides[dim] != dense:  # this dim has at most one row, since with more rows this stride would leave gaps
            return [None] * tensor.dim()
        found.append(None if dim < last else dense)
        dense *= tensor.shape[dim] or 1
    return found[::-1]


def torch_guard(tensors: Sequence[torch.Tensor], free: Free) -> Guard:
    """Make torch's own guard, which has no public name and takes no tensor twice."""
    sizes = [_sizes_of(one, dims) for one, dims in zip(tensors, free, strict=True)]
    strides = [_strides_of(one, dims) for one, dims in zip(tensors, free, strict=True)]
    guards = _C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # noqa: SLF001
    return guards.check  # type: ignore[no-any-return] # which is in C


def plain_guard(tensors: Sequence[torch.Tensor], free: Free) -> Guard:
    """Make the same guard in plain Python, which takes several times as long."""
    wanted = list[tuple[Any, _Sizes, _Sizes]]()
    for one, dims in zip(tensors, free, strict=True):
        wanted.append((_facts_of(one), _sizes_of(one, dims), _strides_of(one, dims)))

    def check(*found: Any) -> bool:
        try:
            for one, (facts, sizes, strides) in zip(found, wanted, strict=True):
                if _facts_of(one) != facts or not (_fit(sizes, one.shape) and _fit(strides, one.stride())):
                    return False
        except (AttributeError, RuntimeError, TypeError, ValueError):  # not a tensor, or one without sizes or strides
            return False
        return True

    return check


def _facts_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what tensors have in common that are alike, apart from their sizes and strides."""
    return type(tensor), tensor.dtype, tensor.device, tensor.is_neg(), tensor.is_conj()


def _fit(wanted: _Sizes, found: Sequence[int]) -> bool:
    """Return whether sizes or strides are as wanted. A wanted None accepts any number."""
    return len(wanted) == len(found) and all(one in {None, other} for one, other in zip(wanted, found, strict=True))


def _is_trusted() -> bool:
    """Return whether torch's own guard, which is undocumented, gives the same results as the plain one."""
    with outside_inference(), _C.DisableTorchFunction():
        zeros = functools.partial(torch.zeros, device="cpu")
        rows = zeros(4, 6)
        pairs = zeros(4, 6, dtype=torch.complex64)
        others = [
            torch.ones_like(rows),
            zeros(9, 6),
            zeros(4, 5),
            zeros(4, 6, 1),
            zeros(4, 12)[:, ::2],
            zeros(4, 6, dtype=torch.int32),
            zeros(4, 6, device="meta"),
            torch.nn.Parameter(rows, requires_grad=False),
            pairs.conj().imag,
            pairs,
            pairs.conj(),
        ]
        try:
            for like in (rows, pairs):
                for free in ((), (0,), (0, 1)):
                    guard = torch_guard([like], [free])
                    plain = plain_guard([like], [free])
                    if [guard(one) for one in others] != [plain(one) for one in others]:
                        return False
        except Exception:  # noqa: BLE001 - whatever another version makes of the call
            return False
    return True


_IS_TRUSTED: Final = _is_trusted()


def run_and_undo(call: Callable[[], T], undo: Callable[[], object]) -> T:
    """Call a function and then `undo`, even if an interrupt comes at any point.

    `undo` may run twice, the second time to finish what an interrupt broke off.
    """
    try:
        try:
            return call()
        finally:
            undo()
    finally:
        undo()


GRADIENTS: Final = torch.is_grad_enabled
_SET: Final[Callable[[bool], None]] = torch._C._set_grad_enabled  # noqa: SLF001 - what `no_grad` calls has no public name


def without_gradients(function: Callable[..., T], *args: Any) -> T:
    """Call a function with gradients off, and restore the setting afterwards."""
    if not GRADIENTS():
        return function(*args)
    try:
        try:
            _SET(False)  # noqa: FBT003 - torch's own
            return function(*args)
        finally:
            _SET(True)  # noqa: FBT003 - as above
    finally:  # an interrupt may come inside the inner `finally`
        _SET(True)  # noqa: FBT003 - as above
