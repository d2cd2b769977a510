"""The model's dtype: a role that a declaration has settled, because no device decides it."""

import types
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeVar

import attrs
import torch

from ...dataflow.capabilities import Role, dtype_text
from ...dataflow.errors import DeclarationError
from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import slot

V = TypeVar("V", bound=Inputs)
MODEL_DTYPE: Final = Role("model_dtype", torch.bfloat16)
"""What the model computes in: bfloat16 unless `model_dtype` says otherwise."""


def model_dtype(dtype: torch.dtype) -> Callable[[type[V]], type[V]]:
    """Decorate a declaration: each slot of the model's dtype has this one, inherited slots, too.

    Raises DeclarationError where no slot has the model's dtype, or where a slot's values do not fit.
    """

    def settle(inputs: type[V]) -> type[V]:
        fields = {name: field for name, field in _model_slots(inputs).items() if name in inputs.slotgraph.slots}
        if not fields:
            message = f"{inputs.__name__}: no slot has the model's dtype: leave out model_dtype({dtype_text(dtype)})"
            raise DeclarationError(message)

        def body(namespace: MutableMapping[str, Any]) -> None:
            namespace["__annotations__"] = {name: field.type for name, field in fields.items()}
            for name in ("__module__", "__qualname__", "__doc__"):
                namespace[name] = getattr(inputs, name)
            for name, field in fields.items():
                kind = attrs.evolve(inputs.slotgraph.slots[name], dtype=dtype)
                namespace[name] = slot(kind, init=field.init, default=field.default)

        made: type[V] = types.new_class(inputs.__name__, (inputs,), {}, body)
        return made

    return settle


def _model_slots(inputs: type[Inputs]) -> "dict[str, attrs.Attribute[Any]]":
    slots = inputs.slotgraph.slots
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(inputs)  # type: ignore[arg-type] # made one in place
    return {field.name: field for field in fields if field.name in slots and slots[field.name].dtype == MODEL_DTYPE}
