"""Class C: memory that several users have at once."""

from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied
from slotgraph.backends import load
from slotgraph.dataflow.errors import ConfigError, ReplayError, StaleOutputError
from slotgraph.pool import InputPool
from tests.regressions.engines import BACKEND, ByHand, captured, draw


class TokenInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def scored(view: Any) -> torch.Tensor:
    """[TOKENS] whole numbers."""
    result: torch.Tensor = view.ids * 1000 + view.positions
    return result


def pooled(pool: InputPool, phase: str) -> DecodeRunner[TokenInputs]:
    """A runner of one phase of a pool, not captured yet: all of them join first."""
    return DecodeRunner(
        TokenInputs, scored, buckets=[4], backend=BACKEND, progress=False, phase=pool[phase], sharing=True
    )


def test_sglang_19507_a_plan_stream_in_shared_buffers() -> None:
    """The target's inputs are filled by a plan stream before the draft's graph has read its own of the same name."""
    shared = {name: torch.zeros(4, dtype=torch.int64) for name in ("ids", "positions")}
    graph = load(BACKEND)().capture(lambda: shared["ids"] * 1000 + shared["positions"])
    draft, verify = draw(1, 9, (4,), 1), draw(10, 19, (4,), 2)
    shared["ids"].copy_(draft)
    shared["positions"].copy_(draft)
    shared["positions"].copy_(verify)  # the plan stream prepares the next phase
    graph.replay()
    assert not torch.equal(graph.outputs, draft * 1001)

    overlapping = InputPool("draft", "verify", overlaps=[("draft", "verify")])
    runners = {phase: pooled(overlapping, phase) for phase in ("draft", "verify")}
    for runner in runners.values():
        runner.capture()
    view = runners["draft"].fill({"ids": draft, "positions": draft})
    runners["verify"].fill({"ids": verify, "positions": verify})
    assert torch.equal(runners["draft"].replay(view), draft * 1001)


def test_sglang_19507_phases_that_do_share() -> None:
    """What is said to come one after the other shares memory; a view of a phase that has gone by is refused."""
    pool = InputPool("draft", "verify")
    runners = {phase: pooled(pool, phase) for phase in ("draft", "verify")}
    for runner in runners.values():
        runner.capture()
    places = {runner.graphs.buffers["ids"].tensor.data_ptr() for runner in runners.values()}
    assert len(places) == 1
    draft, verify = draw(1, 9, (4,), 1), draw(10, 19, (4,), 2)
    view = runners["draft"].fill({"ids": draft, "positions": draft})
    assert torch.equal(runners["verify"]({"ids": verify, "positions": verify}), verify * 1001)
    with pytest.raises(ReplayError, match="another runner of this one's pool was filled since"):
        runners["draft"].replay(view)
    with pytest.raises(ConfigError, match="no phase 'plan'"):
        pool["plan"]


class ProbabilityInputs(Inputs):
    shares: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=0.0)


def best(view: Any) -> dict[str, torch.Tensor]:
    """What a draft extension hands to the next step."""
    return {"topk_p": view.shares.max(1).values, "topk_index": view.shares.argmax(1)}


def test_sglang_23037_outputs_kept_over_a_replay() -> None:
    """What one step hands to the next is the graph's own memory, which the next replay writes before it was read."""
    shares = torch.zeros(4, 2)
    graph = load(BACKEND)().capture(lambda: shares.max(1).values)
    shares.copy_(torch.tensor([[0.1, 0.9]]).expand(4, 2))
    graph.replay()
    kept = graph.outputs[:2]
    shares.copy_(torch.tensor([[0.3, 0.7]]).expand(4, 2))
    graph.replay()
    assert kept.tolist() != pytest.approx([0.9, 0.9])

    runner = captured(ProbabilityInputs, best, debug=True, output_rows=BATCH)
    first = runner({"shares": [[0.1, 0.9], [0.8, 0.2]]})
    cloned = first["topk_p"].clone()
    runner({"shares": [[0.3, 0.7], [0.4, 0.6]]})
    assert cloned.tolist() == pytest.approx([0.9, 0.8])
    with pytest.raises(StaleOutputError, match="of generation 1 and overwritten since"):
        first["topk_p"].sum()


def test_vllm_53520_a_buffer_that_two_graphs_write() -> None:
    """The drafter's padded graph writes its outputs where the logprobs of the prompt still lie."""
    logits = torch.zeros(4, dtype=torch.int64)

    def by_hand(rows: int) -> ByHand:
        return ByHand(lambda views: logits[:rows].copy_(views["ids"] * 7), rows, ids=torch.zeros(4, dtype=torch.int64))

    engines = [by_hand(rows) for rows in (4, 2)]
    prompt, drafted = draw(1, 9, (4,), 3), draw(10, 19, (2,), 4)
    logprobs = engines[0](ids=prompt)
    engines[1](ids=drafted)
    assert not torch.equal(logprobs, prompt * 7)

    class Ids(Inputs):
        ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)

    runner = captured(Ids, lambda view: view.ids * 7, buckets=[2, 4], debug=True)
    logprobs = runner({"ids": prompt})
    kept = logprobs.clone()
    runner({"ids": drafted})  # another bucket's graph
    assert torch.equal(kept, prompt * 7)
    with pytest.raises(StaleOutputError, match="keep a clone"):
        logprobs.tolist()
