"""Pipelines: stages on several ranks compute what one process computes, bit for bit, or those behind a fault raise."""

import itertools
import os
import pathlib
import random
from typing import Any, Final

import attrs
import pytest
import torch
import torch.distributed as dist

from slotgraph import TOKENS, DecodeRunner, EagerRunner, copied
from slotgraph.dataflow.errors import ConfigError
from slotgraph.extend import side
from slotgraph.runners.ranks.pipeline import PipelineStage
from tests.ranks.processes import Processes, raised, ranks
from tests.ranks.staged import ALL, CHOSEN, SIZES, First, Later, Part, batch_of, eager_part, expected, weights
from tests.ranks.stepping import Unreadable, soon
from tests.runners import prefilled
from tests.runners.models import decoder
from tests.runners.prefilled import HIDDEN, VOCAB, Prefill


@attrs.define(eq=False)
class Place:
    """One rank's stage, and its part of the model."""

    part: Part
    stage: PipelineStage

    @classmethod
    def of(cls, rank: int, shards: int = 1, **options: Any) -> "Place":
        """Captured. timeout: of all waits. equal: of ranks that share a stage's layers."""
        size = dist.get_world_size()
        stages, everyone = size // shards, list(range(size))
        given: dict[str, Any] = {"buckets": [2, 4, 8], "backend": "cpu", **options}
        seconds, equal, group = given.pop("timeout", 20.0), given.pop("equal", False), given.pop("group", None)
        stage, shard = divmod(rank, shards)
        within: Any = None
        if shards > 1:
            rows = [dist.new_group(everyone[first : first + shards]) for first in range(0, size, shards)]
            columns: list[Any] = [dist.new_group(everyone[first::shards]) for first in range(shards)]
            within, group = rows[stage], columns[shard]
            given["ranks"] = soon(group=within, timeout=seconds, equal=equal)
        part = Part(stage, stages, shard, shards, within)
        expected(batch_of(1, 1), given["backend"])  # weights are made before a graph is
        runner = decoder(Later if stage else First, part, sizes=SIZES if stage else {}, **given)
        return cls(part, PipelineStage(runner, group, timeout=seconds))

    @property
    def exchanges(self) -> int:
        """How many the ranks of its stage have had."""
        return int(self.stage.runner.stats()["ranks"]["exchanges"])

    def step(self, number: int, rows: int, fault: str = "") -> str:
        """One step, which this rank does wrong in one of several ways: what is raised, or nothing where it is right."""
        batch, outputs = batch_of(rows, number, self.stage.runner.config.width), list[Any]()
        given = {**batch, "positions": batch["positions"].to(torch.complex64)} if fault == "batch" else batch
        beside: dict[str, Any] = {"pp_proxy_tensors": {}} if fault == "argument" else {}
        self.part.fault = fault
        error = raised(lambda: outputs.append(self.stage(given, **beside)))
        self.part.fault = ""
        if error:
            return error
        right = torch.equal(outputs[0].cpu(), expected(batch)) if self.stage.last else outputs == [None]
        return "" if right else "wrong numbers"

    def flush(self) -> str:
        """Whether the next stage is there to receive."""
        return raised(self.stage.flush)

    def agree_ahead(self, number: int, rows: int) -> None:
        """Tell this stage's ranks of the next step."""
        shapes = zip(ALL, (HIDDEN, HIDDEN, CHOSEN), (torch.float64, torch.float64, torch.int32), strict=True)
        proxies = {key: torch.empty(rows, size, dtype=dtype, device="meta") for key, size, dtype in shapes}
        beside: dict[str, Any] = {"pp_proxy_tensors": proxies} if self.part.stage else {}
        self.stage.runner.agree_ahead(batch_of(rows, number), **beside)


def check(stage: PipelineStage, batch: Any) -> None:
    """One step of this rank's stage; on the last, its outputs are the whole model's."""
    outputs = stage(batch)
    assert torch.equal(outputs.cpu(), expected(batch)) if stage.last else outputs is None


OWN: Final = {
    "batch": ("BatchError: slot 'positions'",),
    "argument": ("ConfigError: pp_proxy_tensors is received from the stage before",),
    "raises": ("ReplayError: the step raised ValueError: shard ", "ValueError: shard "),
}
"""What a rank does wrong in a step, and how its error begins, replayed or not."""
NEXT: Final = {
    "keys": "RankError: step {step}: rank {sender} sends 'extra', and no slot of rank {rank} reads it",
    "shape": "BatchError: slot 'pp_hidden_states'",
    "rows": "BatchError: 'input_ids', 'positions'",
    "dtype": "BatchError: slot 'pp_residual'",
}
"""What it sends that is wrong, and how the next stage's error begins."""


@attrs.frozen
class Plan:
    """One step of all ranks. faults: by rank. flushed: whether each waits at once until its proxies are received."""

    number: int
    rows: int
    faults: tuple[str, ...]
    flushed: bool = False
    ahead: bool = False

    def told(self, shards: int, before: "set[int]", *, equal: bool) -> list[tuple[str, ...]]:
        """How the error of each rank may begin, as the rules have it; nothing where the rank has none.

        before: ranks whose steps raised before, which they change to those whose steps raise now.
        """
        found, size, raising = list[tuple[str, ...]](), len(self.faults), set[int]()
        refused = tuple(f"RankError: rank {shard} refused its batch, so that no rank" for shard in range(shards))
        failed = tuple(f"RankError: rank {shard} failed in a step of runner 1" for shard in range(shards))
        for stage in range(size // shards):
            mine = list[tuple[str, ...]]()
            for rank in range(stage * shards, (stage + 1) * shards):
                sender, fault = rank - shards, self.faults[rank]
                given = {"step": self.number + 1, "sender": sender, "rank": rank}
                if stage and found[sender]:
                    mine.append((f"RankError: step {self.number + 1}: rank {sender} has nothing for rank {rank}: ",))
                elif stage and self.faults[sender] in NEXT and (self.rows > 2 or self.faults[sender] != "rows"):
                    mine.append((NEXT[self.faults[sender]].format(**given), *OWN["argument"], *OWN["batch"]))
                else:
                    mine.append(OWN[fault] if fault in ("batch", "argument") else ())
            ranks_here = range(stage * shards, (stage + 1) * shards)
            if any(mine) and not equal:
                mine = [(*own, *refused) for own in mine]
            if 0 < len(before.intersection(ranks_here)) < shards:  # not all of them know that the step failed
                mine = [(*own, *failed) for own in mine]
            late = [OWN["raises"] * (self.faults[rank] == "raises") for rank in ranks_here]
            raising |= {rank for rank, own, other in zip(ranks_here, mine, late, strict=True) if other and not own}
            found += [own or other for own, other in zip(mine, late, strict=True)]
        before.clear()
        before |= raising
        return found


Said = tuple[list[str], int]


def played(rank: int, every: list[Plan], shards: int, options: dict[str, Any], group: Any = None) -> Said:
    """What each step of a plan says, with poisoned slots, and the flush behind the last; exchanges that they took."""
    place, found = Place.of(rank, shards, group=group, **options), list[str]()
    before = place.exchanges
    for plan in every:
        prefilled.poison(place.stage.runner)
        if plan.ahead:
            place.agree_ahead(plan.number, plan.rows)
        found.append(place.step(plan.number, plan.rows, plan.faults[rank]))
        if plan.flushed:
            place.flush()
    return [*found, place.flush()], place.exchanges - before


def steady(size: int) -> list[Plan]:
    """Steps of random rows, of buckets and none, without a fault."""
    draw = random.Random(5)
    return [Plan(number, draw.choice([0, 1, 2, 3, 4, 5, 7, 8, 8, 9, 12]), ("",) * size) for number in range(40)]


@pytest.mark.parametrize(
    ("size", "shards", "options"),
    [
        (2, 1, {}),
        (2, 1, {"backend": "cpu-capture", "lowering": "in_graph"}),
        (2, 1, {"lowering": "slot_by_slot", "lazy": True}),
        (2, 1, {"width": 3, "debug": True}),
        (4, 1, {}),
        (4, 2, {"backend": "cpu-capture"}),
        (4, 2, {"equal": True}),
    ],
    ids=str,
)
def test_stages_compute_the_whole_models_logits(
    two: Processes, four: Processes, size: int, shards: int, options: dict[str, Any]
) -> None:
    """The whole model's logits. Ranks that share a stage exchange sizes once a step, or never."""
    exchanges = 40 if shards > 1 and "equal" not in options else 0
    found = (two if size == 2 else four).run(played, steady(size), shards, options)
    assert found == [([""] * 41, exchanges)] * size


def decodes_on_devices(rank: int, options: dict[str, Any]) -> list[str]:
    """Each rank on a device of its own, and proxies by NCCL."""
    torch.cuda.set_device(rank)
    group: Any = dist.new_group([0, 1], backend="nccl")
    try:
        return played(rank, steady(2), 1, {"backend": "cuda", **options}, group)[0]
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("options", [{}, {"lowering": "foreach"}, {"width": 3}], ids=str)
def test_stages_on_devices_compute_the_whole_models_logits(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    """The same over NCCL, in stream order with the graphs."""
    with ranks(2, tmp_path) as made:
        assert made.run(decodes_on_devices, options) == [[""] * 41] * 2


def overtaken(rank: int) -> None:
    """The first stage's runner runs another step, over its outputs, before the next stage begins to receive them."""
    stage, batch = Place.of(rank, backend="cpu-capture").stage, batch_of(4, 1)
    if rank:
        dist.barrier()
        check(stage, batch)
        return
    check(stage, batch)
    outputs = stage.runner(batch)
    before = {key: one.clone() for key, one in outputs.items()}
    stage.runner(batch_of(4, 2))
    assert all(not torch.equal(before[key], one) for key, one in outputs.items())  # they are overwritten
    dist.barrier()
    stage.flush()


def optional(rank: int, captured: bool) -> None:
    """The first stage sends other keys in each step; absent ones are absent in the next view, by graphs or not."""
    absent = [{"pp_residual", "pp_topk_indices"}, {"pp_topk_indices"}]
    stage = Place.of(rank, absent=absent).stage if rank and captured else PipelineStage(eager_part(rank, 2))
    patterns = itertools.cycle([ALL, ALL[:1], ALL[:2], ALL[::2]])
    for step, keys in zip(range(30), patterns, strict=False):
        check(stage, batch_of(1 + step % 9, step, keys=keys))
    stage.flush()


def alone(rank: int) -> None:
    """Two groups of one rank each, whose stage is first and last."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    stage = PipelineStage(eager_part(0, 1), groups[rank])
    assert (stage.first, stage.last, stage.size) == (True, True, 1)
    check(stage, batch_of(3, rank))
    stage.flush()
    with pytest.raises(ConfigError, match="group: expected a process group that this process is in"):
        PipelineStage(stage.runner, groups[1 - rank])


@pytest.mark.parametrize(("what", "how"), [(overtaken, ()), (optional, (True,)), (optional, (False,)), (alone, ())])
def test_what_is_sent_stays_as_it_was(two: Processes, what: Any, how: tuple[bool, ...]) -> None:
    """What is sent stays as it was, with the keys that it has, and nothing is sent by the only stage."""
    two.run(what, *how)
    check(PipelineStage(eager_part(0, 1)), batch_of(3, 1))  # which needs no group


class LaterPrefill(Prefill):
    """What a later stage of a prefill reads beside."""

    hidden_states: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pipe.hidden_states"))


def runner_of(inputs: type[Any], step: Any = lambda view: view.hidden_states) -> EagerRunner[Any]:
    """A stage's that is not captured."""
    return EagerRunner(inputs, step, backend="cpu")


def lacks(rank: int) -> list[str]:
    """A required key does not come, once."""
    keys = list[str]()

    def step(view: Prefill) -> Any:
        return dict.fromkeys(keys, weights(400, VOCAB, HIDDEN)[view.input_ids])

    runner = runner_of(LaterPrefill) if rank else runner_of(Prefill, step)
    stage, found = PipelineStage(runner, proxies="pipe"), []
    for keys[:] in ([], ["hidden_states"]):
        found.append(raised(stage, prefilled.batch_of([3, 2], 1)) or raised(stage.flush))
    return found


def test_a_missing_key_is_refused(two: Processes) -> None:
    """Is refused by the stage that reads it."""
    sender, (error, after) = two.run(lacks)
    assert sender == ["", ""]
    assert error.startswith("MissingSourceError: slot 'hidden_states': argument pipe.hidden_states is missing")
    assert after == ""


def misdeclared(rank: int, first: type[Prefill], later: type[Prefill]) -> str:
    """The first stage sends hidden states; what a step raises."""
    runner = runner_of(later if rank else first, lambda view: {"hidden_states": view.input_ids})
    stage = PipelineStage(runner, proxies="pipe")
    return raised(stage, prefilled.batch_of([3, 2], 1)) or raised(stage.flush)


def test_slots_that_read_the_wrong_proxies_are_refused(two: Processes) -> None:
    """A first stage is given none, and a stage refuses what none of its slots reads."""
    missing = "MissingSourceError: slot 'hidden_states': argument pipe.hidden_states is missing"
    first, second = two.run(misdeclared, LaterPrefill, LaterPrefill)
    assert first.startswith(missing)
    assert second.startswith(f"RankError: step 1: rank 0 has nothing for rank 1: {missing}")
    unread = "RankError: step 1: rank 0 sends 'hidden_states', and no slot of rank 1 reads it"
    assert two.run(misdeclared, Prefill, Prefill) == ["", unread]


def plans(seed: int, steps: int, size: int, shards: int, *, equal: bool) -> list[Plan]:
    """Random ones, the same for all who draw them: half of them without a fault, some with several."""
    draw = random.Random(seed)

    def faults() -> tuple[str, ...]:
        often, found = draw.choice([0.0, 0.0, 0.3, 0.6]), list[str]()
        for rank in range(size):
            known = [*OWN, *(NEXT if rank < size - shards else ())]
            fault = draw.choice(known) if draw.random() < often else ""
            found.append(found[-1] if equal and rank % shards else fault)  # ranks of a stage do alike
        return tuple(found)

    return [Plan(number, draw.randint(0, 9), faults(), draw.random() < 0.5) for number in range(steps)]


@pytest.mark.parametrize(("shards", "equal"), [(1, True), (2, False), (2, True)])
def test_stages_with_random_faults_never_wait_in_vain(four: Processes, shards: int, equal: bool) -> None:
    """None waits for what does not come, a stage fails together, those behind are told, and the next step is right.

    Of a step that raised on some ranks of a stage the others are told in the next one.
    """
    every, before = plans(3, 200, 4, shards, equal=equal), set[int]()
    found = four.run(played, every, shards, {"equal": equal})
    for plan, *said in zip(every, *(texts[:-1] for texts, _ in found), strict=True):
        for one, wanted in zip(said, plan.told(shards, before, equal=equal), strict=True):
            assert one.startswith(wanted) if wanted else one == "", (plan, said)
    assert 40 < sum(any(plan.faults) for plan in every) < 160


@pytest.mark.parametrize("fault", OWN)
def test_what_was_told_ahead_of_a_lost_step_is_heard(four: Processes, fault: str) -> None:
    """What was told ahead of a step that does not come to be is heard, so that the next step can be told of."""
    faulty = [number % 3 == 1 for number in range(18)]  # in the first stage
    faults = [(fault * now, fault * now, "", "") for now in faulty]
    every = [Plan(number, 1 + number % 9, one, ahead=True) for number, one in enumerate(faults)]
    for found, exchanges in four.run(played, every, 2, {}):
        assert [bool(text) for text in found] == [*faulty, False]
        assert exchanges == 18 + sum(faulty)  # by which both know that both failed


def ends_early(rank: int, how: str) -> str:
    """Rank 0's step ends before its runner begins to agree; rank 1 waits for it in what it does next."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    quiet = how == "ConfigError"
    of_stage = soon(timeout=1.2, equal=quiet)
    given: dict[str, Any] = {"buckets": [4], "backend": "cpu", "progress": False, "ranks": of_stage}
    runner, other = (DecodeRunner(First, lambda view: view.positions * 2, **given) for _ in range(2))
    runner.capture()
    of_stage.capture_timeout = 1.2
    stage = PipelineStage(runner, groups[rank])
    if rank == 1:
        return raised(other.capture) if quiet else raised(stage, batch_of(3, 1))
    try:
        return raised(stage, Unreadable(batch_of(3, 1)), **({"pp_proxy_tensors": {}} if quiet else {}))
    except KeyboardInterrupt:
        return "KeyboardInterrupt: "


@pytest.mark.parametrize("kind", ["ConfigError", "KeyboardInterrupt"])
def test_a_rank_that_asks_nobody_leaves_word(two: Processes, kind: str) -> None:
    """Quiet ranks, and one that was interrupted, exchange nothing: ranks that wait for it are told at once."""
    first, second = two.run(ends_early, kind)
    assert first.startswith(f"{kind}: ")
    assert second.startswith(f"RankError: rank 0 failed in a step of runner 1 (DecodeRunner of First): {kind}: ")


def lost(rank: int, shards: int, where: int, dies: bool) -> list[str]:
    """One rank leaves after the first step, dead or not; what each other says of two steps more."""
    place, said = Place.of(rank, shards, timeout=10.0 if dies else 0.2 if shards == 1 else 2.0), list[str]()
    assert place.step(0, 3) == place.flush() == ""
    dist.barrier()
    if rank == where and dies:
        os._exit(1)
    if rank != where:  # an earlier stage learns of it when it has sent, and sent again
        said = [place.step(1, 3) or place.flush(), place.step(2, 3) or place.flush()]
    if not dies:
        dist.barrier()  # until all have been told
    return said


@pytest.mark.parametrize(
    ("shards", "where", "dies", "wanted"),
    [
        *((1, where, True, dict.fromkeys({0, 1, 2, 3} - {where}, f"rank {where} is gone: its c")) for where in (0, 1)),
        (1, 1, False, dict.fromkeys((0, 2, 3), "rank 1 sent nothing for ")),
        (2, 1, True, {0: "rank 1 did not come", 2: "rank 0 has nothing for rank 2: ", 3: "rank 3: rank 1 is gone"}),
        (2, 2, True, {0: "rank 0: rank 2 is gone", 1: "rank 0: rank 2 is gone", 3: "rank 0 did not come"}),
        (2, 1, False, {0: "rank 1 did not come", 2: "rank 1 did not come", 3: "rank 3: rank 1 sent nothing for "}),
    ],
)
def test_a_lost_rank_is_named_by_those_who_wait_for_it(
    tmp_path: pathlib.Path, shards: int, where: int, wanted: dict[int, str], *, dies: bool
) -> None:
    """None waits for ever: those who wait for it say so first, its stage by its place there; and tell all others."""
    with ranks(4, tmp_path) as made:
        outcomes = made.outcomes(lost, shards, where, dies)
    assert (outcomes[where] is None) == dies
    told = {rank: [] if one is None else one.value or [one.trace] for rank, one in enumerate(outcomes)}
    for rank, text in wanted.items():
        first = next(said for said in told[rank] if said)
        assert first.startswith("RankError: "), told
        assert text in first, told


def out_of_step(rank: int) -> list[str]:
    """The first stage makes a call that the second does not."""
    stage = PipelineStage(eager_part(rank, 2))
    if rank == 0:
        errors = [raised(stage, {}), raised(check, stage, batch_of(3, 1)), raised(stage.flush)]
        stage._steps += 1
        return [*errors, raised(stage, batch_of(3, 2)), raised(stage.flush)]
    return [raised(check, stage, batch_of(3, number)) for number in (1, 1, 2)]


def test_proxies_of_another_step_are_refused(two: Processes) -> None:
    """Steps are counted, whatever became of them; proxies of another step are refused."""
    first, second = two.run(out_of_step)
    apart = "rank 0 is at step 4 of the pipeline, rank 1 at step 3"
    assert first[0].startswith("MissingSourceError: ")
    assert first[1:] == ["", "", "", ""]
    assert second == [f"RankError: step 1: rank 0 has nothing for rank 1: {first[0]}", "", f"RankError: {apart}"]


NO_PROXIES: tuple[tuple[Any, str], ...] = (
    (torch.ones(2, 3), "got something of type Tensor"),
    ({"hidden_states": 5}, "got something of type int under 'hidden_states'"),
    ({f"{'long' * 30}{key}": torch.ones(2) for key in range(90)}, "90 proxies have too many or too long keys"),
)


def refusals(rank: int) -> list[str]:
    """What makes no sense: of the constructor, and steps that return no proxies."""
    runner = eager_part(rank, 2)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (runner, {"proxies": "a b"}, r"proxies: expected the name"),
        (runner, {"timeout": 0}, r"timeout: expected seconds"),
    ]
    for made, options, said in refused:
        with pytest.raises(ConfigError, match=said):
            PipelineStage(made, **options)
    outputs, answers = list[Any](), Part(0, 2)
    if not rank:
        runner = EagerRunner(First, lambda view: outputs[0] if outputs else answers(view), backend="cpu")
    stage, found = PipelineStage(runner), list[str]()
    for wrong, _ in NO_PROXIES:
        outputs[:] = [wrong]
        found.append(raised(stage, batch_of(2, 1)))
    outputs.clear()
    check(stage, batch_of(1, 3))
    stage.flush()
    return found


def test_what_makes_no_sense_is_refused(two: Processes) -> None:
    """By the constructor, where it can be; by the stage that has it, whose followers are told."""
    for (_, message), *said in zip(NO_PROXIES, *two.run(refusals), strict=True):
        assert [message in one for one in said] == [True, True]


def comes_alone(rank: int) -> str:
    """One rank makes its stage, the other does not."""
    return "" if rank else raised(PipelineStage, eager_part(0, 2), timeout=0.1)


def test_a_stage_that_is_not_made_is_told(tmp_path: pathlib.Path) -> None:
    """The stage that waits for it says so."""
    with ranks(2, tmp_path) as made:
        said = made.run(comes_alone)[0]
        assert said == "RankError: rank 0: rank 1 did not come to make its stage of the pipeline"
