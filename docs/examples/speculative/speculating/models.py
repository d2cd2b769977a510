"""The models: a seeded target with a smaller draft that often agrees with it, or a model of the demo's without any."""

import math
from typing import Final

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from serving import options as demo
from serving.model import BYTES, ByteTokens, Language, load_language
from speculating.options import Options

DRAFT_LAYERS: Final = 2
LAYERS: Final = 4
AGREEMENT: Final = 0.35
"""How much the target's further layers add to what the draft has of it: less, and they always agree."""


def load(options: Options, device: torch.device) -> tuple[Language, PreTrainedModel | None]:
    """The target, and the model that drafts for it, None for prompt lookup; OptionsError where there is no target."""
    if options.model != demo.RANDOM:
        return load_language(demo.Options(model=options.model), device), None
    target, draft = seeded(options.seed, device)
    return Language("seeded Llama", target, ByteTokens(), frozenset()), None if options.lookup else draft


def seeded(seed: int, device: torch.device) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target and a draft in float32, drawn from the seed; no token ends their texts.

    The draft has the target's first layers, its embedding and its head. The further layers of the target change little,
    so that two models that have learnt nothing behave like a trained pair: they agree often, and not always.
    """
    target, draft = LlamaForCausalLM(_config(LAYERS)), LlamaForCausalLM(_config(DRAFT_LAYERS))
    _scale(target, torch.Generator().manual_seed(seed))
    wanted = draft.state_dict().keys()
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in wanted})
    for model in (target, draft):
        model.generation_config = GenerationConfig()
        model.to(device=device).eval()  # type: ignore[call-arg]
    return target, draft


def _config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=BYTES,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )


@torch.no_grad()
def _scale(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Weights so large that a token depends on all the text before it: with the usual ones, a text repeats itself."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.normal_(std=_deviation(name, weight.shape[1]), generator=generator)


def _deviation(name: str, fan_in: int) -> float:
    if "embed_tokens" in name:
        return 1.0
    gain = 3.0 if "lm_head" in name else 1.5
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    if adds and int(name.split(".")[2]) >= DRAFT_LAYERS:
        gain *= AGREEMENT
    return gain / math.sqrt(fan_in)
