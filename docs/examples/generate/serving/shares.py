"""A rank's part of a model: of heads, columns and vocabulary (tensor parallelism), or of layers (pipeline parallelism).

Where shares are added up or put together, the step calls torch.distributed. It does so within operators of its own, so
that whatever records or traces a step sees one operator, to be run again whole; a device's graph holds what is inside.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.nn.functional import linear

from serving.model import Language
from serving.options import OptionsError
from serving.ranks import World

EVEN = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""What of a configuration is shared out."""
COLUMNS, ROWS = "colwise", "rowwise"
KNOWN = {"embed_tokens", "layers", "norm"}
"""What transformers' plans call the parts that tokens, hidden states and again hidden states go through."""
WHOLE = ("replicated_with_grad_allreduce",)
"""Words of transformers' own plans: an output's columns, an input's rows, and what every rank has whole."""


@torch.library.custom_op("serving::add_up", mutates_args=("share",))
def add_up(share: torch.Tensor) -> None:
    """Sum over all ranks, in place."""
    dist.all_reduce(share)


@torch.library.custom_op("serving::put_together", mutates_args=())
def put_together(share: torch.Tensor, ranks: int) -> torch.Tensor:
    """The columns of all ranks beside one another, [..., ranks * columns]."""
    shares = [torch.empty_like(share) for _ in range(ranks)]
    dist.all_gather(shares, share)
    return torch.cat(shares, dim=-1)


@put_together.register_fake
def _(share: torch.Tensor, ranks: int) -> torch.Tensor:
    return share.new_empty(*share.shape[:-1], ranks * share.shape[-1])


class Share(torch.nn.Module):
    """A share of a linear layer: of its columns, which may be put together, or of its rows, which are summed up."""

    def __init__(self, layer: torch.nn.Linear, world: World, *, rows: bool = False, together: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = _chunk(layer.weight, int(rows), world), layer.bias
        if layer.bias is not None and not rows:
            self.bias = _chunk(layer.bias, 0, world)
        self._rows = rows
        self._ranks = world.size if together else 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """From the whole input, [..., inputs], or with rows from a share of it; a bias is added once."""
        if not self._rows:
            share = linear(hidden, self.weight, self.bias)
            return put_together(share, self._ranks) if self._ranks > 1 else share
        out = linear(hidden, self.weight)
        add_up(out)
        return out if self.bias is None else out + self.bias


def check_even(config: Any, ranks: int) -> None:
    """OptionsError for a model that cannot be shared out among so many ranks."""
    plan = _plan(config)
    other = sorted({f"{name} is {word}" for name, word in plan.items() if word not in {COLUMNS, ROWS, *WHOLE}})
    if other or not plan:
        why = f", where {', '.join(other)}" if other else ""
        raise OptionsError(
            f"--tp {ranks}: {type(config).__name__} has no plan that this program knows{why}: take a Llama"
        )
    uneven = [f"{name} {getattr(config, name)}" for name in EVEN if getattr(config, name) % ranks]
    if uneven:
        raise OptionsError(f"--tp {ranks} cannot share out the model's {', '.join(uneven)} evenly: take a divisor")


def sharded(language: Language, world: World) -> Language:
    """This rank's share of a copy of a model, by transformers' plan; of the head if it comes out even."""
    model = copy.deepcopy(language.model)
    base, plan = model.base_model, _plan(model.config)
    layers: list[tuple[str, Any]] = list(base.named_modules())
    for name, layer in layers:
        word = plan.get(re.sub(r"\.\d+\.", ".*.", name))
        if word in {COLUMNS, ROWS}:
            base.set_submodule(name, Share(layer, world, rows=word == ROWS))
    head: Any = model.get_output_embeddings()
    if head.weight.shape[0] % world.size == 0:
        model.set_output_embeddings(Share(head, world, together=True))
    config: Any = model.config
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in EVEN:
        setattr(config, name, getattr(config, name) // world.size)
    return attrs.evolve(language, model=model)


def _plan(config: Any) -> Mapping[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def _chunk(weight: torch.Tensor, dim: int, world: World) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.chunk(world.size, dim)[world.rank].clone(), requires_grad=False)


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
