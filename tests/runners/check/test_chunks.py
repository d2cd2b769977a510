"""The check of chunks: a rule that reads what no step writes, rows behind an end, pages that are not reserved."""

import random
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from slotgraph import BATCH, TOKENS, Axis, DecodeRunner, Inputs, check, computed, copied, output, staged
from slotgraph.extend import once
from slotgraph.runners.check.checks import CheckReport
from slotgraph.runners.engine import chunks
from tests.life.test_chunks import WAYS, Game
from tests.packing import backend_of

PAGES, WIDE, PAGE = Axis("PAGES", fixed=True), 4, 4


class Paged(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda made: made)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, then=lambda lens: lens + 1)
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=0, ragged=lambda lens: lens // PAGE + 1)
    done: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, then=lambda made: made % 16 == 3)
    made: torch.Tensor = output(BATCH, dtype=torch.int64)


class Unwritten(Paged):  # by any step: a producer does it between them
    drafts: torch.Tensor = staged(BATCH, dtype=torch.int64, pad=0)
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0, then=lambda drafts: drafts)


class PagesOnce(Paged):  # which a request that is done still has
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=once(0), poison=())


class RowsOfHost(Paged):  # which a request that is done still has
    places: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, placement="host")
    rows: torch.Tensor = computed(lambda places: places + 0, shape=BATCH, dtype=torch.int64, pad=0, poison=())


class TooFew(Paged):  # pages, in the steps in which a page begins
    pages: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int64, pad=0, ragged=lambda lens: -(-lens // PAGE))


def distinct(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Different pages, none of them the one of padded rows."""
    return (torch.randperm(torch.Size(shape).numel(), generator=generator) + 1).view(shape).to(dtype)


VALUES = {"pages": distinct, "places": distinct, "lens": (0, 9)}


def step_of(more: Callable[[Any], object] = id) -> Callable[[Any], torch.Tensor]:
    """A step that writes one value of a request into a cache of pages, and reads all that it has there."""
    cache = torch.rand(WIDE * 4 + 1, PAGE, generator=torch.Generator().manual_seed(0))

    def step(view: Any) -> torch.Tensor:
        page = view.pages.gather(1, (view.lens // PAGE)[:, None])[:, 0]
        cache[page, view.lens % PAGE] = view.ids / 7 + 0.25
        live = torch.arange(WIDE * PAGE) <= view.lens[:, None]
        seen = (cache[view.pages].flatten(1) * live).sum(1)
        more(view)
        made: torch.Tensor = view.made.copy_((seen * 64).long() % 97)
        return made

    return step


def reported(inputs: type[Inputs], step: Any = None, *, only: Any = (), **options: Any) -> CheckReport:
    """What checks say of a runner with graphs of three steps."""
    given: dict[str, Any] = {"chunks": [3], "done": "done", **options}
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs, step or step_of(), sizes={PAGES: WIDE}, buckets=[2, 4], backend="cpu-capture", **given
    )
    runner.capture()
    return check(runner, only=only, values={n: one for n, one in VALUES.items() if n in runner.stage.declaration.slots})


LOWERINGS = pytest.mark.parametrize("lowering", ["foreach", "in_graph"])


@LOWERINGS
def test_a_sound_runner_passes_all_checks(lowering: str) -> None:
    """With requests that end, and pages as needed."""
    report = reported(Paged, lowering=lowering)
    assert (report.findings, report.notes) == ((), ())


@LOWERINGS
def test_a_rule_that_reads_what_no_step_writes_is_found(lowering: str) -> None:
    """A producer would write it between two steps, and nobody does between those of one launch."""
    (finding,) = reported(Unwritten, lowering=lowering).findings
    assert (finding.check, finding.slot) == ("coverage", "drafts")
    assert "slot 'drafts' is not written by the step, and then= of 'ids' reads it" in finding.message
    assert reported(Unwritten, lowering=lowering, chunks=()).ok
    writes = step_of(lambda view: view.drafts.copy_(view.ids + 1))
    assert reported(Unwritten, writes, lowering=lowering).ok


def test_a_rule_that_reads_an_output_that_no_step_writes_is_found() -> None:
    """Such as one that code outside of the step samples."""
    (finding,) = reported(Paged, lambda view: view.ids + view.lens + view.pages[:, 0]).findings
    assert (finding.check, finding.slot) == ("coverage", "made")


@LOWERINGS
def test_a_row_that_is_written_behind_its_end_is_found(lowering: str) -> None:
    """A done request's row keeps what is not reset: pages whose tail is set once. What functions fill is reset."""
    (finding,) = reported(PagesOnce, lowering=lowering).findings
    assert (finding.check, finding.slot) == ("transition", "pages")
    assert "requests that are done go on to write the float32 tensor of shape [17, 4]" in finding.message
    state = torch.ones(32)
    writes = step_of(lambda view: state.index_add_(0, view.rows, torch.ones(len(view.rows))))
    assert reported(RowsOfHost, writes, lowering=lowering, only="transition").ok
    assert reported(PagesOnce, lowering=lowering, only="transition", done=None).ok


@LOWERINGS
def test_a_page_beyond_what_is_reserved_is_found(lowering: str) -> None:
    """By what changes if the rest of each row holds the pad value."""
    (finding,) = reported(TooFew, lowering=lowering).findings
    assert (finding.check, finding.slot) == ("transition", "pages")
    assert "requests need more of slot 'pages' than its ragged= says" in finding.message


def test_a_graph_that_does_something_else_is_found() -> None:
    """Here one that leaves out the rules between its steps."""
    made = chunks._repeated

    def without_rules(step: Any, count: int, bucket: Any, _: Any, last: Any) -> Any:
        return made(step, count, bucket, None, last)

    with mock.patch.object(chunks, "_repeated", without_rules):
        finding = reported(Paged, lowering="foreach", only="transition").findings[0]
    assert re.fullmatch(r"outputs of step \d row \d: one by one .*, in a graph of 3 steps: .*", finding.message)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_declarations_are_not_blamed(seed: int) -> None:
    """Those of the game of chunks, whose steps draw random numbers, too."""
    way = WAYS[2 + seed % 4]
    game = Game.of(random.Random(seed), backend_of(*way), way[1])
    values = {"pages": distinct, "own": distinct, "positions": (0, 20)}
    report = check(game.runner, only=["transition"], random=True, values=values, progress=False)
    assert (report.findings, report.notes) == ((), ())
