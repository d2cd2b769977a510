"""Torch's operators: interception, decomposition, which memory each writes, and which of them no graph can hold."""

import abc
import functools
import importlib
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from operator import call
from types import SimpleNamespace
from typing import Any, Final, NoReturn, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..dataflow.errors import CaptureError
from ..dataflow.guard import FUNCTION_MODES, run_and_undo

_C: Final[Any] = torch._C  # noqa: SLF001 - torch's stacks of modes have no public name
T = TypeVar("T")
_DISPATCH: Final[tuple[Any, Callable[[], int]]] = (_python_dispatch, _C._len_torch_dispatch_stack)  # noqa: SLF001 - as above
_FUNCTION: Final[tuple[Any, Callable[[], int]]] = (overrides, FUNCTION_MODES)
_PLAIN: Final[Any] = _C._disabled_torch_dispatch_impl  # noqa: SLF001 - the dispatch of plain tensors

# Composites that read the host only on the CPU, to check values.
_WHOLE: Final = frozenset({"aten::one_hot"})

# Arguments that an operator writes although its schema does not say so.
_NORMS: Final = ("native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm")


def run_under(mode: TorchDispatchMode | TorchFunctionMode, call: Callable[[], T]) -> T:
    """Call a function under a mode, and turn the mode off afterwards, even if an interrupt comes.

    Torch's own `with mode:` takes several lines of Python to push and pop it.
    """
    stack, depth = _DISPATCH if isinstance(mode, TorchDispatchMode) else _FUNCTION
    before = depth()

    def run() -> T:
        stack._push_mode(mode)  # noqa: SLF001 - it has no public name
        return call()

    def undo() -> None:
        while depth() > before:
            stack._pop_mode()  # noqa: SLF001 - as above

    return run_and_undo(run, undo)


def run_uncompiled(run: Callable[[], T], apart: Callable[..., object] = call) -> T:
    """Call a function with torch.compile off, since the compiler cannot trace a dispatch mode.

    If the call imports the compiler, `apart` makes that import, so that a watch can skip the operators that it runs.
    """
    finder = _CompilerFinder(apart)

    def start() -> T:
        sys.meta_path.insert(0, finder)
        if "torch._dynamo" in sys.modules:
            finder.ask()
        return run()

    def undo() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        finder.restore()

    return run_and_undo(start, undo)


class _CompilerFinder:
    """Turns torch.compile off, from the compiler's import on if it is not imported yet."""

    def __init__(self, apart: Callable[..., object]) -> None:
        self._apart = apart
        self._before: list[Any] = []

    def find_spec(self, name: str, path: Any, _: object = None) -> Any:
        """Find the compiler's module, and set its stance once it is loaded."""
        spec: Any = PathFinder.find_spec(name, path) if name == "torch._dynamo" else None
        if spec:
            load = spec.loader.exec_module

            def load_and_ask(module: Any) -> None:
                self._apart(load, module)
                if self in sys.meta_path:  # an import in another thread may end after the call
                    self.ask()

            spec.loader.exec_module = load_and_ask
        return spec

    def ask(self) -> None:
        """Set the compiler's stance, and remember the one before, which torch reveals only when it sets another."""
        self._before.append(_compiler()._stance)  # noqa: SLF001 - it has no public name
        torch.compiler.set_stance("force_eager")

    def restore(self) -> None:
        """Restore the compiler's stance."""
        for stance in self._before[:1]:
            _compiler()._stance = stance  # noqa: SLF001 - as above


def _compiler() -> Any:
    return importlib.import_module("torch._dynamo.eval_frame")  # another thread may be about to import it


class OperatorWatch(TorchDispatchMode, abc.ABC):
    """Intercepts each operator that a thread runs. Tensor subclasses decompose themselves first."""

    supports_higher_order_operators = True  # torch would refuse higher-order operators without saying what to do

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        """Call torch's own hook, which has no type annotation."""
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first operator would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass one operator to `see`."""
        if any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in types):
            return NotImplemented  # let the tensor subclass decompose itself: its inner operators are intercepted next
        return self.see(func, args, dict(kwargs or {}))

    @abc.abstractmethod
    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, and return its result."""

    def take_apart(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a composite operator as the operators that it consists of, and intercept these."""
        parts = functools.partial(operator._op_dk, _C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # noqa: SLF001
        return run_under(self, parts)


def kernel_of(operator: Any, tensors: Sequence[torch.Tensor]) -> Callable[..., Any] | None:
    """Return a call of a custom operator's kernel, whose operators modes then see, or None for torch's own."""
    if operator.namespace == "aten":
        return None
    kinds = {tensor.device.type for tensor in tensors} - {"cpu"}
    key = getattr(_C.DispatchKey, kinds.pop().upper() if kinds else "CPU", _C.DispatchKey.PrivateUse1)
    if not _C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), key.name):  # noqa: SLF001
        return None
    return functools.partial(operator.redispatch, _C.DispatchKeySet(key))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors of an operator's arguments or results, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's storage for as long as that storage lives."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it, too


def is_plain(operator: Any) -> bool:
    """Return whether an operator is an ordinary one, and not a higher-order one, which takes functions."""
    return isinstance(operator, torch._ops.OpOverload)  # noqa: SLF001 - no public name


def is_composite(operator: Any) -> bool:
    """Return whether torch decomposes an operator. A mode sees such an operator whole only in inference mode."""
    name = operator.name()
    if name in _WHOLE or operator.namespace != "aten":
        return False
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes, by its schema and where the schema is incomplete."""
    if operator.namespace == "c10d":  # collectives of torch.distributed
        yield from tensors_in((args, kwargs))
        return
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    undeclared = ("running_mean", "running_var") if schema.name.removeprefix("aten::") in _NORMS else ()
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


_EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
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
    """Return a call that runs an operator again and writes its results to the same memory, or None for an allocation.

    Args:
        operator: The operator.
        args: Aliases of its arguments.
        kwargs: Aliases of its keyword arguments.
        result: What it returned.
        fixed: The tensors of `result` that do not share an argument's memory, by position.
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
    if not mutates and len(targets) == len(tensors_in(result)):
        if name in _COPIES:
            return functools.partial(targets[0].copy_, args[0])
        if (out := _out_overload(operator)) is not None:
            into = dict(zip(out[1], targets, strict=True))
            return functools.partial(out[0]._op, *args, **kwargs, **into)  # noqa: SLF001 - as above

    def call_and_copy() -> None:
        results = tensors_in(call())
        for position, target in fixed.items():
            target.copy_(results[position])

    return call_and_copy


@functools.cache
def _out_overload(operator: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the overload that writes an operator's results into out= arguments, and their names, or None."""
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
    """Run a collective again, and wait for it as the step's own `wait` did."""
    from torch.distributed.distributed_c10d import Work  # noqa: PLC0415 - some builds of torch lack it

    unbox: Any = Work.unbox
    result = operator(*args, **kwargs)
    unbox(result[-1] if isinstance(result, tuple | list) else result).wait()


# What a captured step may not do, and what to do instead: what CUDA forbids, and what moves a storage.

_ON_DEVICE: Final = "keep the value on the device (torch.where, index_select), or hand it to the step from outside"
_BY_MASK: Final = "its shape depends on values: use torch.where, or masked_fill_ with a number"
_FROM_HOST: Final = "make it before the step and keep it, or use torch.full, torch.arange or another factory"
_IN_PLACE: Final = "a graph's addresses are fixed: allocate at the final size and copy_ into it"
_COPIED: Final = f"it copies host data to the device: {_FROM_HOST}"
_TO_HOST: Final = "it copies to the host and waits: read the graph's outputs after the replay"
NO_GRADIENTS: Final = "capture the forward step alone: this backend records no gradients"

_Made = Callable[[Any], bool]
"""Returns whether an argument is a tensor that the step made from a host value."""
_Rule = tuple[Callable[[Any, _Made], bool], str]
"""Returns whether a call is refused, by its arguments under their schema's names, defaults included.

Then the way out.
"""


def _has_mask(call: Any) -> bool:
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in call.indices)


def _puts_what_cuda_cannot(call: Any, made: _Made) -> bool:
    """Return whether CUDA cannot do an index_put: it takes one mask with a number as masked_fill_.

    Other masks become positions, on the host.
    """
    if not _has_mask(call):
        return made(call.values)
    return not made(call.values) or call.accumulate or sum(index is not None for index in call.indices) > 1


_PUT: Final[_Rule] = (
    _puts_what_cuda_cannot,
    "a mask takes a number alone, an index no number, which is copied from the host: use torch.where or index_fill_",
)
_FILL: Final[_Rule] = (
    lambda call, made: isinstance(call.value, torch.Tensor) and not made(call.value),
    "it reads the value tensor back: fill with a python number, or use torch.where",
)
_ALWAYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("nonzero", "argwhere"), f"{_BY_MASK}; torch.nonzero_static has a fixed size"),
    "masked_select": _BY_MASK,
    **dict.fromkeys(("resize_", "resize_as_", "set_"), _IN_PLACE),
    "bincount": "it reads its input's range: use scatter_add_ into zeros of a fixed size",
    "_linalg_check_errors": "it reads its status back: use the variant that ends in _ex and check it after the step",
    **dict.fromkeys(
        ("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "linalg_matrix_exp", "linalg_pinv"),
        "its CUDA kernel waits for the host: do it outside the captured step",
    ),
}
_SOMETIMES: Final[Mapping[str, _Rule]] = {
    "index": (lambda call, _: _has_mask(call), _BY_MASK),
    "index_put": _PUT,
    "_index_put_impl": _PUT,
    "index_fill": _FILL,
    "masked_fill": _FILL,
    "copy": (
        lambda call, made: made(call.src),
        "the number is copied from the host: use fill_ on a slice (x[0:1] = 1.0), or index_fill_",
    ),
    "repeat_interleave": (
        lambda call, _: isinstance(call.repeats, torch.Tensor) and call.output_size is None,
        "its shape depends on values: pass output_size",
    ),
    "one_hot": (lambda call, _: call.num_classes <= 0, "its shape depends on values: pass num_classes"),
    "histc": (lambda call, _: call.min == call.max, "it reads the range of its input: pass min and max"),
    "lift_fresh": (lambda call, _: call.self.dim() > 0, _COPIED),
}
"""What is refused for some arguments. Names of in-place operators are without their underscore."""
_TAGGED: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_Tensor: Final[Any] = torch.Tensor
_FUNCTIONS: Final[Mapping[Any, str]] = {
    **dict.fromkeys((_Tensor.item, _Tensor.tolist, _Tensor.__int__, _Tensor.__float__), _ON_DEVICE),
    **dict.fromkeys((_Tensor.__complex__, _Tensor.__index__), _ON_DEVICE),
    **dict.fromkeys((_Tensor.numpy, _Tensor.cpu, _Tensor.__array__), _TO_HOST),
    **dict.fromkeys((_Tensor.__repr__, _Tensor.__format__), "printing reads the values: print after the replay"),
    **dict.fromkeys((_Tensor.backward, torch.autograd.grad), NO_GRADIENTS),
    _Tensor.__bool__: f"python control flow on a tensor is decided once, at capture: {_ON_DEVICE}",
    _Tensor.__deepcopy__: "it copies outside any operator: use clone()",
    _Tensor.new_tensor: _COPIED,
}
_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def refuse_operator(what: str, advice: str) -> NoReturn:
    """Raise CaptureError, which says what cannot be captured and what to do instead."""
    raise CaptureError(f"a captured step cannot use {what}: {advice}")


def fixed_key(tensor: torch.Tensor) -> int:
    """Return the `storage_key` of a tensor. Raise CaptureError if it has no storage of its own, or hides it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        refuse_operator(
            f"a tensor of layout {tensor.layout}, {tensor.dtype}", "only plain strided tensors have a fixed address"
        )
    return storage_key(tensor)


def check_operator(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], constants: Container[int]) -> None:
    """Raise CaptureError, with the operator's name and what to do instead, if a graph cannot hold its call."""
    if not is_plain(operator):
        refuse_operator(
            f"the higher-order operator {getattr(operator, '__name__', operator)}",
            "this backend records plain operators alone, and no functions: choose by torch.where, loop a fixed number "
            "of times in Python, attend by scaled_dot_product_attention with a mask, or capture the step on the device "
            "itself",
        )
    if operator.namespace == "_c10d_functional":
        refuse_operator(
            f"{operator.name()}, a functional collective",
            "its result has no fixed address: use the one of torch.distributed that writes into a tensor of yours",
        )
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    name = schema.name.removeprefix("aten::")
    rule = _SOMETIMES.get(name.removesuffix("_"))
    if rule is None:
        advice = _ALWAYS.get(name) or (_ON_DEVICE if any(tag in operator.tags for tag in _TAGGED) else None)
    else:
        named = {one.name: one.default_value for one in schema.arguments} | kwargs
        named.update((one.name, value) for one, value in zip(schema.arguments, args, strict=False))
        is_refused = rule[0](
            SimpleNamespace(**named), lambda one: isinstance(one, torch.Tensor) and fixed_key(one) in constants
        )
        advice = rule[1] if is_refused else None
    if advice is not None:
        refuse_operator(str(operator), advice)


def check_function(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raise CaptureError for reads and copies that torch does without an operator.

    `parameters` has the host parameters by argument, for which the error says more.
    """
    advice = _FUNCTIONS.get(func) or _refused_call(func, args, kwargs)
    if advice is None:
        return
    name = str(getattr(func, "__qualname__", func))
    name = name.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")
    name = "an assignment to Tensor.data" if name == "getset_descriptor.__set__" else name
    if args and isinstance(args[0], torch.Tensor) and args[0].layout is torch.strided:
        address = args[0].data_ptr()
        for parameter, tensor in parameters.items():
            if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes:
                refuse_operator(
                    f"{name} of host parameter {parameter!r}",
                    "this device has no host parameters, so that each replay would see the value of the capture: "
                    "declare it on the device too, by copied() or computed(), and have operators read it there",
                )
    refuse_operator(name, advice)


def copies_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is Tensor.to the text "cpu". A torch.device, such as `x.device`, is where the step runs."""
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return func is torch.Tensor.to and isinstance(target, str) and target.startswith("cpu")


def _refused_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    if copies_to_host(func, args, kwargs) and not kwargs.get("non_blocking"):
        return _TO_HOST
    if func in _MAKERS and kwargs.get("device") is not None and not isinstance(args[0] if args else None, torch.Tensor):
        return _COPIED
    if kwargs.get("generator") not in {None, torch.default_generator}:
        return "a graph draws from the default generator alone: leave out generator="
    if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
        return _IN_PLACE
    return None
