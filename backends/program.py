"""What a replay calls: each recorded operator, writing where its results lay at capture, by the shortest way in.

Shortest is torch's own python function (`torch.addmm(..., out=...)`), then the operator's out= overload, then the
operator and a copy. A python function is taken only if it was seen to call that overload with those arguments.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .collectives import again, is_collective
from .storages import tensors_in
from .torch_modes import run_under

Call = Callable[[], object]


@attrs.frozen
class Operation:
    """One operator as it was called at capture; `fixed` are its new results, by their position among all of them.

    All tensors are aliases of the step's own, so that nothing done to those (squeeze_, .data) reaches a replay.
    """

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fixed: Sequence[tuple[int, torch.Tensor]]
    results: int
    mutates: bool


@attrs.frozen
class Pause:
    """Something that is called between operators, as it is."""

    run: Call


Part = tuple[list[Call], Call | None]
"""Calls that are replayed below autograd, and what is called after them as it is."""


_EMPTY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"},
)
_FILLED: Final[Mapping[str, Callable[[Sequence[Any]], Any]]] = {
    "zeros": lambda _args: 0,
    "zeros_like": lambda _args: 0,
    "new_zeros": lambda _args: 0,
    "ones": lambda _args: 1,
    "ones_like": lambda _args: 1,
    "new_ones": lambda _args: 1,
    "full": lambda args: args[1],
    "full_like": lambda args: args[1],
    "new_full": lambda args: args[2],
    "scalar_tensor": lambda args: args[0],
}
_COPIED: Final = frozenset({"clone", "_to_copy"})  # an allocation and a copy_, which the fixed result takes over
_FACTORIES: Final = frozenset({"arange", "eye", "linspace", "logspace", "rand", "randint", "randn", "randperm"})
_FACTORY_OPTIONS: Final = frozenset({"dtype", "layout", "device", "pin_memory"})  # an out= overload takes out's


def parts_of(operations: Sequence[Operation | Pause]) -> list[Part]:
    """The calls that replay the operations, in their order; allocations without contents need none."""
    parts: list[Part] = []
    calls: list[Call] = []
    for operation in operations:
        if isinstance(operation, Pause):
            parts.append((calls, operation.run))
            calls = []
        elif (call := _call(operation)) is not None:
            calls.append(call)
    return [*parts, (calls, None)]


def _call(operation: Operation) -> Call | None:
    name = operation.operator._schema.name  # noqa: SLF001 - OpOverload has no other way to its schema
    if is_collective(operation.operator):
        return again(operation.operator, operation.args, operation.kwargs)
    if not operation.fixed:
        return _shortest(operation.operator, operation.args, operation.kwargs)
    if operation.results == 1 and not operation.mutates and name.startswith("aten::"):
        return _into_one(operation, name.removeprefix("aten::"))
    return _into_many(operation)


def _into_one(operation: Operation, name: str) -> Call | None:
    fixed = operation.fixed[0][1]
    if name in _EMPTY:
        return None
    if _overlaps(fixed):
        return _rerun(operation)
    if name in _FILLED:
        return functools.partial(fixed.fill_, _FILLED[name](operation.args))
    if name in _COPIED:
        return functools.partial(fixed.copy_, operation.args[0])
    return _into_many(operation)


def _into_many(operation: Operation) -> Call:
    """By the out= overload, if there is one for exactly these arguments and all results."""
    out = None if operation.mutates else out_overload(operation.operator)
    targets = [tensor for _, tensor in operation.fixed]
    if out is None or len(targets) != operation.results or any(_overlaps(tensor) for tensor in targets):
        return _rerun(operation)
    overload, names, dropped = out
    if len(names) != len(targets):
        return _rerun(operation)
    kept = {name: value for name, value in operation.kwargs.items() if name not in dropped}
    return _shortest(overload, operation.args, kept | dict(zip(names, targets, strict=True)))


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _rerun(operation: Operation) -> Call:
    """The operator as it was called, and a copy of each new result to where it lay at capture."""
    call = _shortest(operation.operator, operation.args, operation.kwargs, [item for _, item in operation.fixed])
    fixed = tuple(operation.fixed)
    if operation.results == 1 and not _overlaps(fixed[0][1]):
        copy = fixed[0][1].copy_
        return lambda: copy(call())  # type: ignore[arg-type]  # one result, a tensor

    def rerun() -> None:
        results = list(tensors_in(call()))
        for position, target in fixed:
            if _overlaps(target):  # no operator writes such a tensor
                target.untyped_storage().copy_(results[position].untyped_storage())
            else:
                target.copy_(results[position])

    return rerun


@functools.cache
def out_overload(operator: Any) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """The overload that writes an operator's results into out= arguments, their names, and arguments to leave out."""
    schema = operator._schema  # noqa: SLF001
    if any(str(value.type) != "Tensor" for value in schema.returns) or any(arg.is_out for arg in schema.arguments):
        return None
    factory = operator.namespace == "aten" and operator._opname in _FACTORIES  # noqa: SLF001
    dropped = _FACTORY_OPTIONS if factory else frozenset[str]()
    wanted = [_signature(argument) for argument in schema.arguments if argument.name not in dropped]
    for name in operator.overloadpacket.overloads():
        candidate = getattr(operator.overloadpacket, name)
        arguments = candidate._schema.arguments  # noqa: SLF001
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        if len(outs) == len(schema.returns) and wanted == [_signature(arg) for arg in arguments if not arg.is_out]:
            return candidate, outs, dropped
    return None


def _signature(argument: Any) -> tuple[str, str, bool]:
    return argument.name, str(argument.type), argument.kwarg_only


def _shortest(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], fixed: Sequence[Any] = ()) -> Call:
    outs = [argument.name for argument in operator._schema.arguments if argument.is_out]  # noqa: SLF001
    named = {name: value for name, value in kwargs.items() if name not in outs}
    if outs:
        targets = tuple(kwargs[name] for name in outs)
        named["out"] = targets[0] if len(targets) == 1 else targets
    answer = _answer(operator, args, [kwargs[name] for name in outs] or fixed)
    for function in _functions(operator):
        call = functools.partial(function, *args, **named)
        if _Probe(operator, args, kwargs, answer).sees(call):
            return call
    return functools.partial(operator._op, *args, **kwargs)  # noqa: SLF001 - without the python layer around it


def _functions(operator: Any) -> Iterator[Callable[..., object]]:
    arguments = operator._schema.arguments  # noqa: SLF001
    if operator.namespace != "aten" or not any("Tensor" in str(one.type) for one in arguments if not one.is_out):
        return  # functions that make a tensor of none put it on the caller's default device; their operators do not
    name = operator._opname  # noqa: SLF001
    torch_c: Any = torch._C  # noqa: SLF001 - torch's python functions in their barest form
    owners = ("_VariableFunctions", "TensorBase", "_nn", "_linalg", "_special", "_fft")
    for owner in (getattr(torch_c, owner) for owner in owners):
        function = getattr(owner, name, None)
        if callable(function):
            yield function


def _answer(operator: Any, args: tuple[Any, ...], written: Sequence[Any]) -> Any:
    """Something of the kind that the operator returns, for a probe to answer with."""
    returns = operator._schema.returns  # noqa: SLF001
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return written[0] if written else next(tensors_in(args), None)
    return tuple(written) if len(returns) == len(written) else None


class _Probe(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Watches what a call does, and keeps it from being done."""

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], answer: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._expected = (operator, args, kwargs)
        self._answer = answer
        self._seen: list[bool] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compare the call with the expected one, and answer without doing anything."""
        del types
        operator, expected, named = self._expected
        self._seen.append(func is operator and _same(expected, args) and _same(dict(named), dict(kwargs or {})))
        return self._answer

    def sees(self, call: Call) -> bool:
        """Whether the call does what is expected and nothing else."""
        try:
            run_under(self, call)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False  # this function takes other arguments: the operator itself will be called
        return self._seen == [True]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(_same(*pair) for pair in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # noqa: PLR0124 - NaN
