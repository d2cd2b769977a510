"""The draft runner: whole trees by one replay, positions that nobody sees move, batches that stay as they were."""

import functools
import types
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, standard
from slotgraph.backends import Backend, load
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError
from slotgraph.runners.draft import DraftStep
from slotgraph.runners.tree import Drafts, top_tokens
from slotgraph.speculative import DraftRunner, draft_tree
from tests.runners.models import Batch, ready, same_batch, snapshot
from tests.runners.test_tree import PlainTree

WORDS, WIDE, PLACES = 30, 5, 60
_DRAW = torch.Generator().manual_seed(3)
TABLE = torch.randn(WORDS, WIDE, generator=_DRAW, dtype=torch.float64)
PLACED = torch.randn(PLACES, WIDE, generator=_DRAW, dtype=torch.float64)
HEAD = 2 * torch.randn(WIDE, WORDS, generator=_DRAW, dtype=torch.float64)


@standard.model_dtype(torch.float64)
class ToyInputs(standard.DraftInputs):
    """The standard's, in the toy model's dtype."""


class ViewInputs(ToyInputs):
    """With a slot that is called as the parameter of the draft's own step."""

    view: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0)


class BareInputs(Inputs):  # no more than a draft needs
    topk_p: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0)
    topk_index: torch.Tensor = copied(BATCH, standard.TOPK, dtype=torch.int64, pad=0)


@attrs.define(eq=False)
class Toy:
    """A model whose answer depends on the token, its position, its hidden state, and all drafted tokens before it."""

    topk: int
    steps: int
    device: torch.device
    cache: torch.Tensor = attrs.field(init=False)
    weights: list[torch.Tensor] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Weights on the device, and a cache in which nothing is zero."""
        self.cache = torch.full((1 + 8 * self.topk * self.steps, WIDE), 1e3, dtype=torch.float64, device=self.device)
        self.weights = [weight.to(self.device) for weight in (TABLE, PLACED, HEAD)]

    def __call__(self, view: Any, step: DraftStep) -> tuple[torch.Tensor, torch.Tensor]:
        table, placed, head = self.weights
        assert step.hidden_states is not None
        assert step.input_ids.data_ptr() == view.input_ids.data_ptr()
        places = view.out_cache_loc.view(-1, self.topk, self.steps)
        self.cache[places[:, :, step.index].flatten()] = table[view.input_ids]
        earlier = [places[:, :, j].gather(1, step.branches[:, :, j]).flatten() for j in range(step.index)]
        before = torch.stack([self.cache[rows] for rows in earlier]).sum(0) if earlier else 0
        return answer(table[view.input_ids], placed[view.positions], before, step.hidden_states, head)


def answer(
    token: torch.Tensor, place: torch.Tensor, before: Any, hidden: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the next hidden state."""
    made = torch.tanh(token + place + 0.3 * before + 0.5 * hidden)
    return made @ head, made


def plain_drafts(batch: Batch, request: int, topk: int, steps: int) -> PlainTree:
    """One request's tree, node by node."""
    hidden_of: dict[int, torch.Tensor] = {-1: batch["hidden_states"][request]}
    tree = PlainTree.begin(batch["topk_p"][request].tolist(), batch["topk_index"][request].tolist())
    position = int(batch["positions"][request * topk])
    for step in range(steps - 1):
        found = []
        for node in tree.frontier:
            one = tree.nodes[node]
            before = sum((TABLE[tree.nodes[other].token] for other in tree.above(node)), torch.zeros(()))
            hidden = hidden_of[one.parent]
            logits, hidden_of[node] = answer(TABLE[one.token], PLACED[position + step], before, hidden, HEAD)
            found.append(top_tokens(logits, topk))
        tree.grow([shares.tolist() for shares, _ in found], [tokens.tolist() for _, tokens in found])
    return tree


def batch_of(requests: int, topk: int, steps: int, seed: int, device: str | torch.device = "cpu") -> Batch:
    """A random batch, whose locations are all different and none of them 0."""
    draw = torch.Generator().manual_seed(seed)
    shares = torch.rand(requests, topk, generator=draw).mul(0.5).add(0.01)
    ids = torch.stack([torch.randperm(WORDS, generator=draw)[:topk] for _ in range(requests)] or [torch.zeros(topk)])
    starts = torch.randint(1, PLACES - steps - 1, (requests,), generator=draw)
    places = 1 + torch.randperm(requests * topk * steps, generator=draw)
    batch = {
        "req_pool_indices": torch.arange(1, requests + 1),
        "seq_lens": (starts + 1).to(torch.int32),
        "positions": starts.repeat_interleave(topk),
        "out_cache_loc": places,
        "topk_p": shares,
        "topk_index": ids[:requests].to(torch.int64),
        "hidden_states": torch.randn(requests, WIDE, generator=draw, dtype=torch.float64),
    }
    return {name: value.to(device) for name, value in batch.items()}


OPTIONS: dict[str, Any] = {"absent": [{"seq_lens_cpu"}], "sizes": {standard.HIDDEN: WIDE}, "progress": False}


def made(backend: str | Backend, topk: int, steps: int, **options: Any) -> DraftRunner[ToyInputs]:
    """A captured runner."""
    toy = Toy(topk, steps, (load(backend)() if isinstance(backend, str) else backend).device)
    given = {"buckets": [2, 4], **OPTIONS, **options}
    return ready(DraftRunner(ToyInputs, toy, topk=topk, steps=steps, backend=backend, **given))


captured = functools.cache(made)  # which all tests leave as usable as it was


def assert_right(drafts: Drafts, batch: Batch, topk: int, steps: int) -> None:
    """Every node of every request's tree is the plain one's."""
    host = {name: value.cpu() for name, value in batch.items()}
    for request in range(len(host["seq_lens"])):
        tree = plain_drafts(host, request, topk, steps)
        assert drafts.tokens[request].tolist() == [node.token for node in tree.nodes]
        assert drafts.parents[request].tolist() == [node.parent for node in tree.nodes]
        scores = torch.tensor([node.score for node in tree.nodes])
        torch.testing.assert_close(torch.as_tensor(drafts.scores[request].cpu()), scores, rtol=1e-4, atol=1e-7)


@settings(max_examples=20)
@given(st.sampled_from([(1, 3), (2, 2), (3, 3)]), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.data())
def test_drafts_are_the_plain_ones(
    backend_name: str, shape: tuple[int, int], sizes: list[int], data: st.DataObject
) -> None:
    """Batches of any size after one another, padded, full or beyond the largest bucket, give plain Python's trees."""
    topk, steps = shape
    runner = captured(backend_name, topk, steps)
    device = load(backend_name)().device
    for requests in sizes:
        batch = batch_of(requests, topk, steps, data.draw(st.integers(0, 1000)), device)
        given, drafts = snapshot(batch), runner(batch)
        assert drafts.tokens.shape == (requests, topk + (steps - 1) * topk * topk)
        assert_right(drafts, batch, topk, steps)
        assert same_batch(batch, given)


def test_a_step_of_ones_own_drafts_the_same_trees(backend: Backend) -> None:
    """A tree inside a decode step is the plain one, of padded batches, too."""
    topk, steps = 2, 3
    toy = Toy(topk, steps, backend.device)
    sizes = {standard.TOPK: topk, standard.STEPS: steps, standard.HIDDEN: WIDE}
    given: Any = {**OPTIONS, "sizes": sizes}
    step: Any = lambda view: draft_tree(toy, topk, steps, view)
    runner = ready(
        DecodeRunner(
            ToyInputs,
            step,
            **given,
            width=topk,
            output_rows=BATCH,
            backend=backend,
            buckets=[2, 4],
        )
    )
    for requests in (4, 1, 3):
        batch = batch_of(requests, topk, steps, requests, backend.device)
        assert_right(runner(batch), batch, topk, steps)


def with_plain(name: str) -> type[Inputs]:
    """A draft's declaration with a plain slot over tokens."""
    own = {"__annotations__": {name: torch.Tensor}, name: copied(TOKENS, dtype=torch.int64, pad=0)}
    made: type[Inputs] = types.new_class("Wrong", (BareInputs,), {}, lambda body: body.update(own))
    return made


def test_a_batch_of_another_shape_is_refused(cpu: str) -> None:
    """A batch with another number of branches or of tokens is refused, and the next one is right."""
    runner = captured(cpu, 2, 3)
    good = batch_of(2, 2, 3, 1)
    with pytest.raises(BatchError, match=r"slot 'topk_p': expected float32 of shape \[2, 2\]"):
        runner({**good, "topk_p": torch.rand(2, 3)})
    with pytest.raises(BatchError, match=r"'positions' says TOKENS=6; .*TOKENS is 3 x BATCH: did you mean topk=3\?"):
        runner({**good, "positions": torch.arange(1, 7), "out_cache_loc": torch.arange(1, 19)})
    assert_right(runner(good), good, 2, 3)


class Mrope(standard.DraftMrope, standard.DraftInputs):
    """Positions of three parts, which the steps advance beside the plain ones."""


def test_positions_of_three_parts_advance_together(backend: "Backend") -> None:
    """All parts are one more in each step, and as before at its end."""
    device, seen = backend.device, list[torch.Tensor]()
    table = torch.cat([TABLE, TABLE], 1).to(device)

    def forward(view: Any, step: DraftStep) -> tuple[torch.Tensor, None]:
        """What depends on all parts."""
        seen.append(view.mrope_positions.clone())
        return (table[step.input_ids] * view.mrope_positions.sum(0)[:, None]).double(), None

    runner = ready(DraftRunner(Mrope, forward, topk=2, steps=3, backend=backend, buckets=[4], **OPTIONS))
    batch = batch_of(3, 2, 3, 4, device)
    batch["hidden_states"] = batch["hidden_states"].to(torch.bfloat16)
    batch["mrope_positions"] = torch.randint(1, 40, (3, 6), generator=torch.Generator().manual_seed(5)).to(device)
    view = runner.fill(batch)
    runner.replay(view)
    assert runner.stats()["steps"]["graph"] == 1
    assert view.mrope_positions is not None
    assert view.mrope_positions.tolist() == [[*row, 0, 0] for row in batch["mrope_positions"].tolist()]
    first, second = seen[:2]  # of the first run for the capture
    assert torch.equal(first + 1, second)


def test_a_slot_may_be_called_view(backend_name: str) -> None:
    """The draft's own step gets the view, whatever slots are called."""
    toy = Toy(2, 3, load(backend_name)().device)
    given = {"buckets": [2], "backend": backend_name, **OPTIONS}
    runner = ready(DraftRunner(ViewInputs, toy, topk=2, steps=3, **given))
    batch = batch_of(2, 2, 3, 1, load(backend_name)().device)
    assert_right(runner({**batch, "view": batch["req_pool_indices"]}), batch, 2, 3)


class MaybeInputs(BareInputs):
    topk_p: torch.Tensor | None = copied(BATCH, standard.TOPK, dtype=torch.float32, pad=0, default=None)  # type: ignore[assignment]


def test_what_cannot_be_drafted_is_refused() -> None:
    """Counts below 1, widths and sizes that contradict them, and declarations that lack something are refused."""
    wrong: list[tuple[type[Inputs], dict[str, Any], str]] = [
        (BareInputs, {"topk": 0}, r"topk: expected a whole number, at least 1, got 0"),
        (BareInputs, {"steps": 1.5}, r"steps: expected a whole number, at least 1, got 1.5"),
        (BareInputs, {"sizes": {standard.TOPK: 3}}, r"sizes of TOPK is 3, and topk= is 2: give topk= alone"),
        (with_plain("positions"), {}, r"slot 'positions' of Wrong: .* give it restored=True"),
        (
            with_plain("input_ids"),
            {},
            r"slot 'input_ids': the draft writes it in each step: declare it with staged\(\)",
        ),
        (with_plain("topk_index"), {}, r"Wrong needs a slot 'topk_index' of shape \[BATCH, TOPK\]"),
        (MaybeInputs, {}, r"MaybeInputs needs a slot 'topk_p' of shape \[BATCH, TOPK\], which every batch has"),
    ]
    forward: Any = print  # never called
    for inputs, options, message in wrong:
        given: dict[str, Any] = {"topk": 2, "steps": 2, "buckets": [2], **options}
        with pytest.raises(ConfigError, match=message):
            DraftRunner(inputs, forward, backend="cpu", **given)


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (
            BareInputs(topk_p=torch.ones(2, 2), topk_index=torch.zeros(2, 3)),
            r"'topk_p', .* \[requests, 3\], .* \[2, 2\]",
        ),
        (BareInputs(topk_p=torch.ones(2, 3), topk_index=[[1, 2, 3]]), r"'topk_index', a tensor .* got list"),  # type: ignore[arg-type]
        ({"topk_p": torch.ones(2, 3)}, "'topk_p', a tensor .* got NoneType"),
    ],
)
def test_a_tree_of_other_slots_is_refused(view: Any, message: str) -> None:
    """One that is drafted in a step of your own has no runner that checks them."""
    with pytest.raises(ConfigError, match=message):
        draft_tree(lambda *_: (torch.rand(6, WORDS), None), 3, 2, view)


def test_what_forward_returns_is_checked(cpu: str) -> None:
    """Logits and hidden states have a row a token, or no bucket is captured, for that reason."""
    wrong: list[tuple[Callable[..., Any], str]] = [
        (lambda *_: torch.rand(4, WORDS), r"\[4, 30\]"),
        (lambda *_: (torch.rand(3, WORDS), None), r"\[3, 30\], NoneType"),
        (lambda *_: (torch.rand(4, 1), None), r"\[4, 1\], NoneType"),
        (lambda *_: (None, None), "NoneType, NoneType"),
        (lambda *_: (torch.rand(4, WORDS), torch.rand(2, 5)), r"\[4, 30\], \[2, 5\]"),
    ]
    said = r"draft step 0, must return .* logits of \[4, words\] with at least 2 words, and hidden .* 4 rows, .* got "
    for forward, message in wrong:
        runner = DraftRunner(BareInputs, forward, topk=2, steps=3, buckets=[2], backend=cpu)
        with pytest.raises(CaptureError, match=said + message):
            runner.capture()
