"""What a captured step may not do, and what to do instead: as seen on CUDA, and what moves a storage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import attrs
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

_COPIED: Final = f"it copies host data to the device: {_FROM_HOST}"


@attrs.frozen
class _Call:
    """One operator's call: its arguments by their schema's names, and the storages of constants."""

    named: Mapping[str, Any]
    constants: Constants

    def __getitem__(self, name: str) -> Any:
        """The argument's value, or its default; None where the operator has no such argument."""
        return self.named.get(name)

    def is_constant(self, name: str) -> bool:
        """Whether the argument is a tensor that the step made from a host value."""
        return isinstance(self[name], torch.Tensor) and storage_key(self[name]) in self.constants

    def has_mask(self) -> bool:
        """Whether one of the indices is a mask."""
        return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in self["indices"])

    def puts_by_mask(self) -> bool:
        """Whether masks become positions; CUDA takes one mask with a number as masked_fill_."""
        indices = [index for index in self["indices"] if index is not None]
        return self.has_mask() and not (self.is_constant("values") and len(indices) == 1 and not self["accumulate"])

    def compares(self) -> bool:
        """Whether the values of two tensors are compared, as they are not one and the same."""
        one, other = self["self"], self["other"]
        same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
        return not (same and one.dtype == other.dtype)

    def sorts(self) -> bool:
        """Whether isin has so many test elements that CUDA sorts them, and finds unique values."""
        elements, tests = self["elements"], self["test_elements"]
        both = isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)
        return both and bool(tests.numel() >= 10.0 * elements.numel() ** 0.145)


_Rule = tuple[tuple[str, ...], Callable[[_Call], bool], str]
_SOMETIMES: Final[Sequence[_Rule]] = (
    (("index",), _Call.has_mask, _BY_MASK),
    (
        ("index_fill", "masked_fill"),
        lambda call: isinstance(call["value"], torch.Tensor) and not call.is_constant("value"),
        "it reads the value tensor back: fill with a python number, or use torch.where",
    ),
    (
        ("index_put", "_index_put_impl"),
        _Call.puts_by_mask,
        "a mask may only be filled with a python number here: use torch.where, or masked_scatter_",
    ),
    (
        ("index_put", "_index_put_impl"),
        lambda call: not call.has_mask() and call.is_constant("values"),
        f"the number is copied from the host: {_FROM_HOST}, or index_fill_",
    ),
    (
        ("copy",),
        lambda call: call.is_constant("src"),
        "the number is copied from the host: use fill_ on a slice (x[0:1] = 1.0), or index_fill_",
    ),
    (("equal",), _Call.compares, _ON_DEVICE),
    (
        ("repeat_interleave",),
        lambda call: isinstance(call["repeats"], torch.Tensor) and call["output_size"] is None,
        "its shape depends on values: pass output_size",
    ),
    (("one_hot",), lambda call: call["num_classes"] <= 0, "its shape depends on values: pass num_classes"),
    (("histc",), lambda call: call["min"] == call["max"], "it reads the range of its input: pass min and max"),
    (
        ("normal",),
        lambda call: isinstance(call["std"], torch.Tensor),
        "it checks std on the host: use mean + std * torch.randn",
    ),
    (("isin",), _Call.sorts, "with that many test elements it finds unique values: use a lookup table"),
    (("lift_fresh",), lambda call: call["self"].dim() > 0, _COPIED),
)
"""What is refused for some of its arguments: names without the underscore of operators in place, when, the way out."""
_JUDGED: Final = frozenset(name for names, _, _ in _SOMETIMES for name in names)


def refuse(what: str, advice: str) -> NoReturn:
    """Raise CaptureError, which says what cannot be captured and what to do instead."""
    message = f"a captured step cannot use {what}: {advice}"
    raise CaptureError(message)


def check(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Constants) -> None:
    """Let an operator's call pass, or raise CaptureError with the operator's name and what to do instead."""
    name = operator._schema.name.removeprefix("aten::")  # noqa: SLF001 - OpOverload has no other way to its schema
    bare = name.removesuffix("_")
    advice = _NAMED.get(name)
    if bare in _JUDGED:
        arguments = operator._schema.arguments  # noqa: SLF001 - likewise
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        call = _Call({one.name: given.get(one.name, one.default_value) for one in arguments}, constants)
        advice = next((way_out for names, when, way_out in _SOMETIMES if bare in names and when(call)), None)
    elif advice is None and any(tag in operator.tags for tag in _TAGGED):
        advice = _ON_DEVICE
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
    torch.Tensor.new_tensor: _COPIED,
    torch.Tensor.backward: NO_GRADIENTS,
    torch.autograd.grad: NO_GRADIENTS,
}

_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


class RefusingMode(TorchFunctionMode):
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
        return _COPIED
    generator = kwargs.get("generator")
    if generator is not None and generator is not torch.default_generator:
        return "a graph draws from the default generator alone: leave out generator="
    if getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
        return _IN_PLACE
    return None
