"""Ranks where people look: explanations, books, metrics and events say who forced what."""

import json
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

import slotgraph
from slotgraph.reports import html
from slotgraph.runners.engine.statistics import Decision
from slotgraph.runners.explained.declared import mermaid
from slotgraph.runners.explained.explanation import RunnerExplanation
from slotgraph.runners.metrics import exposition
from slotgraph.runners.ranks.group import Ranks
from slotgraph.runners.serial import from_data, to_data
from slotgraph.runners.standard.counts import DP
from tests.ranks import stepping
from tests.ranks.processes import Processes
from tests.ranks.stepping import Gathered, runner_on, soon
from tests.runners.explained.houses import printed

SCHEDULE: Final = ([1, 7], [3, 2], [2, 9], [12, 9], [1, 11], [2, 2])
FORCED: Final = {(1, "fits"): 1, (0, "fits"): 2, (1, "too_large"): 2, (0, "too_large"): 1}


def runner_of_counts(ranks: Ranks) -> Any:
    """A runner whose outputs are the live tokens of each rank."""
    options: dict[str, Any] = {"output_rows": None, "sizes": {DP: ranks.size}}
    return runner_on(ranks, lambda view: view.global_num_tokens.clone(), Gathered, **options)


def shown(rank: int) -> tuple[RunnerExplanation, RunnerExplanation, str, list[Any], int]:
    """Explained before and after some steps; their metrics, events and exchanges."""
    ranks = soon()
    runner = runner_of_counts(ranks)
    before = slotgraph.explain(runner)
    with capture_logs() as events:
        for seed, rows in enumerate(SCHEDULE[:-1]):
            runner(stepping.batch_of(rows[rank], seed))
    exchanges = ranks.exchanges
    after = slotgraph.explain(runner)
    assert ranks.exchanges == exchanges, "to explain asks nobody"
    runner(stepping.batch_of(SCHEDULE[-1][rank], 9))
    return before, after, exposition(mine=runner), list(events), ranks.exchanges


def samples(text: str, name: str) -> dict[tuple[str, ...], float]:
    """The values of one metric by all of its labels but the runner."""
    return {
        tuple(sample.labels[key] for key in sorted(sample.labels) if key != "runner"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_people_see_who_forced_what(two: Processes) -> None:
    """Explanations, tables, pages, metrics and events say what all did last, and who forced what."""
    reason = "rank 1: 11 rows are more than the largest bucket, 8"
    for rank, (before, after, metrics, logged, exchanges) in enumerate(two.run(shown)):
        assert before.agreed is None
        assert not any(before.statistics["ranks"]["forced"].values())
        ranks = after.ranks
        assert ranks is not None
        assert (ranks.rank, ranks.size, ranks.equal, ranks.shards) == (rank, 2, False, 1)
        assert after.agreed == Decision("eager", None, "too_large", reason, rank=1)
        forced = after.statistics["ranks"]["forced"]
        assert forced == {"0": {"fits": 1, "too_large": 1}, "1": {"fits": 1, "too_large": 2}}
        assert from_data(json.loads(json.dumps(to_data(after))), RunnerExplanation) == after
        for text in (printed(after), html(after)):
            assert "global_num_tokens" in text
            assert reason in text
        assert "given_ranks --> slot_" in mermaid(after.declaration)
        counted = samples(metrics, "slotgraph_forced_steps_total")
        assert {key: steps for key, steps in counted.items() if steps} == {
            (str(n), why): s for (n, why), s in FORCED.items()
        }
        assert len(counted) == 2 * 8
        assert samples(metrics, "slotgraph_exchanges_total") == {(): exchanges}
        assert exchanges > len(SCHEDULE)
        events = [event for event in logged if event["event"] == "fallback"]  # one for each rank and reason
        assert [(event["rank"], event["why"], event["reason"]) for event in events] == [
            (1, "too_large", "rank 1: 9 rows are more than the largest bucket, 8"),
            (0, "too_large", "rank 0: 12 rows are more than the largest bucket, 8"),
        ]


def quiet(_: int) -> RunnerExplanation:
    """Of ranks that are known to get the same batches."""
    runner = runner_of_counts(soon(equal=True))
    runner(stepping.batch_of(3, 1))
    assert "slotgraph_forced_steps_total{" not in exposition(quiet=runner)
    explained: RunnerExplanation = slotgraph.explain(runner)
    return explained


def test_quiet_ranks_are_explained(two: Processes) -> None:
    """Ranks that exchange nothing say why; a decision of theirs is everyone's."""
    for one in two.run(quiet):
        assert one.ranks is not None
        assert (one.ranks.equal, one.statistics["ranks"]["quiet"], one.agreed) == (True, True, None)
