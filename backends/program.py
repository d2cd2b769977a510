"""What a replay calls: each recorded operator again, whose results go where they lay at capture."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from .refusals import refuse
from .storages import tensors_in

Call = Callable[[], object]
_EMPTY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"},
)
_COPIES: Final = frozenset({"clone", "_to_copy"})  # an allocation, and a copy to it


def replay_of(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    results: Sequence[torch.Tensor],
    fixed: Sequence[tuple[int, torch.Tensor]],
    *,
    mutates: bool,
) -> Call | None:
    """The call that does an operator again: the operator itself, its out= overload, or it and a copy of each result.

    None for memory without contents. args, kwargs: aliases of the step's own tensors, so that nothing done to those
    (squeeze_, .data) reaches a replay. results: what it returned at capture. fixed: of these, those in memory of their
    own, by position. mutates: whether it writes an argument.
    """
    if is_collective(operator):
        return functools.partial(_wait_for, operator, args, kwargs)
    call = functools.partial(operator._op, *args, **kwargs)  # noqa: SLF001 - without the python layer around it
    if not fixed:
        return call
    if operator.namespace == "aten" and operator._opname in _EMPTY:  # noqa: SLF001
        return None
    targets, into = [tensor for _, tensor in fixed], None
    if not mutates and len(targets) == len(results) and not any(map(_overlaps, targets)):
        into = _into(operator, args, kwargs, targets)
    return into or functools.partial(_copy_results, call, fixed)


def _into(
    operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: Sequence[torch.Tensor]
) -> Call | None:
    """The call that writes an operator's results to tensors; None where torch has none."""
    if operator.namespace == "aten" and operator._opname in _COPIES:  # noqa: SLF001
        return functools.partial(targets[0].copy_, args[0])
    out = _out_overload(operator)
    if out is None:
        return None
    overload, names = out
    return functools.partial(overload._op, *args, **kwargs, **dict(zip(names, targets, strict=True)))  # noqa: SLF001


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copy_results(call: Call, fixed: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Call an operator, and copy each new result to where it lay at capture."""
    results = list(tensors_in(call()))
    for position, target in fixed:
        if _overlaps(target):  # no operator writes such a tensor
            target.untyped_storage().copy_(results[position].untyped_storage())
        else:
            target.copy_(results[position])


@functools.cache
def _out_overload(operator: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload that writes an operator's results into out= arguments, and their names."""
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    if any(str(value.type) != "Tensor" for value in schema.returns) or any(arg.is_out for arg in schema.arguments):
        return None
    wanted = [_signature(argument) for argument in schema.arguments]
    for name in operator.overloadpacket.overloads():
        candidate = getattr(operator.overloadpacket, name)
        arguments = candidate._schema.arguments  # noqa: SLF001
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        if len(outs) == len(schema.returns) and wanted == [_signature(arg) for arg in arguments if not arg.is_out]:
            return candidate, outs
    return None


def _signature(argument: Any) -> tuple[str, str, bool]:
    return argument.name, str(argument.type), argument.kwarg_only


def is_collective(operator: Any) -> bool:
    """Whether an operator is one of torch.distributed, whose schema does not say that it writes its arguments.

    CaptureError for a functional one, whose results are memory that torch.distributed hands out anew each time.
    """
    if operator.namespace == "_c10d_functional":
        refuse(
            f"{operator.name()}, a functional collective",
            "its result has no fixed address: use the one of torch.distributed that writes into a tensor of yours",
        )
    return bool(operator.namespace == "c10d")


def _wait_for(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Do a collective again, and wait for it as the step's own `wait` did."""
    from torch.distributed.distributed_c10d import Work  # noqa: PLC0415 - some builds of torch have none of it

    unbox: Any = Work.unbox
    result = operator(*args, **kwargs)
    unbox(result[-1] if isinstance(result, tuple | list) else result).wait()
