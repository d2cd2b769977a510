"""What a captured step may not do, and what to do instead: as seen on CUDA, and what moves a storage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from ..dataflow.errors import CaptureError


def storage_key(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage for as long as that storage lives.

    Raises CaptureError for sparse, nested and quantized tensors, which have none of their own or hide it.
    """
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        refuse(f"a tensor of layout {tensor.layout}, {tensor.dtype}", "only plain strided tensors have a fixed address")
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - torch compares storages by it, too


Constants = frozenset[int] | set[int]
"""Storages of 0-dim tensors that the step made from a host value, by the address of their implementation."""

_ON_DEVICE: Final = "keep the value on the device (torch.where, index_select), or hand it to the step from outside"
_BY_MASK: Final = "its shape depends on values: use torch.where, or masked_fill_ with a number"
_FROM_HOST: Final = "make it before the step and keep it, or use torch.full, torch.arange or another factory"
_IN_PLACE: Final = "a graph's addresses are fixed: allocate at the final size and copy_ into it"
_INFO: Final = "it reads its status back: use the variant that ends in _ex and check the status after the step"
NO_GRADIENTS: Final = "capture the forward step alone: this backend records no gradients"
_SOLVER: Final = "its CUDA kernel waits for the host: do it outside the captured step"

_TAGGED: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

_NAMED: Final[Mapping[str, str]] = {
    "item": _ON_DEVICE,
    "is_nonzero": _ON_DEVICE,
    "allclose": _ON_DEVICE,
    "nonzero": f"{_BY_MASK}; torch.nonzero_static has a fixed size",
    "argwhere": f"{_BY_MASK}; torch.nonzero_static has a fixed size",
    "masked_select": _BY_MASK,
    "resize_": _IN_PLACE,
    "resize_as_": _IN_PLACE,
    "set_": _IN_PLACE,
    "bincount": "it reads its input's range: use scatter_add_ into zeros of a fixed size",
    "segment_reduce": _SOLVER,
    "_linalg_check_errors": _INFO,
    "_linalg_eigh": _SOLVER,
    "_linalg_svd": _SOLVER,
    "_linalg_eigvals": _SOLVER,
    "linalg_eig": _SOLVER,
    "linalg_lstsq": _SOLVER,
    "linalg_matrix_exp": _SOLVER,
    "linalg_pinv": _SOLVER,
}

# How much larger than its elements the test set of isin must be for the sorted algorithm, which finds unique values.
_ISIN_FACTOR: Final = 10.0
_ISIN_POWER: Final = 0.145


class _Call:
    """One operator's call, its arguments by their schema's names."""

    def __init__(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Constants) -> None:
        self._arguments = operator._schema.arguments  # noqa: SLF001 - OpOverload has no other way to its schema
        self._args = args
        self._kwargs = kwargs
        self._constants = constants

    def __getitem__(self, name: str) -> Any:
        """The argument's value, or its default; None where the operator has no such argument."""
        for position, argument in enumerate(self._arguments):
            if argument.name == name:
                if position < len(self._args):
                    return self._args[position]
                return self._kwargs.get(name, argument.default_value)
        return None

    def is_constant(self, value: Any) -> bool:
        """Whether the value is a tensor that the step made from a host value."""
        return isinstance(value, torch.Tensor) and storage_key(value) in self._constants


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}


def _index(call: _Call) -> str | None:
    return _BY_MASK if any(_is_mask(index) for index in call["indices"]) else None


def _index_put(call: _Call) -> str | None:
    """CUDA takes one mask with a number as masked_fill_; other masks become positions, other numbers a host copy."""
    number = call.is_constant(call["values"])
    indices = [index for index in call["indices"] if index is not None]
    if not any(_is_mask(index) for index in indices):
        return f"the number is copied from the host: {_FROM_HOST}, or index_fill_" if number else None
    if number and len(indices) == 1 and not call["accumulate"]:
        return None
    return "a mask may only be filled with a python number here: use torch.where, or masked_scatter_"


def _filled(call: _Call) -> str | None:
    value = call["value"]
    if not isinstance(value, torch.Tensor) or call.is_constant(value):
        return None
    return "it reads the value tensor back: fill with a python number, or use torch.where"


def _copy(call: _Call) -> str | None:
    if call.is_constant(call["src"]):
        return "the number is copied from the host: use fill_ on a slice (x[0:1] = 1.0), or index_fill_"
    return None


def _equal(call: _Call) -> str | None:
    one, other = call["self"], call["other"]
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
    return None if same and one.dtype == other.dtype else _ON_DEVICE


def _repeat_interleave(call: _Call) -> str | None:
    by_tensor = isinstance(call["repeats"], torch.Tensor) and call["output_size"] is None
    return "its shape depends on values: pass output_size" if by_tensor else None


def _one_hot(call: _Call) -> str | None:
    return None if call["num_classes"] > 0 else "its shape depends on values: pass num_classes"


def _histc(call: _Call) -> str | None:
    return "it reads the range of its input: pass min and max" if call["min"] == call["max"] else None


def _normal(call: _Call) -> str | None:
    return "it checks std on the host: use mean + std * torch.randn" if isinstance(call["std"], torch.Tensor) else None


def _isin(call: _Call) -> str | None:
    elements, tests = call["elements"], call["test_elements"]
    if not isinstance(elements, torch.Tensor) or not isinstance(tests, torch.Tensor):
        return None
    small = tests.numel() < _ISIN_FACTOR * elements.numel() ** _ISIN_POWER
    return None if small else "with that many test elements it finds unique values: use a lookup table"


def _lift_fresh(call: _Call) -> str | None:
    return f"it copies host data to the device: {_FROM_HOST}" if call["self"].dim() else None


_JUDGED: Final[Mapping[str, Callable[[_Call], str | None]]] = {
    "index": _index,
    "index_fill": _filled,
    "index_fill_": _filled,
    "masked_fill": _filled,
    "masked_fill_": _filled,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "copy_": _copy,
    "equal": _equal,
    "repeat_interleave": _repeat_interleave,
    "one_hot": _one_hot,
    "histc": _histc,
    "normal": _normal,
    "isin": _isin,
    "lift_fresh": _lift_fresh,
}


def _advice(operator: Any, name: str, call: _Call) -> str | None:
    if name in _JUDGED:
        return _JUDGED[name](call)
    if name in _NAMED:
        return _NAMED[name]
    return _ON_DEVICE if any(tag in operator.tags for tag in _TAGGED) else None


def refuse(what: str, advice: str) -> NoReturn:
    """Raise CaptureError, which says what cannot be captured and what to do instead."""
    message = f"a captured step cannot use {what}: {advice}"
    raise CaptureError(message)


def check(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Constants) -> None:
    """Let an operator's call pass, or raise CaptureError with the operator's name and what to do instead."""
    if operator.namespace != "aten":
        advice = _ON_DEVICE if any(tag in operator.tags for tag in _TAGGED) else None
    else:
        name = operator._schema.name.split("::")[1]  # noqa: SLF001
        advice = _advice(operator, name, _Call(operator, args, kwargs, constants))
    if advice is not None:
        refuse(str(operator), advice)


_NO_PARAMETERS: Final = (
    "this device has no host parameters, so that each replay would see the value of the capture: declare it on the "
    "device too, by copied() or computed(), and have operators read it there"
)
_TO_HOST: Final = "it copies to the host and waits: read the graph's outputs after the replay"

_FUNCTIONS: Final[Mapping[Any, str]] = {
    torch.Tensor.item: _ON_DEVICE,
    torch.Tensor.tolist: _ON_DEVICE,
    torch.Tensor.numpy: _TO_HOST,
    torch.Tensor.cpu: _TO_HOST,
    torch.Tensor.__array__: _TO_HOST,
    torch.Tensor.__bool__: f"python control flow on a tensor is decided once, at capture: {_ON_DEVICE}",
    torch.Tensor.__int__: _ON_DEVICE,
    torch.Tensor.__float__: _ON_DEVICE,
    torch.Tensor.__complex__: _ON_DEVICE,
    torch.Tensor.__index__: _ON_DEVICE,
    torch.Tensor.__repr__: "printing reads the values: print after the replay",
    torch.Tensor.__format__: "printing reads the values: print after the replay",
    torch.Tensor.__deepcopy__: "it copies outside any operator: use clone()",
    torch.Tensor.new_tensor: f"it copies host data to the device: {_FROM_HOST}",
    torch.Tensor.backward: NO_GRADIENTS,
    torch.autograd.grad: NO_GRADIENTS,
}

_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class HostReads(TorchFunctionMode):
    """Refuses what torch does without any operator on a CPU tensor: reads, copies to and from the host.

    A device written as the text "cpu" is the host; a torch.device, such as `x.device`, is where the step runs.
    parameters: host parameters by argument, of which the refusal says more. paused: whether nothing is recorded at the
    moment, so that all may pass.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.refused: CaptureError | None = None
        self.paused = True
        self._parameters = [(t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in parameters.items()]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass the call on, or raise CaptureError."""
        del types
        named = dict(kwargs or {})
        if self.paused:
            return func(*args, **named)
        advice = _FUNCTIONS.get(func) or _refused_call(func, args, named)
        if advice is not None:
            parameter = self._parameter_in(args)
            what = _public_name(func) if parameter is None else f"{_public_name(func)} of host parameter {parameter!r}"
            self._refuse(what, advice if parameter is None else _NO_PARAMETERS)
        if func is torch.Tensor.to and _to_host(args, named):
            named["copy"] = True  # as on a device; on the CPU it would be the same tensor
        return func(*args, **named)

    def _parameter_in(self, args: Sequence[Any]) -> str | None:
        """The host parameter that a call is about, if it is."""
        if not args or not isinstance(args[0], torch.Tensor) or args[0].layout is not torch.strided:
            return None
        address = args[0].data_ptr()
        return next((name for low, high, name in self._parameters if low <= address < high), None)

    def _refuse(self, what: str, advice: str) -> None:
        try:
            refuse(what, advice)
        except CaptureError as error:
            self.refused = self.refused or error
            raise


def _public_name(func: Any) -> str:
    name = str(getattr(func, "__qualname__", func))
    if name == "getset_descriptor.__set__":
        return "an assignment to Tensor.data"
    return name.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")


def _to_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    target = kwargs.get("device", args[1] if len(args) > 1 else None)
    return isinstance(target, str) and target.startswith("cpu")


def _refused_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    if func is torch.Tensor.to and _to_host(args, kwargs) and not kwargs.get("non_blocking"):
        return _TO_HOST
    if func in _MAKERS and kwargs.get("device") is not None and not isinstance(args[0] if args else None, torch.Tensor):
        return f"it copies host data to the device: {_FROM_HOST}"
    generator = kwargs.get("generator")
    if generator is not None and generator is not torch.default_generator:
        return "a graph draws from the default generator alone: leave out generator="
    if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
        return _IN_PLACE
    return None
