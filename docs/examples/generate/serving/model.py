"""The language model: a small seeded Llama whose outputs vary, or a checkpoint from a folder."""

import math
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from serving.options import Options, OptionsError
from serving.tokens import BYTES, ByteTokens, Tokens, checkpoint_tokens

BOS, EOS = BYTES, BYTES + 1
PRINTABLE = range(32, 127)
NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings")
UNKNOWN = ("sliding_window", "attn_logit_softcapping")
ROPES_READ_BY_THE_HOST = ("dynamic", "longrope")


@attrs.frozen
class Language:
    """A model with what is needed to talk to it: its tokens and the ids that end a text."""

    name: str
    model: PreTrainedModel
    tokens: Tokens
    eos: frozenset[int]

    @property
    def parameters(self) -> int:
        """How many numbers the model holds."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def config_of(options: Options) -> Any:
    """The configuration of the model that the options ask for, without its weights; OptionsError where there is none.

    Also where its attention or positions are of a kind that this engine does not know.
    """
    return _seeded_config() if options.model is None else _checkpoint_config(options.model)


def load_language(options: Options, device: torch.device) -> Language:
    """The model that the options ask for, ready to run on `device`; OptionsError where there is none."""
    language = _seeded(options.seed) if options.model is None else _checkpoint(options.model, options.torch_dtype)
    language.model.to(device=device, dtype=options.torch_dtype).eval()  # type: ignore[call-arg]
    language.model.generation_config = GenerationConfig()  # the comparison is greedy: drop sampling settings
    return language


def _seeded_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=BYTES + 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


def _seeded(seed: int) -> Language:
    model = LlamaForCausalLM(_seeded_config())
    _scale(model, torch.Generator().manual_seed(seed))
    return Language(f"seeded Llama, seed {seed}", model, ByteTokens(bos=BOS), frozenset({EOS}))


@torch.no_grad()
def _scale(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Weights so large that a token depends on all the text before it: with the usual ones, a text soon repeats itself.

    The head prefers printable bytes, so that a reader can tell texts apart, and now and then the end of the text.
    """
    for name, weight in model.named_parameters():
        if "norm" not in name:
            weight.normal_(std=_deviation(name, weight.shape[1]), generator=generator)
    preference = torch.full((BYTES + 2, 1), 0.5)
    preference[list(PRINTABLE)] = 1.0
    preference[EOS] = 1.3
    model.lm_head.weight.mul_(preference)


def _deviation(name: str, fan_in: int) -> float:
    gains = {
        "embed_tokens": math.sqrt(fan_in),
        "q_proj": 2.4,
        "k_proj": 2.4,
        "v_proj": 1.0,
        "o_proj": 1.0,
        "lm_head": 4.0,
    }
    return gains.get(name.split(".")[-2], 2.0) / math.sqrt(fan_in)


def _checkpoint_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise OptionsError(f"--model {folder}: there is no config.json: give a folder that save_pretrained() wrote")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _refuse_what_is_no_llama(config)
    return config


def _checkpoint(folder: Path, dtype: torch.dtype) -> Language:
    config = _checkpoint_config(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return Language(folder.name, model, checkpoint_tokens(folder, config), _ends(model))


def _refuse_what_is_no_llama(config: Any) -> None:
    """OptionsError for a model whose attention or positions this engine does not know."""
    missing = [name for name in NEEDED if getattr(config, name, None) is None]
    special = [name for name in UNKNOWN if getattr(config, name, None) is not None]
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if missing or special:
        names = ", ".join([*(f"no {name}" for name in missing), *special])
        raise OptionsError(
            f"{type(config).__name__} has {names}: take a Llama-family model with plain causal attention"
        )
    if rope in ROPES_READ_BY_THE_HOST:
        raise OptionsError(
            f"the host reads positions in each step for rope type {rope!r}, which no graph can: take another model"
        )


def _ends(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text: the generation settings name them, else the configuration."""
    for settings in (model.generation_config, model.config):
        ids = getattr(settings, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
