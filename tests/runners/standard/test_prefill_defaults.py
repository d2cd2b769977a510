"""Every standard declaration that tells tokens, through each prefill runner with its defaults."""

from typing import Any

import pytest
import torch
from torch import nn

from slotgraph import BATCH, TOKENS, BreakableRunner, EagerRunner, Inputs, PrefillRunner, errors, standard
from slotgraph.speculative import WIDTH
from tests.runners.standard.batches import CLASSES, batch_of, fixed_of

SHARDING = standard.Sharding(attn_tp_size=1, attn_tp_rank=0, scattered=False)
BUCKETS = [6, 12]
SPLIT = "slotgraph_tests::cosine"


@torch.library.custom_op(SPLIT, mutates_args=())
def cosine(hidden: torch.Tensor) -> torch.Tensor:
    """Where a step is cut."""
    return torch.cos(hidden)


@cosine.register_fake
def _(hidden: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(hidden)


class Stack(nn.Module):  # two pieces around a split
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # one row a token
        return torch.add(cosine(hidden * 3), 1)


class Model(nn.Module):  # rows of tokens; of as many as there are requests where the outputs follow them
    def __init__(self, requests: str | None) -> None:
        super().__init__()
        self.stack, self.requests = Stack(), requests

    def forward(self, view: Any) -> torch.Tensor:  # what the stack makes of positions
        hidden: torch.Tensor = self.stack(view.positions.double()[:, None])
        return hidden if self.requests is None else hidden[: getattr(view, self.requests).shape[0]]


def make(kind: str, inputs: type[Inputs], model: Model) -> BreakableRunner[Any] | PrefillRunner[Any]:
    """A runner that is told nothing that it has a default for."""
    width = {WIDTH: 2} if WIDTH in inputs.slotgraph.axes else {}
    given: dict[str, Any] = {
        "buckets": BUCKETS,
        "max_batch": 4,
        "sizes": fixed_of(inputs) | width,
        "settings": SHARDING,
    }
    if kind == "breakable":
        return BreakableRunner(inputs, model, stack="stack", backend="cpu-capture", progress=False, **given)
    return PrefillRunner(inputs, model, stack="stack", splits=[SPLIT], backend="cpu-capture", progress=False, **given)


WHOLE = [name for name, inputs in CLASSES.items() if "positions" in inputs.slotgraph.slots]


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_every_standard_declaration(kind: str) -> None:
    """They are captured, and return what the step returns eagerly: rows of requests where the runner cuts to these."""
    assert {"PrefillInputs", "DraftPrefillInputs", "BreakableInputs", "DecodeInputs"} <= {*WHOLE}
    for name in WHOLE:
        inputs = CLASSES[name]
        over = next((n for n, one in inputs.slotgraph.slots.items() if one.shape and one.shape[0] == BATCH * 1), None)
        model = Model(over if kind == "breakable" else None)
        runner = make(kind, inputs, model)
        runner.capture()
        eager = EagerRunner(inputs, model, sizes=runner.stage.sizes, settings=SHARDING, backend="cpu")
        for seed, (requests, tokens) in enumerate(((1, 6), (2, 4), (3, 11), (4, 20))):
            live = {BATCH: requests, TOKENS: tokens, **runner.stage.sizes}
            batch, beside = batch_of(inputs.slotgraph, live, seed)
            assert torch.equal(runner(batch, **beside), eager(batch, **beside)), name


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_a_declaration_without_tokens_is_refused_for_that(kind: str) -> None:
    """Not for the default of an option that nobody gave."""
    for name in ("DataParallelCarried", "Mamba", "Requests"):
        with pytest.raises(errors.DeclarationError, match=f"{name}: no copied slot tells the size of TOKENS: declare"):
            make(kind, CLASSES[name], Model(None))
