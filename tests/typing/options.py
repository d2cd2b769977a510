# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Never run: mypy and pyright refuse the options that a runner refuses when it is made.

A line that must be refused carries an ignore; each checker reports one that it does not need.
"""

import torch

from slotgraph import TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, PrefillRunner, copied
from slotgraph.config import RunnerConfig
from slotgraph.speculative import DraftExtendRunner


class Tokens(Inputs):
    """A declaration."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def step(view: Tokens) -> torch.Tensor:
    """A step over it."""
    return view.ids


def each_runner_has_its_options() -> None:
    """Those that it uses, of their types, and no others."""
    DecodeRunner(Tokens, step, buckets=[1, 2], width=2, lowering="foreach", error_mode=None, lazy=True)
    DecodeRunner(Tokens, step, max_tokens=7)  # type: ignore[call-arg]
    DecodeRunner(Tokens, step, no_copy=True)  # type: ignore[call-arg]
    DecodeRunner(Tokens, step, width="2")  # type: ignore[arg-type]
    EagerRunner(Tokens, step, no_copy=True)
    EagerRunner(Tokens, step, lowering="foreach")  # type: ignore[call-arg]
    EagerRunner(Tokens, step, buckets=[1, 2])  # type: ignore[call-arg]
    PrefillRunner(Tokens, step, splits=["own::attention"], max_tokens=64, max_batch=4)
    PrefillRunner(Tokens, step, splits=["own::attention"], width=7)  # type: ignore[call-arg]
    BreakableRunner(Tokens, step, max_tokens=64, width=1)  # type: ignore[call-arg]
    DraftExtendRunner(Tokens, step, width=3, phase=None, ranks=None)
    DraftExtendRunner(Tokens, step, buckets=[1])  # type: ignore[call-arg]
    EagerRunner(Tokens, step, **RunnerConfig.load("runner.toml").as_data())
    DraftExtendRunner(Tokens, step, width=2, **RunnerConfig.load("runner.toml").as_data())
