"""What a captured step may not do, and what to do instead: as seen on CUDA, and what moves a storage."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NoReturn

import attrs
import torch

from ..dataflow.errors import CaptureError
from .operators import is_plain, storage_key

_ON_DEVICE: Final = "keep the value on the device (torch.where, index_select), or hand it to the step from outside"
_BY_MASK: Final = "its shape depends on values: use torch.where, or masked_fill_ with a number"
_FROM_HOST: Final = "make it before the step and keep it, or use torch.full, torch.arange or another factory"
_IN_PLACE: Final = "a graph's addresses are fixed: allocate at the final size and copy_ into it"
_INFO: Final = "it reads its status back: use the variant that ends in _ex and check the status after the step"
_SOLVER: Final = "its CUDA kernel waits for the host: do it outside the captured step"
_COPIED: Final = f"it copies host data to the device: {_FROM_HOST}"
_TO_HOST: Final = "it copies to the host and waits: read the graph's outputs after the replay"
_PRINTED: Final = "printing reads the values: print after the replay"
_PLAIN_ALONE: Final = "this backend records plain operators alone, and no functions"
NO_GRADIENTS: Final = "capture the forward step alone: this backend records no gradients"
_NO_PARAMETERS: Final = (
    "this device has no host parameters, so that each replay would see the value of the capture: declare it on the "
    "device too, by copied() or computed(), and have operators read it there"
)
_COLLECTIVE: Final = (
    "its result has no fixed address: use the one of torch.distributed that writes into a tensor of yours"
)

_HIGHER_ORDER: Final[Mapping[str, str]] = {
    "cond": "the host decides which branch runs, once, at capture: run both, and choose by torch.where",
    "while_loop": (
        "the host decides how often it runs, once, at capture: loop a fixed number of times, and keep rows that are "
        "done by torch.where"
    ),
    "flex_attention": (
        f"{_PLAIN_ALONE}: use torch.nn.functional.scaled_dot_product_attention with a mask here, or capture the step "
        "on the device itself"
    ),
}
_ALWAYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("item", "is_nonzero", "allclose"), _ON_DEVICE),
    **dict.fromkeys(("nonzero", "argwhere"), f"{_BY_MASK}; torch.nonzero_static has a fixed size"),
    "masked_select": _BY_MASK,
    **dict.fromkeys(("resize_", "resize_as_", "set_"), _IN_PLACE),
    "bincount": "it reads its input's range: use scatter_add_ into zeros of a fixed size",
    "_linalg_check_errors": _INFO,
    **dict.fromkeys(("segment_reduce", "_linalg_eigh", "_linalg_svd", "_linalg_eigvals", "linalg_eig"), _SOLVER),
    **dict.fromkeys(("linalg_lstsq", "linalg_matrix_exp", "linalg_pinv"), _SOLVER),
}
_TAGGED: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@attrs.frozen
class _Call:
    """One operator's call: its arguments by their schema's names, and storages of tensors made from host values."""

    named: Mapping[str, Any]
    constants: Container[int]

    def __getitem__(self, name: str) -> Any:
        """The argument's value, or its default; None where the operator has no such argument."""
        return self.named.get(name)

    def is_tensor(self, name: str) -> bool:
        """Whether the argument is a tensor."""
        return isinstance(self[name], torch.Tensor)

    def is_constant(self, name: str) -> bool:
        """Whether the argument is a tensor that the step made from a host value."""
        return self.is_tensor(name) and fixed_key(self[name]) in self.constants

    def has_mask(self) -> bool:
        """Whether one of the indices is a mask."""
        return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in self["indices"])

    def puts_by_mask(self) -> bool:
        """Whether masks become positions; CUDA takes one mask with a number as masked_fill_."""
        single = sum(index is not None for index in self["indices"]) == 1
        return self.has_mask() and not (self.is_constant("values") and single and not self["accumulate"])

    def compares(self) -> bool:
        """Whether the values of two tensors are compared, as they are not one and the same."""
        one, other = ((t.data_ptr(), t.stride(), t.shape, t.dtype) for t in (self["self"], self["other"]))
        return one != other

    def sorts(self) -> bool:
        """Whether isin has so many test elements that CUDA sorts them, and finds unique values."""
        both = self.is_tensor("elements") and self.is_tensor("test_elements")
        return both and bool(self["test_elements"].numel() >= 10.0 * self["elements"].numel() ** 0.145)


_SOMETIMES: Final[Sequence[tuple[tuple[str, ...], Callable[[_Call], bool], str]]] = (
    (("index",), _Call.has_mask, _BY_MASK),
    (
        ("index_fill", "masked_fill"),
        lambda call: call.is_tensor("value") and not call.is_constant("value"),
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
        lambda call: call.is_tensor("repeats") and call["output_size"] is None,
        "its shape depends on values: pass output_size",
    ),
    (("one_hot",), lambda call: call["num_classes"] <= 0, "its shape depends on values: pass num_classes"),
    (("histc",), lambda call: call["min"] == call["max"], "it reads the range of its input: pass min and max"),
    (("normal",), lambda call: call.is_tensor("std"), "it checks std on the host: use mean + std * torch.randn"),
    (("isin",), _Call.sorts, "with that many test elements it finds unique values: use a lookup table"),
    (("lift_fresh",), lambda call: call["self"].dim() > 0, _COPIED),
)
"""What is refused for some of its arguments: names without the underscore of operators in place, when, the way out."""
_JUDGED: Final = frozenset(name for names, _, _ in _SOMETIMES for name in names)

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
    torch.Tensor.__repr__: _PRINTED,
    torch.Tensor.__format__: _PRINTED,
    torch.Tensor.__deepcopy__: "it copies outside any operator: use clone()",
    torch.Tensor.new_tensor: _COPIED,
    torch.Tensor.backward: NO_GRADIENTS,
    torch.autograd.grad: NO_GRADIENTS,
}
_MAKERS: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def refuse(what: str, advice: str) -> NoReturn:
    """Raise CaptureError, which says what cannot be captured and what to do instead."""
    raise CaptureError(f"a captured step cannot use {what}: {advice}")


def fixed_key(tensor: torch.Tensor) -> int:
    """The `storage_key` of a tensor. CaptureError for one that has no storage of its own, or hides it."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        refuse(f"a tensor of layout {tensor.layout}, {tensor.dtype}", "only plain strided tensors have a fixed address")
    return storage_key(tensor)


def check_operator(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], constants: Container[int]) -> None:
    """Let an operator's call pass, or raise CaptureError with the operator's name and what to do instead."""
    if not is_plain(operator):
        name = str(getattr(operator, "__name__", operator))
        otherwise = f"{_PLAIN_ALONE}: write the loop in Python, or capture the step on the device itself"
        refuse(f"the higher-order operator {name}", _HIGHER_ORDER.get(name, otherwise))
    if operator.namespace == "_c10d_functional":
        refuse(f"{operator.name()}, a functional collective", _COLLECTIVE)
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    name = schema.name.removeprefix("aten::")
    bare, advice = name.removesuffix("_"), _ALWAYS.get(name)
    if bare in _JUDGED:
        given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        call = _Call({one.name: given.get(one.name, one.default_value) for one in schema.arguments}, constants)
        advice = next((way_out for names, when, way_out in _SOMETIMES if bare in names and when(call)), None)
    elif advice is None and any(tag in operator.tags for tag in _TAGGED):
        advice = _ON_DEVICE
    if advice is not None:
        refuse(str(operator), advice)


def check_function(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Refuse what torch does without any operator on a CPU tensor: reads, copies to and from the host.

    parameters: host parameters by argument, of which the refusal says more.
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
                refuse(f"{name} of host parameter {parameter!r}", _NO_PARAMETERS)
    refuse(name, advice)


def copies_to_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is Tensor.to the host, which is a device written as the text "cpu".

    A torch.device, such as `x.device`, is where the step runs.
    """
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
