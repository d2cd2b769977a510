"""The model: a small seeded Gemma 3, two layers of three with a window, whose outputs vary."""

import math
from typing import Final

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GenerationConfig

from serving.model import BOS, BYTES, EOS, PRINTABLE, ByteTokens, Language

SLIDING: Final = "sliding_attention"
_LAYERS: Final = [SLIDING, SLIDING, "full_attention"] * 2
_SHARPNESS: Final = 2.4
"""The deviation of attention's scores: queries and keys are normed, so that only their scale can make it so."""


def seeded(window: int, seed: int, device: torch.device) -> Language:
    """A model in float32 that sees `window` tokens in most layers, its weights drawn from the seed."""
    config = Gemma3TextConfig(
        vocab_size=BYTES + 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(_LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=1,
        layer_types=_LAYERS,
        sliding_window=window,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = Gemma3ForCausalLM(config)
    _scale(model, torch.Generator().manual_seed(seed))
    model.generation_config = GenerationConfig()
    model.to(device=device).eval()  # type: ignore[call-arg] # as transformers annotates it
    return Language(f"seeded Gemma 3, seed {seed}", model, ByteTokens(bos=BOS), frozenset({EOS}))


@torch.no_grad()
def _scale(model: Gemma3ForCausalLM, generator: torch.Generator) -> None:
    """Weights so large that a token depends on all the text that it may see; the head prefers printable bytes.

    What each layer adds is normed, so that embeddings must not be larger than that.
    """
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            gain = 4.0 if "lm_head" in name else 1.0
            weight.normal_(std=gain / math.sqrt(weight.shape[1]), generator=generator)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):  # scores are products of head_dim of both
            weight.fill_(math.sqrt(_SHARPNESS) / model.config.head_dim**0.25 - 1)
    preference = torch.full((BYTES + 2, 1), 0.5)
    preference[list(PRINTABLE)] = 1.0
    preference[EOS] = 1.2
    model.lm_head.weight.mul_(preference)
