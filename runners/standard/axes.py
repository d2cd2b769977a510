"""The model's sizes and its dtype: axes that the standard declarations add to BATCH, TOKENS and WIDTH, and a role."""

import types
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TypeVar

import attrs
import torch

from ...dataflow.axes import Axis
from ...dataflow.capabilities import Role, dtype_text
from ...dataflow.errors import DeclarationError
from ...dataflow.inputs import Inputs
from ...dataflow.slots import slot

HIDDEN: Final = Axis("HIDDEN", fixed=True)
"""Elements of one token's hidden state."""
VOCAB: Final = Axis("VOCAB", fixed=True)
"""Tokens that the model knows: elements of one row of logits."""
CONTEXT: Final = Axis("CONTEXT", fixed=True)
"""The most tokens that one request may come to, prompt and answer together."""
FILL: Final = Axis("FILL", fixed=True)
"""Cached tokens of each request that a tree mask has room for: the backend's fill value, or up to CONTEXT."""
TOPK: Final = Axis("TOPK", fixed=True)
"""Branches of a draft tree: a draft step's tokens a request."""
STEPS: Final = Axis("STEPS", fixed=True)
"""Draft steps in one graph."""
FRONT: Final = Axis("FRONT", fixed=True)
"""Tokens of a request that stand before its drafts in a multi-layer draft-extend."""
INDEX_TOPK: Final = Axis("INDEX_TOPK", fixed=True)
"""Cached tokens that sparse attention chooses for each token."""
DP: Final = Axis("DP", fixed=True)
"""Data-parallel ranks whose token counts are kept apart; 1 where one count serves all."""
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
            raise DeclarationError(
                f"{inputs.__name__}: no slot has the model's dtype: leave out model_dtype({dtype_text(dtype)})"
            )

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
