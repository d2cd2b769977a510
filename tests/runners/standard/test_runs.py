"""Standard classes through runners: every slot holds the oracle's bytes, tails and all; prefill with its defaults."""

import functools
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from slotgraph import (
    BATCH,
    TOKENS,
    BreakableRunner,
    DecodeRunner,
    EagerRunner,
    Inputs,
    PrefillRunner,
    Step,
    errors,
    standard,
)
from slotgraph.backends import load
from slotgraph.dataflow.buffers import Buffers
from slotgraph.dataflow.oracle import fill_slot_by_slot
from slotgraph.speculative import WIDTH
from tests.runners.models import decoder, ready
from tests.runners.standard.batches import CLASSES, batch_of, fixed_of, sizes_of
from tests.strategies import poisoned, same_bytes

SHARDING = standard.Sharding(attn_tp_size=2, attn_tp_rank=1, scattered=False)
BUCKETS = (2, 4)


class DecodeOfAll(
    standard.Mamba,
    standard.NgramEmbedding,
    standard.DecodeInputs,
    standard.SlidingWindow,
    standard.EncoderDecoder,
    standard.Mrope,
    standard.PipelineProxies,
    standard.PipelineIndices,
    standard.ExpertParallel,
    standard.DataParallelGathered,
):
    """All that decode can be asked for."""


class Verify(standard.TargetVerifyInputs, standard.DataParallelCarried, standard.BoundedContext):
    """A tree of three tokens a request, counts carried, lengths bounded."""


class Prefill(
    standard.Mrope,
    standard.PipelineProxies,
    standard.DraftPrefillInputs,
    standard.PipelineIndices,
    standard.InputEmbeds,
    standard.ExpertParallel,
):
    """All that a prefill's pieces can be asked for."""


class Breakable(standard.Mamba, standard.LoraPrefill, standard.BreakableInputs):
    """What breaks read, requests padded, too."""


class Draft(standard.DraftInputs, standard.DraftSampling, standard.DraftMrope, standard.DataParallelGathered):
    """A sampled draft of two branches."""


class Sampled(standard.DecodeInputs, standard.Sampling, standard.Lora):
    """Decode with sampling in the graph and adapters."""


class Extend(standard.DataParallelGatheredExtend, standard.DraftExtendInputs):
    """Two tokens a request."""


class MultiLayer(standard.MultiLayerDraftExtendInputs, standard.Mrope):
    """One token in front and two drafts."""


WIDTHS: dict[type[Inputs], int] = {
    **dict.fromkeys((DecodeOfAll, standard.EagerInputs, Prefill, Sampled), 1),
    **dict.fromkeys((Breakable, Draft, Extend), 2),
    **dict.fromkeys((Verify, MultiLayer), 3),
}
"""Each class, and the tokens that a request has."""
each_class = pytest.mark.parametrize("inputs", WIDTHS, ids=lambda inputs: inputs.__name__)


@attrs.frozen(eq=False)
class World:
    """A captured runner and an oracle with buffers of its own, each of which has seen the same steps."""

    runner: DecodeRunner[Any]
    buffers: Buffers
    width: int

    def play(self, live: int, seed: int, *, absent: bool) -> None:
        """One step of both: each slot's bytes are the oracle's, once those of the step's graph have run."""
        stage = self.runner.stage
        optional = frozenset(n for n, slot in stage.declaration.slots.items() if slot.optional and absent)
        batch, beside = batch_of(stage.declaration, sizes_of(stage.inputs, live, self.width), seed, optional)
        view = self.runner.fill(batch, **beside)
        scribbled = self.runner.replay(view)
        padded = next(rows for rows in BUCKETS if rows >= live)
        step = Step(sizes_of(stage.inputs, live, self.width), sizes_of(stage.inputs, padded, self.width))
        right = fill_slot_by_slot(stage.declaration, self.buffers, stage.backend.capabilities, step, batch, beside)
        for name, expected in right.items():
            got = getattr(view, name)
            assert (got is None) == (expected is None), name
            if got is not None and expected is not None and stage.declaration.slots[name].kind != "output":
                assert same_bytes(got.cpu(), expected), f"{name}: {got} is not {expected}"
        assert scribbled.shape[0] == live * self.width


def reads_tokens(view: Any) -> torch.Tensor:
    """A step with one row a token, which writes its positions where it says that they are put back."""
    positions: torch.Tensor = view.positions
    if isinstance(view, Draft):
        positions.add_(1)
    return positions * 2


@functools.cache
def world(inputs: type[Inputs], backend: str, lowering: str) -> World:
    """A captured runner over two buckets, for batches with every optional slot and with none."""
    width = WIDTHS[inputs]
    optional = {name for name, slot in inputs.slotgraph.slots.items() if slot.optional}
    options: dict[str, Any] = {"buckets": BUCKETS, "width": width, "sizes": fixed_of(inputs), "settings": SHARDING}
    options |= {"absent": [optional] if optional else [], "lowering": lowering, "backend": backend}
    runner: DecodeRunner[Any] = decoder(inputs, reads_tokens, output_rows=TOKENS, **options)
    buffers = poisoned(inputs, runner.stage.backend.capabilities, sizes_of(inputs, max(BUCKETS), width), 7)
    for buffer in buffers:  # what no step promises to write is the same in both
        buffer.tensor.copy_(runner.graphs.buffers[buffer.name].tensor)
    return World(runner, buffers, width)


turn = st.tuples(st.integers(0, max(BUCKETS)), st.integers(0, 1 << 16), st.booleans())


@each_class
@given(played=st.lists(turn, min_size=1, max_size=4), data=st.data())
@settings(max_examples=25)
def test_decode_steps_hold_the_oracles_bytes(
    inputs: type[Inputs], backend_name: str, played: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Steps of random sizes and absent slots, by each lowering that the backend has."""
    lowerings = load(backend_name)().capabilities.lowerings
    game = world(inputs, backend_name, data.draw(st.sampled_from(lowerings)))
    for live, seed, absent in played:
        game.play(live, seed, absent=absent)


def test_the_placeholder_is_a_batch(backend_name: str) -> None:
    """The stand-in of one request owns every token, has no prefix, and fits its declaration."""
    placeholder = standard.BreakableInputs.placeholder(Step({BATCH: 1, TOKENS: 6}, {BATCH: 1, TOKENS: 6}))
    tokens = torch.arange(1, 7)
    batch = {**placeholder, "input_ids": tokens, "positions": tokens, "out_cache_loc": tokens}
    view = EagerRunner(standard.BreakableInputs, lambda view: view.positions, backend=backend_name).fill(batch)
    assert view.seq_lens.tolist() == view.extend_seq_lens.tolist() == view.orig_seq_lens.tolist() == [6]
    assert view.extend_prefix_lens.tolist() == view.extend_start_loc.tolist() == view.req_pool_indices.tolist() == [0]

    class Short(standard.BreakableInputs, drop=["orig_seq_lens"]):
        pass

    assert "orig_seq_lens" not in Short.placeholder(Step({TOKENS: 2}, {TOKENS: 2}))


TOKEN_BUCKETS = [6, 12]
ALONE = standard.Sharding(attn_tp_size=1, attn_tp_rank=0, scattered=False)


class Stack(nn.Module):  # two pieces around a split
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # one row a token
        return torch.add(torch.cos(hidden * 3), 1)


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
    given: dict[str, Any] = {"buckets": TOKEN_BUCKETS, "max_batch": 4, "stack": "stack", "backend": "cpu-capture"}
    given |= {"sizes": fixed_of(inputs) | width, "settings": ALONE, "progress": False}
    if kind == "breakable":
        return BreakableRunner(inputs, model, **given)
    return PrefillRunner(inputs, model, splits=[torch.cos], **given)


WHOLE = [name for name, inputs in CLASSES.items() if "positions" in inputs.slotgraph.slots]


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_every_standard_declaration_is_captured(kind: str) -> None:
    """They are captured, and return what the step returns eagerly: rows of requests where the runner cuts to these."""
    assert {"PrefillInputs", "DraftPrefillInputs", "BreakableInputs", "DecodeInputs"} <= {*WHOLE}
    for name in WHOLE:
        inputs = CLASSES[name]
        over = next((n for n, one in inputs.slotgraph.slots.items() if one.shape and one.shape[0] == BATCH * 1), None)
        model = Model(over if kind == "breakable" else None)
        runner = ready(make(kind, inputs, model))
        eager = EagerRunner(inputs, model, sizes=runner.stage.sizes, settings=ALONE, backend="cpu")
        for seed, (requests, tokens) in enumerate(((1, 6), (2, 4), (3, 11), (4, 20))):
            live = {BATCH: requests, TOKENS: tokens, **runner.stage.sizes}
            batch, beside = batch_of(inputs.slotgraph, live, seed)
            assert torch.equal(runner(batch, **beside), eager(batch, **beside)), name


@pytest.mark.parametrize("kind", ["breakable", "piecewise"])
def test_a_declaration_without_tokens_is_refused_for_that(kind: str) -> None:
    """Not for the default of an option that nobody gave."""
    for name in ("DataParallelCarried", "Mamba", "Requests"):
        with pytest.raises(
            errors.DeclarationError, match=f"{name}: no copied slot determines the size of TOKENS: declare"
        ):
            make(kind, CLASSES[name], Model(None))
