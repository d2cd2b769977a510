"""What a captured step may not do, and what to do instead: as seen on CUDA, and what moves a storage."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, NoReturn

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
    **dict.fromkeys(("nonzero", "argwhere"), f"{_BY_MASK}; torch.nonzero_static has a fixed size"),
    "masked_select": _BY_MASK,
    **dict.fromkeys(("resize_", "resize_as_", "set_"), _IN_PLACE),
    "bincount": "it reads its input's range: use scatter_add_ into zeros of a fixed size",
    "_linalg_check_errors": _INFO,
    **dict.fromkeys(
        ("_linalg_eigh", "_linalg_svd", "linalg_eig", "linalg_lstsq", "linalg_matrix_exp", "linalg_pinv"), _SOLVER
    ),
}
_TAGGED: Final = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


Named = Mapping[str, Any]
"""The arguments of an operator's call by their schema's names, with defaults."""
_Made = Callable[[Any], bool]
"""Whether an argument is a tensor that the step made from a host value."""


def _has_mask(named: Named) -> bool:
    """Whether one of the indices is a mask."""
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in named["indices"])


def _put(named: Named, made: _Made) -> str | None:
    """CUDA takes one mask with a number as masked_fill_; other masks become positions, on the host."""
    from_host, single = made(named["values"]), sum(index is not None for index in named["indices"]) == 1
    if not _has_mask(named):
        return f"the number is copied from the host: {_FROM_HOST}, or index_fill_" if from_host else None
    if from_host and single and not named["accumulate"]:
        return None
    return "a mask may only be filled with a python number here: use torch.where, or masked_scatter_"


def _fill(named: Named, made: _Made) -> str | None:
    is_read = isinstance(named["value"], torch.Tensor) and not made(named["value"])
    return "it reads the value tensor back: fill with a python number, or use torch.where" if is_read else None


def _copy(named: Named, made: _Made) -> str | None:
    advice = "the number is copied from the host: use fill_ on a slice (x[0:1] = 1.0), or index_fill_"
    return advice if made(named["src"]) else None


def _repeat(named: Named, _: _Made) -> str | None:
    is_read = isinstance(named["repeats"], torch.Tensor) and named.get("output_size") is None
    return "its shape depends on values: pass output_size" if is_read else None


_SOMETIMES: Final[Mapping[str, Callable[[Named, _Made], str | None]]] = {
    "index": lambda named, _: _BY_MASK if _has_mask(named) else None,
    "index_put": _put,
    "_index_put_impl": _put,
    "index_fill": _fill,
    "masked_fill": _fill,
    "copy": _copy,
    "repeat_interleave": _repeat,
    "one_hot": lambda named, _: "its shape depends on values: pass num_classes" if named["num_classes"] <= 0 else None,
    "histc": lambda named, _: (
        "it reads the range of its input: pass min and max" if named["min"] == named["max"] else None
    ),
    "lift_fresh": lambda named, _: _COPIED if named["self"].dim() > 0 else None,
}
"""What is refused for some of its arguments, by the name without the underscore of operators in place: the way out."""

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
    judge = _SOMETIMES.get(name.removesuffix("_"))
    if judge is not None:
        given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
        named = {one.name: given.get(one.name, one.default_value) for one in schema.arguments}
        advice = judge(named, lambda one: isinstance(one, torch.Tensor) and fixed_key(one) in constants)
    else:
        advice = _ALWAYS.get(name) or (_ON_DEVICE if any(tag in operator.tags for tag in _TAGGED) else None)
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
