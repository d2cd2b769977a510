"""Which runner of another rank a runner belongs to: by its number and by all that steps depend on, or it is refused."""

import time
from typing import Any, Final

import pytest
import torch

from slotgraph import BATCH, Axis, DecodeRunner, EagerRunner, copied
from slotgraph.runners.ranks.group import Ranks
from tests.ranks import stepping
from tests.ranks.processes import Processes, raised
from tests.ranks.stepping import OVER, Counted, runner_on, soon
from tests.runners.steps.counting import batch, count, counting

PAGES: Final = Axis("PAGES")


def crossed(rank: int, over: str, kind: str) -> tuple[list[str], bool]:
    """Rank 0 steps the first of two equal runners, rank 1 the second; then both step both, in one order."""
    made = soon(over)

    def runner_of(factor: int) -> Any:
        if kind == "eager":
            return EagerRunner(Counted, lambda view: view.ids * factor, ranks=made, backend="cpu")
        return runner_on(made, lambda view: view.ids * factor)

    runners = [runner_of(1000), runner_of(2000)]
    one = stepping.batch_of(3, 1)
    ahead = runners[rank].agree_ahead if kind == "ahead" else lambda _: None
    found = []
    for _ in range(2):  # each error leaves the ranks where the next call finds both at its start
        ahead(one)
        found.append(raised(runners[rank], one))
    first, second = (runner(one) for runner in runners)
    return found, torch.equal(first, one["ids"] * 1000) and torch.equal(second, one["ids"] * 2000)


@pytest.mark.parametrize(
    ("over", "kind"), [*((over, "decode") for over in OVER), (OVER[0], "eager"), (OVER[1], "ahead")]
)
def test_two_runners_of_one_class_are_told_apart(two: Processes, over: str, kind: str) -> None:
    """Stepped crosswise they are refused by name on both ranks, and the next step is right."""
    name = "EagerRunner" if kind == "eager" else "DecodeRunner"
    told = (
        f"RankError: ranks do not run the same steps: rank 0 is at a step of runner 1 ({name} of Counted); "
        f"rank 1 is at a step of runner 2 ({name} of Counted)"
    )
    for found, right in two.run(crossed, over, kind):
        assert all(one.startswith(told) for one in found), found
        assert right


def others() -> list[Any]:
    """What a rank may have that runs another version of the program: other weights, and an axis more."""
    name = Counted.__name__
    slots: dict[str, Any] = {"weights": copied(BATCH, 2, dtype=torch.float64, pad=-3)}
    pages: dict[str, Any] = {"pages": copied(PAGES, dtype=torch.int64, pad=0)}
    made = [{**one, "__annotations__": dict.fromkeys(one, torch.Tensor)} for one in (slots, pages)]
    return [type(name, (Counted,), body) for body in made]


class Optional(Counted):
    """With a slot that may be absent."""

    more: torch.Tensor | None = copied(BATCH, dtype=torch.int64, pad=0, default=None)


Wide, Paged = others()

DIFFERENT: Final[dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any], str]]] = {
    "buckets": (Counted, {}, Counted, {"buckets": (2, 4)}, "buckets: 2, 4, 8 on rank 0, but 2, 4 on rank 1"),
    "width": (Counted, {}, Counted, {"width": 2}, "width: 1 on rank 0, but 2 on rank 1"),
    "absent": (
        Optional,
        {},
        Optional,
        {"absent": [{"more"}]},
        "absent=: none on rank 0, but 'more' on rank 1",
    ),
    "slot": (
        Counted,
        {},
        Wide,
        {},
        "slot 'weights': Copied float32 [BATCH] on device on rank 0, but Copied float64 [BATCH, 2] on device on rank 1",
    ),
    "axes": (
        Counted,
        {},
        Paged,
        {"sizes": {PAGES: 9}},
        "axes: BATCH, TOKENS on rank 0, but BATCH, PAGES, TOKENS on rank 1",
    ),
}
"""What rank 0 and rank 1 make their runners of, and what both are told."""


def made_otherwise(rank: int, what: str, over: str, equal: bool) -> tuple[str, float]:
    """What a capture says where rank 1 declares its runner otherwise, and the seconds that it took."""
    first, plain, second, others, _ = DIFFERENT[what]
    made, start = soon(over, equal=equal), time.monotonic()
    inputs, given = (second, others) if rank else (first, plain)
    options: dict[str, Any] = {"buckets": (2, 4, 8), "ranks": made, "backend": "cpu", "progress": False, **given}
    runner = DecodeRunner(inputs, lambda view: view.ids, **options)
    return raised(runner.capture), time.monotonic() - start


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize(("over", "equal"), [(OVER[0], False), (OVER[1], True)])
def test_runners_that_differ_are_refused_before_a_capture(two: Processes, what: str, over: str, equal: bool) -> None:
    """What differs is named, on both ranks, before anything is captured."""
    for told, seconds in two.run(made_otherwise, what, over, equal):
        assert told.startswith("RankError: ranks do not run the same steps: their runners differ: "), told
        assert DIFFERENT[what][-1] in told
        assert seconds < stepping.SOON / 2


def stepped_otherwise(rank: int) -> list[str]:
    """Eager runners, which capture nothing, of other slots."""
    inputs: Any = Wide if rank else Counted
    runner = EagerRunner(inputs, lambda view: view.ids, ranks=soon(), backend="cpu")
    one = stepping.batch_of(3, 1)
    if rank:
        one["weights"] = torch.ones(3, 2, dtype=torch.float64)
    return [raised(runner, one) for _ in range(2)]


def test_eager_runners_that_differ_are_refused_in_each_step(two: Processes) -> None:
    """Are refused at each step."""
    for found in two.run(stepped_otherwise):
        assert all(DIFFERENT["slot"][-1] in one for one in found), found


def ranks_otherwise(rank: int, what: str) -> tuple[str, str]:
    """Ranks that are made with other arguments on rank 1; then with the same."""
    options: dict[str, Any] = {"equal": True, "shards": 2}
    told = raised(soon, **({what: options[what]} if rank else {}))
    return told, raised(lambda: runner_on(soon(), lambda view: view.ids)(stepping.batch_of(3, 1)))


@pytest.mark.parametrize(("what", "values"), [("equal", ("False", "True")), ("shards", ("1", "2"))])
def test_ranks_that_differ_are_refused_when_they_are_made(two: Processes, what: str, values: tuple[str, str]) -> None:
    """Are refused when they are made, with the argument; the next ones can be made."""
    first, second = values
    for told, after in two.run(ranks_otherwise, what):
        wanted = (
            f"RankError: Ranks were made with different arguments: {what}=: {first} on rank 0, but {second} on rank 1"
        )
        assert told.startswith(wanted), told
        assert after == ""


def alone(rank: int) -> tuple[str, float, str]:
    """Rank 0 makes its ranks twice, rank 1 does not; then both do, and step."""
    start, told = time.monotonic(), ""
    if rank == 0:
        told = raised(Ranks, capture_timeout=0.5) + raised(Ranks, capture_timeout=0.5)
    seconds = time.monotonic() - start
    torch.distributed.barrier()
    return told, seconds, raised(lambda: runner_on(soon(), lambda view: view.ids)(stepping.batch_of(3, 1)))


def test_ranks_that_one_rank_makes_end_with_its_name(two: Processes) -> None:
    """End with a RankError that names the other within the time-out, and leave nothing behind."""
    (told, seconds, after), (_, _, other) = two.run(alone)
    named = "RankError: Ranks: rank 1 did not come within 0.5 s: make Ranks on all ranks at once, in the same order"
    assert told == named * 2
    assert seconds < 5
    assert after == other == ""


def loops_crossed(rank: int, how: str) -> tuple[str, list[str]]:
    """The ranks begin steps() of other runners, or rank 1 calls its runner instead of a step; then both step both."""
    made = soon()
    first, second = (counting("cpu", count, ranks=made) for _ in range(2))
    if how == "begin":
        return raised((second if rank else first).steps, batch(1)), [raised(one, batch(4)) for one in (first, second)]
    told, loop = "", first.steps(batch(1, 2), keys=[1, 2])
    if how == "later":
        next(loop)
    if rank == 0:
        told = raised(next, loop)
    return told, [raised(one, batch(4, 5)) for one in (first, second)]


@pytest.mark.parametrize("how", ["begin", "first", "later"])
def test_a_step_of_a_loop_is_no_call_of_its_own(two: Processes, how: str) -> None:
    """A step of a loop is none of another runner's loop, nor a call of its own: it is refused, and all go on."""
    (told, first), (other, second) = two.run(loops_crossed, how)
    assert first == second == ["", ""]
    if how == "begin":
        assert told == other
        for rank in range(2):
            assert f"rank {rank} is at runner {rank + 1} (DecodeRunner of Counting): steps() begin" in told
    else:
        name = "runner 1 (DecodeRunner of Counting)"
        assert told.startswith(f"RankError: rank 1 left its loop of steps() of {name}: a call of the runner ended it")
