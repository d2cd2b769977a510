"""Checks and debug modes of runners with ranks: all run the same steps, and what one rank finds, all are told."""

import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist

import slotgraph
from slotgraph import BATCH, DecodeRunner, computed, copied, keep
from slotgraph.runners.check.checks import CHECKS
from slotgraph.runners.check.transitions import TRANSITION
from slotgraph.runners.debug import debugged
from slotgraph.runners.standard.counts import DP
from tests.ranks import stepping
from tests.ranks.processes import Processes, raised
from tests.ranks.stepping import Counted, runner_on, soon, tokens_of_ranks
from tests.runners import prefilled
from tests.runners.models import ready

MODES: Final = ("generations", "addresses", "poison", "parity")
BACKENDS: Final = ("cpu", "cpu-capture")


class Shared(Counted):
    """Counted among others, with indices that nobody may read in padded rows."""

    lens: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=keep("only live rows are counted"))
    live: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int64)
    rows: torch.Tensor = computed(  # of the ranks before this one, and of all
        lambda ranks: [sum(ranks.live(BATCH)[: ranks.rank]), sum(ranks.live(BATCH))], shape=2, dtype=torch.int64
    )
    global_num_tokens: torch.Tensor = computed(tokens_of_ranks, shape=DP, dtype=torch.int32)


def batch_of(rows: int, seed: int) -> dict[str, Any]:
    """Random, with lengths."""
    draw = torch.Generator().manual_seed(seed + 99)
    return {**stepping.batch_of(rows, seed), "lens": torch.randint(1, 50, (rows,), generator=draw)}


class Model:
    """A step with a cache, a collective before and one after what a fault may do; its fault, on one rank or on all."""

    def __init__(self, fault: str = "", rank: int = 0) -> None:
        self.fault = fault if dist.get_rank() == rank or rank < 0 else ""
        self.cache = torch.zeros(16)
        self.table = torch.arange(100.0)
        self.scale = 2.0

    def __call__(self, view: Shared) -> torch.Tensor:
        """[BATCH, 2]: each row's own, and what all ranks' live rows sum up to."""
        is_live = torch.arange(view.ids.shape[0]) < view.live
        sums = torch.where(is_live, view.weights * view.lens.clamp(0, 99), 0.0).sum()[None]
        if self.fault == "leak":  # of padded rows, to the others
            sums = sums + view.weights.sum()
        dist.all_reduce(sums)
        self.cache[: view.ids.shape[0]] += torch.where(is_live, view.weights, 0.0)
        own = self.table[view.ids % 100] * self.scale + view.rows.sum() + view.global_num_tokens.sum()
        if self.fault == "mean":
            own = own + view.weights.mean()
        if self.fault == "index":
            own = own + self.table[view.lens]
        last = torch.ones(1)
        dist.all_reduce(last)
        return torch.stack([own * last, sums.expand_as(own)], 1)


def runner_of(step: Callable[[Shared], torch.Tensor], backend: str = "cpu", **options: Any) -> DecodeRunner[Shared]:
    """Captured, over the default group."""
    made = soon(**{name: options.pop(name) for name in ("timeout", "equal") if name in options})
    runner: DecodeRunner[Shared] = runner_on(made, step, Shared, sizes={DP: made.size}, backend=backend, **options)
    return runner


def change(model: "Model", fault: str) -> None:
    """Do after the capture what no step of a graph may depend on."""
    if fault == "scale":
        model.scale = 3.0
    if fault == "table":
        model.table = model.table.clone()


def checked(rank: int, backend: str, fault: str, guilty: int, options: dict[str, Any]) -> tuple[Any, int, bool]:
    """The findings by check, slot and message; steps of each check; and whether a step afterwards is right."""
    model = Model(fault, guilty)
    runner = runner_of(model, backend, equal=options.pop("equal", False))
    change(model, model.fault)
    if options.pop("given", False):  # other rows by rank, in the same buckets
        draw = random.Random(rank)
        rows = [draw.randint(bucket // 2 + 1, bucket) for bucket in (8, 4, 8, 2, 4)]
        options["batches"] = [batch_of(count, 17 * rank + seed) for seed, count in enumerate([*rows, 9])]
    before = model.cache.clone()
    report = slotgraph.check(runner, progress=False, rounds=1, values={"lens": (1, 50), "ids": (1, 99)}, **options)
    assert torch.equal(model.cache, before)
    (steps,) = set(report.steps.values())
    assert set(report.steps) == set(options.get("only", CHECKS)) - {TRANSITION}  # nothing advances here
    outputs = runner(batch_of(3, rank))
    return [(one.check, one.slot, one.message) for one in report.findings], steps, bool((outputs[:, 0] > 0).all())


def on_both(two: Processes, backend: str, fault: str = "", guilty: int = 0, **options: Any) -> list[Any]:
    """What both ranks found, whose checks took as many steps and which step as before."""
    found = two.run(checked, backend, fault, guilty, options)
    assert len({steps for _, steps, _ in found}) == 1
    assert all(right for _, _, right in found)
    assert found[0][1] > 0
    return [findings for findings, _, _ in found]


@pytest.mark.parametrize("options", [{}, {"given": True}, {"equal": True}], ids=["drawn", "given", "equal"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sound_step_has_no_finding(two: Processes, backend: str, options: dict[str, Any]) -> None:
    """Every check of a step with collectives and counts of ranks, also with other rows on each rank, finds nothing."""
    assert on_both(two, backend, **options) == [[], []]


def sound(rank: int, kind: str) -> tuple[bool, dict[str, int], str]:
    """A prefill runner, whose requests are as long on all ranks, of other tokens."""
    runner = ready(prefilled.runner_of(kind, prefilled.Model(named=kind == "piecewise"), "cpu", ranks=soon()))

    def make(tokens: int, generator: torch.Generator) -> dict[str, Any]:
        first = int(torch.randint(1, tokens + 1, (), generator=generator))
        return prefilled.batch_of([first, *[tokens - first][: tokens - first]], 3 + rank)

    report = slotgraph.check(runner, make, read_outside=["out_cache_loc"], progress=False)
    return report.ok, dict(report.steps), str(report)


@pytest.mark.parametrize("kind", prefilled.KINDS)
def test_a_sound_prefill_has_no_finding(two: Processes, kind: str) -> None:
    """Runners of which only layers are captured, with breaks between."""
    for ok, steps, text in two.run(sound, kind):
        assert ok, text
        assert steps["poison"] == steps["races"] > 4


def planted(rank: int, mode: str, fault: str, guilty: int) -> list[str]:
    """A bug of one rank alone: what is raised in random steps under a debug mode."""
    model, draw = Model(fault, guilty), random.Random(4)
    runner = runner_of(model, "cpu-capture")
    change(model, model.fault)
    with debugged(runner, mode):
        rows = ([draw.choice([1, 3, 5, 7, 8]) for _ in range(2)][rank] for _ in range(30))
        told = [raised(runner, batch_of(count, seed + 31 * rank)) for seed, count in enumerate(rows)]
    assert bool((runner(batch_of(2, 5))[:, 0] > 0).all())
    return told


TAIL: Final = "when the tail of slot 'weights' held "
FAULTS: Final[list[tuple[str, str, int, dict[str, Any], str | None, str, str, str]]] = [
    ("mean", "poison", 1, {}, "weights", "live row 0 of the output changed, from ", TAIL, TAIL),
    ("leak", "poison", -1, {"given": True}, "weights", "", "the tail of slot 'weights'", ""),
    ("index", "poison", -1, {}, "lens", "the step raised IndexError: index ", "when the tail of slot 'lens' held ", ""),
    (
        "scale",
        "parity",
        1,
        {},
        None,
        "",
        "outputs row 0, at [0, 0]: graph ",
        "the step reads something that is not a slot",
    ),
    ("table", "addresses", 0, {}, None, "", "aten::index reads table, and it is other", "reads table, and it is other"),
]
"""Faults, the check that finds each, the guilty rank or -1 for all, and what is said, last in the debug mode."""


@pytest.mark.parametrize("planned", FAULTS, ids=lambda planned: planned[0])
def test_a_fault_is_named_with_its_slot_and_rank(two: Processes, planned: Any) -> None:
    """Is named with its slot by the rank that has it, or by all that have; another one says which rank found it.

    Padded rows also reach live ones by a collective, where the guilty rank's own buckets are full. A debug mode raises
    what its check finds, on both ranks in the same steps.
    """
    fault, check, guilty, options, slot, begin, told, debugging = planned
    backend = "cpu" if guilty < 0 else "cpu-capture"
    for rank, findings in enumerate(on_both(two, backend, fault, guilty, only=[check], **options)):
        _, where, message = findings[0]
        assert slot in {where, None}
        if guilty in (rank, -1):
            assert message.startswith(begin)
            assert told in message
        else:
            assert message.startswith(f"rank {guilty} found: {begin}")
    if guilty >= 0:
        errors = two.run(planted, check, fault, guilty)
        assert sum(map(bool, errors[guilty])) > 15
        for own, other in zip(errors[guilty], errors[1 - guilty], strict=True):
            assert own == "" or (own.startswith(f"CheckError: debug mode {check}: ") and debugging in own)
            assert other.startswith(f"CheckError: debug mode {check}: rank {guilty} found: ") if own else other == ""


def raises_alone(rank: int, backend: str) -> tuple[list[tuple[str | None, str]], list[str]]:
    """A step without a collective that indexes a table by what nobody may read, on rank 1: checked, and debugged."""
    table = torch.arange(100)

    def step(view: Shared) -> torch.Tensor:
        return view.ids + table[view.lens] if rank == 1 else view.ids * 2

    runner = runner_of(step, backend)
    report = slotgraph.check(runner, only=["poison"], rounds=1, values={"lens": (1, 50)}, progress=False)
    with debugged(runner, "poison"):  # in buckets 4, 8 and 2, of which the last has no tail
        told = [raised(runner, batch_of(rows, rank)) for rows in (3, 5, 2)]
    runner(batch_of(1 + rank, 3))
    return [(one.slot, one.message) for one in report.findings], told


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_raises_on_one_rank_is_told_on_all(two: Processes, backend: str) -> None:
    """Is filled again by all, and goes on: it is told with its slot on that rank, and as its finding on the other."""
    (first, told_first), (second, told_second) = two.run(raises_alone, backend)
    ((slot, message),) = second
    assert slot == "lens"
    assert message.startswith("the step raised IndexError: index ")
    ((slot, told),) = first
    assert slot == "lens"
    assert told.startswith("rank 1 found: the step raised IndexError: index ")
    assert told_first.pop() == told_second.pop() == ""
    assert all("when the tail of slot 'lens' held " in one for one in told_second)
    found = "CheckError: debug mode poison: rank 1 found: the step raised IndexError"
    assert all(one.startswith(found) for one in told_first)


def elsewhere(rank: int) -> list[str]:
    """Rank 0's padded rows reach rank 1's live rows alone: it drops what came of them itself."""

    def step(view: Shared) -> torch.Tensor:
        sums = view.weights.sum()[None].clone()
        dist.all_reduce(sums)
        own = view.ids * 2.0
        return own + sums if rank == 1 else own

    runner = runner_of(step)
    batches = [batch_of(5 if rank == 0 else 8, 7)]
    report = slotgraph.check(runner, batches, only=["poison"], progress=False, read_outside=["lens"])
    return [one.message for one in report.findings]


def test_a_change_on_another_rank_is_told_by_the_one_whose_tail_it_is(two: Processes) -> None:
    """Is told with that rank, by the one whose tail it is."""
    (first,), (second,) = two.run(elsewhere)
    assert first.startswith("on rank 1 live row 0 of the output changed, from ")
    assert "when the tail of slot 'weights' held nan instead of -3.0" in first
    assert second.startswith("rank 0 found: on rank 1 live row 0 of the output changed")


def apart(rank: int, how: str) -> str:
    """The ranks do not check the same; or rank 0 alone looks at its steps, which then have no collectives."""
    runner = runner_of((lambda view: view.ids * 2) if how == "mode" else Model(), debug=how == "mode" and rank == 0)
    if how == "mode":
        if rank == 1:
            runner(batch_of(3, 1))
        return raised(runner, batch_of(3, 2 - rank))
    if how == "step" and rank == 1:
        return raised(runner, batch_of(3, 1))
    given = [batch_of(3 + 2 * rank, 1)] if how == "buckets" else None
    return raised(slotgraph.check, runner, given, only=["poison"], progress=False)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("step", "a step of runner 1 (DecodeRunner of Shared)"),
        ("buckets", "runner 1 (DecodeRunner of Shared): a check of poison, on batches by buckets: 1 for 8; its state"),
        ("mode", "a step of runner 1 (DecodeRunner of Shared)"),
    ],
)
def test_ranks_that_check_something_else_are_told(two: Processes, how: str, told: str) -> None:
    """Each is told where all are, at once."""
    for message in two.run(apart, how):
        at = "a look at a step, of a check or a debug mode; " if how == "mode" else "a check of "
        place = f"rank 0 is at runner 1 (DecodeRunner of Shared): {at}"
        assert message.startswith(f"RankError: ranks do not run the same steps: {place}")
        assert f"rank 1 is at {told}" in message


def raises_eagerly(rank: int) -> tuple[str, bool]:
    """A step that rank 1 cannot run as it is written, once it is captured; then all go on."""
    broken: list[str] = []

    def step(view: Shared) -> torch.Tensor:
        if broken:
            raise ValueError(broken[0])
        return view.ids * 2 + view.rows.sum()

    runner = runner_of(step, "cpu-capture")
    broken += ["lost a page"] if rank == 1 else []
    error = raised(slotgraph.check, runner, progress=False)
    batch = batch_of(3, rank)
    return error, torch.equal(runner(batch) + 0, batch["ids"] * 2 + 6 + 3 * rank)


def test_a_check_that_breaks_off_on_one_rank_is_told_to_the_others(two: Processes) -> None:
    """The others are told at once what it raised, and the next step is right."""
    first, second = two.run(raises_eagerly)
    assert first == ("RankError: the look at what a step changes raised on rank 1: ValueError: lost a page", True)
    assert second == ("ValueError: lost a page", True)


def debugging(rank: int, mode: str, backend: str, steps: int) -> int:
    """Random steps, empty ones and eager ones among them, of which so many are right, and leave a right cache."""
    model, right = Model(), 0
    runner = runner_of(model, backend, debug=mode)
    model.cache.zero_()  # of what captures ran
    draw, cache = random.Random(3), torch.zeros(16)
    for seed in range(steps):
        rows = [draw.choice([0, 1, 2, 3, 5, 7, 8, 9]) for _ in range(2)]
        both = [batch_of(count, seed + 31 * other) for other, count in enumerate(rows)]
        batch = both[rank]
        outputs = runner(batch) + 0
        own = model.table[batch["ids"]] * 2 + sum(rows[:rank]) + 2 * sum(rows)
        total = sum(float((one["weights"] * one["lens"]).sum()) for one in both)
        cache[: rows[rank]] += batch["weights"]
        wanted = torch.stack([own * 2, torch.full_like(own, total)], 1)
        right += torch.allclose(outputs, wanted) and torch.equal(model.cache, cache)
    return right


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_in_debug_modes_give_what_they_give_without(two: Processes, backend: str, mode: str) -> None:
    """Steps give what they give without, whatever each rank brings; no rank waits for one that looks."""
    assert two.run(debugging, mode, backend, 30) == [30, 30]
