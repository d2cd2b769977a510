"""What the demo's tests share: where it is, how to run it quickly, and what a run comes to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "generate"
DTYPES = ("float32", "bfloat16")
QUICK = ("--max-new-tokens", "12", "--arrival-gap", "0", "--prefill", "eager")
PROMPTS = ("Hi!", "a sentence of some length, so that it takes more than one page of the cache", "Grüße")
NEEDS = "the demo's models: pip install 'slotgraph[models]'"

Module = Callable[[str], Any]
Result = tuple[int, dict[str, Any], str]
Generate = Callable[..., Result]
