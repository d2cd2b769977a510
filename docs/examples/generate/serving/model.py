"""The language model: a small seeded Llama whose outputs vary, or a checkpoint from a folder."""

from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from serving.options import Options, OptionsError
from serving.tokens import BYTES, ByteTokens, Tokens, checkpoint_tokens

BOS, EOS = BYTES, BYTES + 1
PRINTABLE = range(32, 127)
ROPES_THAT_READ_POSITIONS = ("dynamic", "longrope")


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


def load_language(options: Options, device: torch.device) -> Language:
    """The model that the options ask for, ready to run on `device`; OptionsError where there is none."""
    language = _seeded(options.seed) if options.model is None else _checkpoint(options.model, options.torch_dtype)
    language.model.to(device=device, dtype=options.torch_dtype).eval()  # type: ignore[call-arg]
    language.model.generation_config = GenerationConfig()  # the comparison is greedy: drop sampling settings
    return language


def _seeded(seed: int) -> Language:
    config = LlamaConfig(
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
    model = LlamaForCausalLM(config)
    _scale(model, torch.Generator().manual_seed(seed))
    return Language(f"seeded Llama, seed {seed}", model, ByteTokens(bos=BOS), frozenset({EOS}))


@torch.no_grad()
def _scale(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Weights large enough that a token depends on the whole text before it: the usual ones repeat one token for ever."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:  # noqa: PLR2004 - the norms' vectors stay as they are
            weight.normal_(std=_deviation(name, weight.shape[1]), generator=generator)
    legible = torch.full((BYTES + 2, 1), 0.5)  # most of the output is printable, so that a reader can tell it apart
    legible[list(PRINTABLE)] = 1.0
    legible[EOS] = 1.3  # and a text ends after some tens of tokens
    model.lm_head.weight.mul_(legible)


def _deviation(name: str, fan_in: int) -> float:
    gains = {"embed_tokens": fan_in**0.5, "q_proj": 2.4, "k_proj": 2.4, "v_proj": 1.0, "o_proj": 1.0, "lm_head": 4.0}
    return gains.get(name.split(".")[-2], 2.0) / float(fan_in**0.5)


def _checkpoint(folder: Path, dtype: torch.dtype) -> Language:
    if not (folder / "config.json").is_file():
        message = f"--model {folder}: there is no config.json: give a folder that save_pretrained() wrote"
        raise OptionsError(message)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _refuse_what_cannot_be_captured(config)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype)
    return Language(folder.name, model, checkpoint_tokens(folder, config), _ends(model))


def _refuse_what_cannot_be_captured(config: Any) -> None:
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope in ROPES_THAT_READ_POSITIONS:
        message = f"rope type {rope!r} reads positions on the host in each step, which no graph can hold: take another model"
        raise OptionsError(message)
    if config.vocab_size < BYTES:
        message = f"a vocabulary of {config.vocab_size} tokens cannot hold bytes: take a model with a tokenizer or 256 tokens"
        raise OptionsError(message)


def _ends(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a text: the generation settings name them, else the configuration."""
    for settings in (model.generation_config, model.config):
        ids = getattr(settings, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
