"""All entry points x side arguments: what no slot reads is refused, with the nearest that one does read."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slotgraph
from slotgraph import TOKENS, EagerRunner, InputPool, Inputs, PipelineStage, copied, side
from slotgraph.dataflow.errors import BatchError, SlotGraphError
from slotgraph.dataflow.sources import Source
from tests.runners.every_runner import RUNNERS, WIDE, batch_of, captured, make, tensors_of

WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda runner, batch, **beside: runner(batch, **beside),
    "fill": lambda runner, batch, **beside: runner.fill(batch, **beside),
    "decide": lambda runner, batch, **beside: runner.decide(batch, **beside),
    "explain": slotgraph.explain,
    "explain nothing": lambda runner, _, **beside: slotgraph.explain(runner, **beside),
    "agree_ahead": lambda runner, batch, **beside: runner.agree_ahead(batch, **beside),
    "idle": lambda runner, _, **beside: runner.idle(**beside),
    "stage": lambda runner, batch, **beside: PipelineStage(runner)(batch, **beside),
}


@pytest.fixture(scope="module")
def runners() -> dict[str, Any]:
    """One of each, captured."""
    return {name: captured(name) for name in RUNNERS}


@pytest.mark.parametrize("way", WAYS)
@given(name=st.sampled_from([*RUNNERS]), data=st.data())
def test_an_unknown_side_argument_is_refused(way: str, runners: dict[str, Any], name: str, data: st.DataObject) -> None:
    """It is named with the nearest known one; the view that was filled last is still good, and so are later steps."""
    most = 4 if name == "MultiLayerDraftExtendRunner" else 6  # its eager steps cannot have more than its buckets
    runner, requests = runners[name], data.draw(st.integers(1, most))
    batch, seed = batch_of(name, requests, requests), data.draw(st.integers(0, 9))
    meant = data.draw(st.sampled_from(["proxies", "window_lens"]))
    place = data.draw(st.integers(0, len(meant) - 1))
    unknown = meant[:place] + data.draw(st.sampled_from(["", "q", "__"])) + meant[place + 1 :]
    right = tensors_of(runner(batch))
    view = runner.fill(batch)
    other, value = batch_of(name, 2, seed), data.draw(st.sampled_from([None, 8, {"hidden": torch.ones(2, WIDE)}]))
    known = {} if way != "fill" or data.draw(st.booleans()) else {"proxies": None}
    with pytest.raises(BatchError, match=f"no slot reads the side argument '{unknown}': did you mean '{meant}'"):
        WAYS[way](runner, other, **{unknown: value}, **known)
    assert all(map(torch.equal, tensors_of(runner.replay(view)), right))
    with pytest.raises(BatchError, match="'bucket': the side arguments that its slots read are: 'proxies', 'window_l"):
        WAYS[way](runner, other, bucket=8)


@pytest.mark.parametrize("way", WAYS)
def test_known_side_arguments_are_taken(way: str, runners: dict[str, Any]) -> None:
    """Those of slots, of one that the settings switch off, too: engines give all that they have."""
    beside = {"proxies": None, "window_lens": torch.ones(3, dtype=torch.int64)}
    for name in RUNNERS:
        WAYS[way](runners[name], batch_of(name, 3, 5), **beside)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_watched_runner_refuses_as_well(name: str, tmp_path: Path) -> None:
    """Who records a runner's steps records none that was refused for its call."""
    runner = captured(name)
    with slotgraph.record(runner, tmp_path / "steps.safetensors"):
        for way in ("call", "fill", "decide"):
            with pytest.raises(BatchError, match="did you mean 'proxies'"):
                WAYS[way](runner, batch_of(name, 2, 1), proxy=None)
        right = tensors_of(runner(batch_of(name, 2, 1)))
    assert all(map(torch.equal, tensors_of(runner(batch_of(name, 2, 1))), right))


def test_proxies_count() -> None:
    """Beside the right name they are read, with slots that are on and off."""
    for name in ("EagerRunner", "DecodeRunner", "BreakableRunner"):
        runner, batch = captured(name), batch_of(name, 3, 2)
        hidden = torch.randint(1, 9, (3, WIDE)).float()
        expected = batch["tokens"] * 3 + hidden.sum(1).long()
        assert torch.equal(runner(batch, proxies={"hidden": hidden}, window_lens=None), expected)


class Anything(Source):
    """A source of a user's own class, which reads a side argument that only it knows."""

    def read(self, batch: Any, side: Any) -> Any:
        """Whatever is given as `more`."""
        del batch
        return side.get("more")


def test_sources_of_users_may_read_anything() -> None:
    """Where a source does not tell what it reads, nothing is known to be unknown."""

    class More(Inputs):
        tokens: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, source=Anything())
        hidden: torch.Tensor | None = copied(TOKENS, dtype=torch.int64, pad=0, source=side("extra"), default=None)

    runner = EagerRunner(More, lambda view: view.tokens * 2, backend="cpu")
    assert runner({}, more=torch.tensor([3, 4]), something=1).tolist() == [6, 8]


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_there_is_one_of_cannot_be_copied(copied_by: Callable[[Any], Any], runners: dict[str, Any]) -> None:
    """A copy of a runner would share its buffers; inside of a container, too. The runner is as it was."""
    alone = make("EagerRunner")
    for one in (*runners.values(), alone, InputPool("a", "b"), PipelineStage(alone)):
        with pytest.raises(SlotGraphError, match=f"a {type(one).__name__} cannot be copied or pickled"):
            copied_by(one)
        if copied_by is not copy.copy:
            with pytest.raises(SlotGraphError, match="cannot be copied or pickled"):
                copied_by({"runner": [one]})
    batch = batch_of("DecodeRunner", 3, 4)
    assert torch.equal(runners["DecodeRunner"](batch), batch["tokens"] * 3)
