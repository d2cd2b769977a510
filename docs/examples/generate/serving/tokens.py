"""From text to token ids and back: bytes as they are, or a checkpoint's own tokenizer."""

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import attrs
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from serving.options import OptionsError

BYTES = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokens(abc.ABC):
    """How one model reads and writes text."""

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """The token ids of a prompt, at least one."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated token ids; what is no valid text comes out as a replacement sign."""


@final
@attrs.frozen
class ByteTokens(Tokens):
    """A byte is a token, so any UTF-8 text goes in and no file is needed; ids from 256 on are special."""

    bos: int | None = None

    def encode(self, text: str) -> list[int]:
        """The begin-of-text token, where there is one, and the text's bytes."""
        return [*([] if self.bos is None else [self.bos]), *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """The bytes among the ids, as UTF-8."""
        return bytes(token for token in ids if token < BYTES).decode(errors="replace")


@final
@attrs.frozen
class CheckpointTokens(Tokens):
    """The tokenizer that came with a checkpoint."""

    tokenizer: PreTrainedTokenizerBase

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


def checkpoint_tokens(place: str, config: Any) -> Tokens:
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
