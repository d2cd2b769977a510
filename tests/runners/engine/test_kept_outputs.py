"""Outputs that are kept over the next step: overwritten, an error in debug mode, or the caller's own by an option."""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, copied, output
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.errors import ConfigError, StaleOutputError
from tests.runners.kinds import RUNNERS, batch_of, captured, tensors_of
from tests.runners.models import decoder


class Counted(Inputs):  # what a step returns: a tensor of its own, an output slot, and an input
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1, then=lambda ids: ids + 1)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


def counted_step(view: Counted) -> dict[str, Any]:
    """The same numbers in memory of each kind, and two that are no tensor."""
    return {"own": view.ids * 2, "slot": view.made.copy_(view.ids * 2), "input": view.ids, "count": 3, "none": None}


def counted(backend: str, **options: Any) -> DecodeRunner[Counted]:
    """A captured runner."""
    made: DecodeRunner[Counted] = decoder(
        Counted, counted_step, backend=backend, buckets=(2, 4), output_rows=BATCH, **options
    )
    return made


def numbers_of(outputs: dict[str, Any]) -> dict[str, Any]:
    """Plain numbers."""
    return {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in outputs.items()}


def wanted(ids: list[int]) -> dict[str, Any]:
    """What a step gives for these ids."""
    return {"own": [2 * one for one in ids], "slot": [2 * one for one in ids], "input": ids, "count": 3, "none": None}


@pytest.mark.parametrize("lowering", LADDER)
def test_copies_are_the_callers_own(cpu: str, lowering: str) -> None:
    """Every way of running a step gives outputs that last, also a batch that no graph takes."""
    runner = counted(cpu, lowering=lowering, outputs="copy")
    draw, kept = torch.Generator().manual_seed(1), list[tuple[dict[str, Any], list[int]]]()
    for rows in (2, 2, 2, 4, 3, 9, 9, 9, 1, 4, 2):  # nine run eagerly
        ids = torch.randint(1, 99, (rows,), generator=draw)
        kept.append((runner({"ids": ids}), ids.tolist()))
        kept.append((runner.replay(runner.fill({"ids": ids + 1})), (ids + 1).tolist()))
    for outputs, answer in kept:
        assert numbers_of(outputs) == wanted(answer)
    kept[0][0]["own"].zero_()  # nobody else sees that
    assert numbers_of(runner({"ids": [4, 5]})) == wanted([4, 5])


@pytest.mark.parametrize("name", [one for one in RUNNERS if one != "EagerRunner"])
def test_every_runner_that_captures_copies_outputs(name: str) -> None:
    """Each that captures takes the option."""
    runner, plain = captured(name, outputs="copy"), captured(name)
    kept = []
    for seed in range(6):
        batch = batch_of(name, 1 + seed % 4, seed)
        kept.append((runner(batch), tensors_of(plain(batch))))
    for outputs, answers in kept:
        got = [outputs] if isinstance(outputs, torch.Tensor) else tensors_of(outputs)
        assert len(got) == len(answers) > 0
        for one, other in zip(got, answers, strict=True):
            assert torch.equal(one, other)


def test_copies_hold_nothing_of_the_graph(cpu: str) -> None:
    """They do not keep the runner's memory, nor does the runner keep them."""
    runner = counted(cpu, outputs="copy")
    outputs = runner({"ids": [1, 2]})
    assert all(one.untyped_storage().nbytes() == 16 for one in outputs.values() if isinstance(one, torch.Tensor))
    alive = weakref.ref(outputs.pop("own"))
    assert alive() is None


def test_outputs_that_cannot_be_copied_are_refused(cpu: str) -> None:
    """It is refused, and not handed out as it is."""
    runner = decoder(
        Counted,
        lambda view: SimpleNamespace(ids=view.made),
        backend=cpu,
        buckets=(2,),
        output_rows=None,
        outputs="copy",
    )
    with pytest.raises(ConfigError, match="returned SimpleNamespace, which outputs='copy' cannot copy: return tensors"):
        runner({"ids": [1]})


@pytest.mark.parametrize("ahead", [0, 2])
def test_copied_outputs_of_loops_last(cpu: str, ahead: int) -> None:
    """With the option they last for ever; in debug mode a later use is an error; `tokens` reads numbers at once."""
    runner = counted(cpu, outputs="copy")
    kept = []
    for step in runner.steps({"ids": [10, 20]}, ahead=ahead):
        kept.append(step.outputs)
        if step.number == 3 * (ahead + 2):
            break
    assert [numbers_of(one) for one in kept] == [wanted([10 + turn, 20 + turn]) for turn in range(len(kept))]

    careful, stale = counted(cpu, debug=True), list[dict[str, Any]]()
    for step in careful.steps({"ids": [10, 20]}, ahead=ahead, read=lambda outputs: {"own": outputs["own"]}):
        stale.append(step.outputs)
        assert stale[-1]["own"].tolist() == [20 + 2 * step.number, 40 + 2 * step.number]
        if step.number == 2 * (ahead + 2):
            with pytest.raises(StaleOutputError, match="overwritten since"):
                stale[0]["own"].tolist()
            with pytest.raises(StaleOutputError, match="overwritten since"):
                _ = stale[1]["own"][:1] + 1
            break
