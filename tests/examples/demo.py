"""What tests of the example programs share: where they are, their modules, and runs of the demo."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from slotgraph import TOKENS, copied, keep

EXAMPLES: Final = Path(__file__).parents[2] / "docs" / "examples"
FOLDER: Final = EXAMPLES / "generate"
SMALL: Final = ["--model=random", "--rounds=0", "--arrival-gap=2", "--max-batch=8", "--prefill=breakable"]
"""Options of a run that a test can wait for."""
QUICK: Final = ("--max-new-tokens", "12", "--arrival-gap", "0", "--prefill", "eager")
PROMPTS: Final = ("Hi!", "a sentence of some length, so that it takes more than one page of the cache", "Grüße")
NEEDS: Final = "the demo's models: pip install 'slotgraph[models]'"
Result = tuple[int, dict[str, Any], str]
Generate = Callable[..., Result]


def module(name: str) -> Any:
    """A module of an example's own package, found as when its folder is run: each package has a name of its own."""
    for folder in EXAMPLES.iterdir():
        if (folder / name.partition(".")[0]).is_dir() and str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name)


def shifted(batch: Any) -> Any:
    """Every decode position is one too far."""
    return attrs.evolve(batch, positions=batch.positions + 1)


def stale(base: Any, dtype: Any, *names: str, axes: Any = (TOKENS,)) -> Any:
    """A declaration that someone wrote in good faith: padded rows of these slots are those of an earlier step."""
    fields = {name: copied(*axes, dtype=dtype, pad=keep("no one reads what padded rows write")) for name in names}
    return type("Stale", (base,), {"__annotations__": dict.fromkeys(names, torch.Tensor), **fields})


def save_llama(folder: Path, **config: Any) -> Path:
    """A checkpoint of random weights, not of the demo's own shape, as save_pretrained() writes it."""
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"bos_token_id": 256, "max_position_embeddings": 256, "attention_bias": True, "tie_word_embeddings": True}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more, **config))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(std=0.3, generator=generator)
    model.save_pretrained(folder)
    return folder
