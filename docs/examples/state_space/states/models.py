"""The models: small seeded hybrids of three families, whose outputs vary."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GenerationConfig,
    JambaConfig,
    JambaForCausalLM,
    PreTrainedModel,
)

from serving.model import ByteTokens, Language

VOCABULARY: Final = 256
_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_MAMBA_2: Final[Mapping[str, Any]] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}


def _bamba() -> PreTrainedModel:
    """Mamba-2 and attention in turns."""
    return BambaForCausalLM(BambaConfig(**_SIZES, **_MAMBA_2, mamba_n_groups=2, attn_layer_indices=[1, 3]))


def _jamba() -> PreTrainedModel:
    """Mamba and attention without positions in turns; no experts, whose choice is the host's in plain torch."""
    dense: Mapping[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1}
    turns: Mapping[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1}
    return JambaForCausalLM(JambaConfig(**_SIZES, **dense, **turns, mamba_d_state=16, mamba_dt_rank=4))


def _falcon_h1() -> PreTrainedModel:
    """Mamba-2 and attention side by side in each layer."""
    return FalconH1ForCausalLM(FalconH1Config(**_SIZES, **_MAMBA_2, mamba_d_ssm=128, mamba_d_head=16))


FAMILIES: Final[Mapping[str, Callable[[], PreTrainedModel]]] = {
    "bamba": _bamba,
    "jamba": _jamba,
    "falcon-h1": _falcon_h1,
}


def seeded(family: str, seed: int, device: torch.device) -> Language:
    """A model of that family in float32, its weights drawn from the seed; no token ends its texts."""
    model = FAMILIES[family]()
    _scale(model, torch.Generator().manual_seed(seed))
    model.generation_config = GenerationConfig()
    model.to(device=device).eval()  # type: ignore[call-arg] # as transformers annotates it
    return Language(family, model, ByteTokens(), frozenset())


@torch.no_grad()
def _scale(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Weights so large that a token depends on all the text before it: with the usual ones, a text soon repeats itself.

    Decay, skip and norms stay as the family begins with them: they say how long a state remembers.
    """
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(std=0.5, generator=generator)
        elif weight.dim() > 1 and "A_log" not in name:
            weight.normal_(std=_deviation(name, weight[0].numel()), generator=generator)


def _deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    return (3.0 if "lm_head" in name else 1.5) / math.sqrt(fan_in)
