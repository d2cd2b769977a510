"""One runner of each class, over declarations alike: what tests of options, arguments and calls go through."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slotgraph import BATCH, TOKENS, BreakableRunner, DecodeRunner, EagerRunner, Inputs, PrefillRunner, copied, standard
from slotgraph.extend import side
from slotgraph.speculative import DraftExtendRunner, DraftRunner, MultiLayerDraftExtendRunner

WIDE = 3
RUNNERS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        EagerRunner,
        DecodeRunner,
        PrefillRunner,
        BreakableRunner,
        DraftRunner,
        DraftExtendRunner,
        MultiLayerDraftExtendRunner,
    )
}


class Fed(Inputs):
    """A batch, and what comes beside it: by a slot that is always there, and by one that a setting switches on."""

    tokens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=1)
    hidden: torch.Tensor | None = copied(
        TOKENS, WIDE, dtype=torch.float32, pad=0, source=side("proxies.hidden"), default=None
    )
    window: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, source=side("window_lens"), when="window")

    @classmethod
    def placeholder(cls, step: Any) -> Mapping[str, Any]:
        """One request that owns all tokens."""
        return {"lens": [step.live(TOKENS)]}


class Drafted(Fed):
    """The same, with what a tree begins with."""

    topk_p: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.int64, pad=0)


class Inner(nn.Module):
    """A stack without a break."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """One row a token."""
        return tokens * 3


class Step:
    """A step with one row a token; a request has one."""

    def __init__(self) -> None:
        self.stack = Inner()

    def __call__(self, view: Any) -> torch.Tensor:
        """Without proxies, something else than with them."""
        made: torch.Tensor = self.stack(view.tokens)
        return made if view.hidden is None else made + view.hidden.sum(1).long()


def forward(view: Any, step: Any) -> tuple[torch.Tensor, None]:
    """A draft model of five words."""
    return torch.nn.functional.one_hot((step.input_ids + view.tokens[0] * 0) % 5, 5).float(), None


ARGUMENTS: dict[str, dict[str, Any]] = {
    "PrefillRunner": {"splits": ["slotgraph_tests::attention"], "graphs": False},
    "BreakableRunner": {"stack": "stack", "output_rows": TOKENS},
    "DraftRunner": {"topk": 2, "steps": 2},
    "DraftExtendRunner": {"width": 1},
    "MultiLayerDraftExtendRunner": {"width": 1, "chained": ["tokens"]},
}
"""What each runner is given beside the declaration and the step; a runner without an entry needs nothing."""


def make(name: str, **given: Any) -> Any:
    """A runner, `given` arguments in the place of those that it would have."""
    arguments = {"backend": "cpu-capture", "settings": {"window": False}, **ARGUMENTS.get(name, {}), **given}
    inputs = arguments.pop("inputs", Drafted if name == "DraftRunner" else Fed)
    steps: dict[str, Any] = {"DraftRunner": forward, "MultiLayerDraftExtendRunner": [lambda view, _: view.lens * 2]}
    step = arguments.pop("step", steps[name] if name in steps else Step())
    return RUNNERS[name](inputs, step, **arguments)


def captured(name: str, **given: Any) -> Any:
    """The same, ready for batches."""
    runner = make(name, **({} if name == "EagerRunner" else {"buckets": [2, 4]}), **given)
    if name != "EagerRunner":
        runner.capture()
    return runner


def batch_of(name: str, requests: int, seed: int) -> dict[str, Any]:
    """A random batch that the runner takes."""
    draw, each = torch.Generator().manual_seed(seed), 2 if name == "DraftRunner" else 1
    batch: dict[str, Any] = {
        "tokens": torch.randint(1, 9, (requests * each,), generator=draw),
        "lens": torch.randint(1, 9, (requests,), generator=draw),
    }
    if name == "DraftRunner":
        batch["topk_p"] = torch.rand(requests, 2, generator=draw)
        batch["topk_index"] = torch.randint(1, 5, (requests, 2), generator=draw)
    return batch


def tensors_of(outputs: Any) -> list[torch.Tensor]:
    """The tensors of what a runner returned, copied."""
    if isinstance(outputs, torch.Tensor):
        return [outputs.clone()]
    parts = outputs if isinstance(outputs, tuple | list) else vars_of(outputs)
    return [tensor for part in parts for tensor in tensors_of(part)]


def vars_of(outputs: Any) -> list[Any]:
    """The fields of drafts."""
    return [getattr(outputs, name) for name in getattr(type(outputs), "__match_args__", ())]


def taken(make_one: Callable[[], Any]) -> Any:
    """What is made, or the error."""
    try:
        return make_one()
    except Exception as error:  # noqa: BLE001 - which kind it is, is the question
        return error
