"""Decisions: the path of each batch with its reason, what is counted, and one warning for each reason."""

import re
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, copied, side
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import BatchError, CaptureError, ConfigError, ReplayError
from slotgraph.runners.decision import Decision
from tests.runners.models import PlainInputs, assert_right, plain_runner, plain_step, random_batch

PAGES = Axis("PAGES")


class VariedInputs(Inputs):
    """An optional slot, an axis of its own, and a field that graphs were captured with."""

    ids: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=3)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=0)
    extra: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=5, default=None)
    mode: Any = "decode"


def varied_step(view: VariedInputs) -> torch.Tensor:
    """[BATCH] int64."""
    total = view.ids * 100 + view.pages.sum(1)
    return total if view.extra is None else total + 1000 * view.extra


def varied(requests: int, pages: int, seed: int = 1, **more: Any) -> dict[str, Any]:
    """A batch that brings the optional slot."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(1, 50, (requests,), generator=draw),
        "pages": torch.randint(1, 9, (requests, pages), generator=draw, dtype=torch.int32),
        "extra": torch.randint(1, 9, (requests,), generator=draw),
        **more,
    }


def varied_answer(batch: dict[str, Any]) -> torch.Tensor:
    """What the step must give, from the batch alone."""
    extra = batch.get("extra")
    total = [int(i) * 100 + int(row.sum()) for i, row in zip(batch["ids"], batch["pages"], strict=True)]
    return torch.tensor([t + (0 if extra is None else 1000 * int(extra[i])) for i, t in enumerate(total)])


@pytest.fixture(scope="module")
def varied_runner(cpu: str) -> DecodeRunner[VariedInputs]:
    """Captured for 4 and 8 requests of at most 3 pages, at most half padding; bucket 8 cannot be captured."""

    def step(view: VariedInputs) -> torch.Tensor:
        if view.ids.shape[0] == 16:
            message = "no room for 16"
            raise ValueError(message)
        return varied_step(view)

    runner = DecodeRunner(VariedInputs, step, buckets=[4, 8, 16], sizes={PAGES: 3}, backend=cpu, max_waste=0.5)
    with pytest.raises(CaptureError, match=r"bucket 16: .*no room for 16"):
        runner.capture()
    return runner


REASONS: list[Any] = [
    pytest.param(varied(3, 3), ("graph", 4, "fits"), "bucket 4 fits", id="fits"),
    pytest.param(varied(5, 1), ("graph", 8, "fits"), "bucket 8 fits", id="fits, fewer pages"),
    pytest.param(varied(17, 3), ("eager", None, "too_large"), r"17 rows .* the largest bucket, 16", id="too large"),
    pytest.param(
        varied(3, 4), ("eager", None, "too_large"), r"4 rows on PAGES .* more than the 3", id="too many pages"
    ),
    pytest.param(varied(1, 2), ("eager", None, "waste"), r"bucket 4 would be 75% padding, .*50%", id="waste"),
    pytest.param(varied(12, 2), ("eager", None, "not_captured"), r"no room for 16", id="not captured"),
    pytest.param(varied(4, 2, extra=None), ("eager", None, "absent"), "without 'extra'", id="absent"),
    pytest.param(
        varied(4, 2, mode="verify"), ("eager", None, "field_differs"), "is 'verify', not 'decode'", id="field"
    ),
]


@pytest.mark.parametrize(("batch", "wanted", "reason"), REASONS)
def test_reasons(
    varied_runner: DecodeRunner[VariedInputs],
    batch: dict[str, Any],
    wanted: tuple[str, int | None, str],
    reason: str,
) -> None:
    """Each way for a batch to go has its path, its bucket and its reason in a word and a sentence, and is right."""
    decision = varied_runner.decide(batch)
    assert (decision.path, decision.bucket, decision.why) == wanted
    assert re.search(reason, decision.reason)
    if decision.why != "not_captured":  # its step cannot run eagerly either
        padded = varied_runner(batch)
        assert torch.equal(padded, varied_answer(batch))


def test_deciding_changes_nothing(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A decision is no step: it counts nothing, fills nothing and leaves the view that was filled to be replayed."""
    batch = varied(4, 3, seed=5)
    view = varied_runner.fill(batch)
    before = varied_runner.stats()
    for param in REASONS:
        varied_runner.decide(param.values[0])
    assert varied_runner.stats() == before
    assert torch.equal(varied_runner.replay(view), varied_answer(batch))


def test_same_value_goes_through_the_graph(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A field that the batch brings with the captured value, or not at all, goes through the graph."""
    assert varied_runner.decide(varied(3, 3, mode="decode")).path == "graph"
    assert varied_runner.decide(varied(3, 3, mode="DECODE".lower())).path == "graph"
    assert varied_runner.decide(varied(3, 3, mode=None)).path == "graph"


def test_field_that_compares_by_element(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A field whose value in the batch is an array differs from the captured one, and says so."""
    values: list[Any] = [torch.arange(3), np.arange(3), [np.arange(3)], {"rows": torch.arange(3)}]
    decisions = [varied_runner.decide(varied(3, 3, mode=value)) for value in values]
    assert {decision.why for decision in decisions} == {"field_differs"}
    assert decisions[0].reason == "field 'mode' is Tensor, not 'decode', with which graphs were captured"


def test_bad_batch_is_refused_by_decide(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """A batch whose sizes cannot be read has no path: the error is that of a fill."""
    for pages in (3, "345", [1, 2, 3], [], torch.tensor(3), torch.arange(3)):
        with pytest.raises(BatchError, match=r"'pages': expected a size of"):
            varied_runner.decide(varied(3, 3) | {"pages": pages})


def test_sizes_are_read_off_host_data(varied_runner: DecodeRunner[VariedInputs]) -> None:
    """Nested lists and arrays tell their sizes as tensors do."""
    for pages in ([[1, 2], [3, 4], [5, 6]], ((1, 2), (3, 4), (5, 6)), np.arange(6).reshape(3, 2)):
        assert varied_runner.decide(varied(3, 3) | {"pages": pages}) == varied_runner.decide(varied(3, 2))
    wide = [[1, 2, 3, 4]] * 3
    assert varied_runner.decide(varied(3, 3) | {"pages": wide}) == varied_runner.decide(varied(3, 4))


def test_before_capture(cpu: str) -> None:
    """Before capture a runner decides, fills and runs nothing, not even what would run eagerly."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4], backend=cpu)
    assert runner.report is None
    for requests in (3, 30):
        batch = random_batch(requests, seed=1)
        for use in (runner.decide, runner.fill, runner):
            with pytest.raises(ReplayError, match=r"nothing is captured yet: call capture\(\) first"):
                use(batch)
    runner.capture()
    good = random_batch(3, seed=2)
    assert_right(runner(good), good)


def test_patterns_of_absent_slots(cpu: str) -> None:
    """With the pattern captured, a batch without the optional slot goes through its own graph."""
    seen: set[bool] = set()

    def step(view: VariedInputs) -> torch.Tensor:
        seen.add(view.extra is None)
        return varied_step(view)

    runner = DecodeRunner(
        VariedInputs, step, buckets=[4, 8], sizes={PAGES: 3}, backend=cpu, absent=[{"extra"}], output_rows=BATCH
    )
    runner.capture()
    assert seen == {True, False}
    for number, present in enumerate([True, False, False, True, False, True, True]):
        batch = varied(1 + number, 1 + number % 3, seed=number)
        if not present:
            del batch["extra"]
        assert runner.decide(batch).path == "graph"
        assert (runner.fill(batch).extra is None) == (not present)
        assert torch.equal(runner(batch), varied_answer(batch))
    assert runner.stats()["steps"] == {"graph": 7, "eager": 0}


@pytest.mark.parametrize("lowering", LADDER)
def test_stats(cpu: str, lowering: str) -> None:
    """Steps, rows and waste are counted for each bucket, eager runs for each reason, and graphs' fills by lowering."""
    runner = plain_runner(cpu, max_waste=0.7, lowering=lowering)
    assert runner.lowering == lowering
    for requests in (3, 4, 2, 8, 5, 1, 9, 30):
        runner(random_batch(requests, seed=requests))
    stats = dict(runner.stats())
    assert {key: stats[key] for key in ("steps", "buckets", "eager", "lowerings", "detours")} == {
        "steps": {"graph": 5, "eager": 3},
        "buckets": {
            4: {"path": "graph", "steps": 3, "live": 9, "padded": 12, "waste": 0.25},
            8: {"path": "graph", "steps": 2, "live": 13, "padded": 16, "waste": 3 / 16},
        },
        "eager": {"too_large": {"steps": 2, "live": 39}, "waste": {"steps": 1, "live": 1}},
        "lowerings": {lowering: 5},
        "detours": {},
    }


def test_fills_alone_are_counted(cpu: str) -> None:
    """A fill whose step comes later runs the kernel by itself; what the kernel cannot read is put right before it."""
    runner = plain_runner(cpu, lowering="in_graph")
    batch = random_batch(6, seed=1)
    runner(batch)
    runner.replay(runner.fill(batch))
    assert runner.stats()["lowerings"] == {"in_graph": 1, "fused": 1}
    gaps = np.repeat(batch["ids"].numpy(), 2)[::2]
    runner({**batch, "ids": gaps})
    elsewhere = runner.graphs.buffers["ids"].tensor[1:7]
    given = {**batch, "ids": elsewhere.clone()}
    assert_right(runner({**batch, "ids": elsewhere}), given)
    assert runner.stats()["lowerings"] == {"in_graph": 3, "fused": 1}
    assert runner.stats()["detours"] == {}
    with pytest.raises(BatchError):
        runner({**batch, "ids": batch["ids"].float()})
    assert sum(runner.stats()["lowerings"].values()) == 4
    assert runner.stats()["detours"] == {}


def test_one_warning_for_each_reason(cpu: str) -> None:
    """The first fallback for a reason is one warning that names it; later ones are only counted."""
    runner = plain_runner(cpu, max_waste=0.7)
    with capture_logs() as events:
        for requests in (3, 30, 40, 1, 1, 9, 30, 8):
            runner(random_batch(requests, seed=requests))
    warned = [event for event in events if event["event"] == "fallback"]
    assert [(event["why"], event["log_level"]) for event in warned] == [("too_large", "warning"), ("waste", "warning")]
    assert warned[0]["reason"] == "30 rows are more than the largest bucket, 8"
    assert warned[0]["runner"] == "DecodeRunner"


def test_larger_than_the_largest_bucket(cpu: str) -> None:
    """A batch larger than every bucket runs eagerly, says so, is right, and leaves the graphs right too."""
    runner = plain_runner(cpu)
    for requests in (8, 9, 200, 8, 3, 1000, 7):
        batch = random_batch(requests, seed=requests)
        assert runner.decide(batch).path == ("graph" if requests <= 8 else "eager")
        assert_right(runner(batch), batch)


def test_graphs_switched_off(cpu: str) -> None:
    """With graphs off nothing is captured, every batch runs eagerly and is right, and the reason says why."""
    runner = DecodeRunner(PlainInputs, plain_step, buckets=[4, 8], backend=cpu, graphs=False, lazy=True)
    with pytest.raises(ReplayError, match="nothing is captured yet"):
        runner(random_batch(3, seed=1))
    report = runner.capture()
    assert (report.captured, report.failed, report.memory.graphs) == ((), {}, 0)
    for requests in (3, 8, 9):
        batch = random_batch(requests, seed=requests)
        decision = runner.decide(batch)
        assert (decision.path, decision.bucket, decision.why) == ("eager", None, "disabled")
        assert decision.reason == "graphs are switched off, by graphs=False"
        assert_right(runner(batch), batch)
    assert runner.stats()["steps"] == {"graph": 0, "eager": 3}
    assert runner.stats()["eager"] == {"disabled": {"steps": 3, "live": 20}}
    with pytest.raises(ConfigError, match="there is no graph of bucket 4"):
        runner.inputs(4)


class SideInputs(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    hidden: torch.Tensor = copied(TOKENS, 2, dtype=torch.float32, pad=0, source=side("proxy.hidden"))


def test_side_arguments(cpu: str) -> None:
    """What stands beside the batch reaches its slot on both paths, and is missed by name where it is not given."""
    runner = DecodeRunner(SideInputs, lambda view: view.hidden * view.ids[:, None], buckets=[4], backend=cpu)
    runner.capture()
    for requests in (3, 9):
        ids, hidden = torch.randint(1, 9, (requests,)), torch.rand(requests, 2)
        assert torch.equal(runner({"ids": ids}, proxy={"hidden": hidden}), hidden * ids[:, None])
        assert isinstance(runner.decide({"ids": ids}, proxy={"hidden": hidden}), Decision)
        with pytest.raises(BatchError, match=r"slot 'hidden': argument proxy\.hidden is missing"):
            runner({"ids": ids})


class HookedInputs(Inputs):
    """A field whose default is made anew each time."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    hooks: list[int] = attrs.field(factory=list)


def test_a_field_with_a_factory(cpu: str) -> None:
    """It is seen in capture with what the factory makes; a batch with another value runs eagerly, and says so."""
    runner = DecodeRunner(HookedInputs, lambda view: view.ids + sum(view.hooks), buckets=[4], backend=cpu)
    runner.capture()
    ids = torch.tensor([3, 1, 2])
    assert runner.decide({"ids": ids, "hooks": []}).why == "fits"
    assert runner.decide({"ids": ids}).why == "fits"
    other = {"ids": ids, "hooks": [5]}
    assert runner.decide(other).why == "field_differs"
    assert runner(other).tolist() == [8, 6, 7]
