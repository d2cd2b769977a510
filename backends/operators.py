"""torch's operators: watched under a mode, taken apart, and what each of them writes."""

import abc
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_C: Final[Any] = torch._C  # noqa: SLF001 - torch's stacks of modes have no public name
T = TypeVar("T")
_PLAIN: Final[Any] = _C._disabled_torch_dispatch_impl  # noqa: SLF001 - a tensor's that no subclass takes apart

# Composites that torch takes apart, which read the host on the CPU alone, to check values.
_WHOLE: Final = frozenset({"aten::one_hot"})

# Arguments that an operator writes although its schema does not say so.
_NORMS: Final = ("native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm")
_UNDECLARED_WRITES: Final[Mapping[str, tuple[str, ...]]] = {
    f"aten::{name}": ("running_mean", "running_var") for name in _NORMS
}


def run_under(mode: TorchDispatchMode | TorchFunctionMode, call: Callable[[], T]) -> T:
    """Call something under a mode."""
    with mode:
        return call()


def compiled_eagerly() -> AbstractContextManager[object]:
    """Run compiled functions as they were written, where the compiler is loaded: it cannot trace a watch."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eagerly: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eagerly


class OperatorWatch(TorchDispatchMode, abc.ABC):  # type: ignore[no-untyped-call]  # torch's own hook
    """Sees each operator that a thread runs; tensor subclasses take themselves apart first."""

    supports_higher_order_operators = True  # torch would refuse them without a way out

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """As torch has it, which gives it no type."""
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Have one operator seen."""
        if any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in types):
            return NotImplemented  # the subclass takes itself apart, and its parts come here
        return self.see(func, args, dict(kwargs or {}))

    @abc.abstractmethod
    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and return what it returns."""

    def take_apart(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite operator as the operators that it is made of, and see these.

        Not by its own decompose(): once torch's python decompositions are loaded it takes those, with other rounding.
        """
        parts = functools.partial(operator._op_dk, _C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # noqa: SLF001
        return run_under(self, parts)


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage for as long as that storage lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it, too


def is_plain(operator: Any) -> bool:
    """Whether an operator is one of torch's own kind, and no higher-order one, which takes functions."""
    return isinstance(operator, torch._ops.OpOverload)  # noqa: SLF001 - no public name


def is_composite(operator: Any) -> bool:
    """Whether torch takes an operator apart into others. A mode sees such an operator whole in inference mode alone."""
    name = operator.name()
    if name in _WHOLE or operator.namespace != "aten":
        return False
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes, as its schema says, and where it should say."""
    if operator.namespace == "c10d":  # collectives of torch.distributed
        yield from tensors_in((args, kwargs))
        return
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


_EMPTY: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"},
)
_COPIES: Final = frozenset({"clone", "_to_copy"})  # an allocation, and a copy to it


def call_again(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    fixed: Mapping[int, torch.Tensor],
    *,
    mutates: bool,
) -> Callable[[], object] | None:
    """A call that does an operator again; its new results go where they lay the first time.

    None for memory without contents.

    Args:
        operator: The operator.
        args: Its arguments, as aliases of those that it had, so that nothing done to those (squeeze_) is seen.
        kwargs: Likewise.
        result: What it returned.
        fixed: Of the tensors in this, those in memory of their own, by position.
        mutates: Whether it writes an argument.
    """
    name = operator._opname if operator.namespace == "aten" else ""  # noqa: SLF001 - OpOverload has no public name
    call = functools.partial(operator._op, *args, **kwargs)  # noqa: SLF001 - without the python layer around it
    if operator.namespace == "c10d":
        return functools.partial(_collective, operator, args, kwargs)
    if not fixed:
        return call
    if name in _EMPTY:
        return None
    targets = tuple(fixed.values())
    if not mutates and len(targets) == len(tensors_in(result)) and not any(map(_overlaps, targets)):
        if name in _COPIES:
            return functools.partial(targets[0].copy_, args[0])
        if (out := _out_overload(operator)) is not None:
            into = dict(zip(out[1], targets, strict=True))
            return functools.partial(out[0]._op, *args, **kwargs, **into)  # noqa: SLF001 - as above
    return functools.partial(_copy_results, call, fixed)


def _overlaps(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _copy_results(call: Callable[[], object], fixed: Mapping[int, torch.Tensor]) -> None:
    """Call an operator, and copy each new result to where it lay before."""
    results = tensors_in(call())
    for position, target in fixed.items():
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


def _collective(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Do a collective again, and wait for it as the step's own `wait` did."""
    from torch.distributed.distributed_c10d import Work  # noqa: PLC0415 - some builds of torch have none of it

    unbox: Any = Work.unbox
    result = operator(*args, **kwargs)
    unbox(result[-1] if isinstance(result, tuple | list) else result).wait()
