"""Pipeline parallelism: each rank has some of the layers, the first one embeddings, the last one the head."""

import copy
from typing import Any

import attrs
import torch

from serving.model import Language
from serving.options import OptionsError
from serving.ranks import World

KNOWN = {"embed_tokens", "layers", "norm"}
"""What transformers' own plans call the parts that tokens, hidden states and again hidden states go through."""


def check_layers(config: Any, ranks: int) -> None:
    """OptionsError for a model that cannot be cut into so many parts."""
    plan = getattr(config, "base_model_pp_plan", None) or {}
    if set(plan) != KNOWN:
        raise OptionsError(f"--pp {ranks}: {type(config).__name__} has no plan that this program knows: take a Llama")
    if config.num_hidden_layers < ranks:
        raise OptionsError(
            f"--pp {ranks}: the model has {config.num_hidden_layers} layers, and each rank needs one: take fewer"
        )


def staged(language: Language, world: World) -> Language:
    """This rank's part of a model, which is left as it is: as many layers as others, but for what does not come out."""
    model = copy.deepcopy(language.model)
    base: Any = model.base_model
    count = model.config.num_hidden_layers
    first, end = (place * count // world.size for place in (world.rank, world.rank + 1))
    base.layers = base.layers[first:end]
    for number, layer in enumerate(base.layers):
        layer.self_attn.layer_idx = number  # by which attention finds its keys and values
    model.config.num_hidden_layers = end - first
    if not world.begins:
        base.embed_tokens = torch.nn.Identity()
    if not world.ends:
        base.norm = torch.nn.Identity()
        model.set_output_embeddings(torch.nn.Identity())
    return attrs.evolve(language, model=model)
