"""Pipelines: stages on several ranks compute what one process computes, bit for bit, or those behind a fault raise."""

import functools
import itertools
import os
import pathlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slotgraph import TOKENS, DecodeRunner, EagerRunner, copied
from slotgraph.dataflow.admission import is_in_place
from slotgraph.dataflow.errors import ConfigError
from slotgraph.dataflow.sources import Side
from slotgraph.extend import side
from slotgraph.runners.hooks import Watcher
from slotgraph.runners.ranks.pipeline import PipelineStage, proxies_of
from tests.ranks.processes import Processes, raised, ranks
from tests.ranks.staged import ALL, CHANGES, SIZES, First, Later, Part, batch_of, eager_part, expected, weights
from tests.runners import prefilled
from tests.runners.prefilled import HIDDEN, VOCAB, Prefill

POISON = 77


def part_of(rank: int, size: int, **options: Any) -> DecodeRunner[Any]:
    """A stage, captured unless its memory is that of a pool."""
    given: dict[str, Any] = {"buckets": [2, 4, 8], "backend": "cpu", "progress": False, **options}
    expected(batch_of(1, 1), given["backend"])  # weights are made before a graph is
    runner: DecodeRunner[Any] = DecodeRunner(
        Later if rank else First, Part(rank, size), sizes=SIZES if rank else {}, **given
    )
    if "phase" not in options:
        runner.capture()
    return runner


def poison(runner: Any) -> None:
    """Write what no step may depend on over all slots, as something that the runner is told of."""
    for buffer in runner.graphs.buffers:
        buffer.tensor.fill_(1 if buffer.tensor.dtype == torch.bool else POISON)
    runner.graphs.buffers.distrust()


def check(stage: PipelineStage, batch: Any, answer: torch.Tensor | None = None) -> None:
    """One step of this rank's stage; on the last, its outputs are the whole model's."""
    outputs = stage(batch)
    right = torch.equal(outputs.cpu(), expected(batch) if answer is None else answer) if stage.last else outputs is None
    assert right


class Seen(Watcher):
    """Remembers which proxies of the last step came from their own slots, by key."""

    def __init__(self, runner: Any, argument: str = "pp_proxy_tensors") -> None:
        self.slots = {key: want.name for key, want in proxies_of(runner.stage, argument)}
        self.runner, self.argument = runner, argument
        self.in_place: dict[str, bool] = {}
        runner.watch.add(self)

    def before_fill(self, batch: Any, side: Side) -> None:
        del batch
        proxies, buffers = side[self.argument], self.runner.graphs.buffers
        self.in_place = {key: is_in_place(one, buffers[self.slots[key]]) for key, one in proxies.items()}


def decodes(rank: int, options: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Random steps, of buckets and none."""
    runner = part_of(rank, dist.get_world_size(), **options)
    stage, draw = PipelineStage(runner, group), random.Random(5)  # noqa: S311 - steps, not keys
    seen, there = Seen(runner) if rank else None, 0
    for step in range(40):
        requests = draw.choice([1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 0])
        poison(runner)
        check(stage, batch_of(requests, step, runner.config.width))
        if seen is not None and 0 < requests <= 8:
            assert seen.in_place == dict.fromkeys(ALL, True)
            there += 1
    assert there > 20 or rank == 0
    poison(runner)
    check(stage, batch_of(1, 3, runner.config.width))
    if rank and runner.config.width == 1:
        tails = {name: one[1:] for name, one in vars(runner.inputs(2)).items() if name[:3] in ("pp_", "pos")}
        found = {name: one.double().flatten().unique().tolist() for name, one in tails.items()}
        assert found == {"positions": [0]} | {f"pp_{key}": [0] for key in ALL}
    stage.flush()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"backend": "cpu-capture"},
        {"backend": "cpu-capture", "lowering": "in_graph"},
        {"lowering": "slot_by_slot", "lazy": True},
        {"width": 3, "debug": True},
    ],
    ids=str,
)
def test_decode(two: Processes, options: dict[str, Any]) -> None:
    """Steps with buckets, poisoned slots and steps that no bucket takes: the whole model's logits; proxies in place."""
    two.run(decodes, options)


def test_four_stages(four: Processes) -> None:
    """Stages in the middle receive and send."""
    four.run(decodes, {})


def decodes_on_devices(rank: int, options: dict[str, Any]) -> None:
    """Each rank on a device of its own, and proxies by NCCL."""
    torch.cuda.set_device(rank)
    group: Any = dist.new_group([0, 1], backend="nccl")
    try:
        decodes(rank, {"backend": "cuda", **options}, group)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("options", [{}, {"lowering": "foreach"}, {"width": 3}], ids=str)
def test_decode_on_devices(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    """The same over NCCL: received in the slots, and in stream order with the graphs."""
    with ranks(2, tmp_path) as made:
        made.run(decodes_on_devices, options)


def overtaken(rank: int) -> None:
    """The first stage's runner runs another step before the next stage begins to receive."""
    runner = part_of(rank, 2, backend="cpu-capture")
    stage, batch = PipelineStage(runner), batch_of(4, 1)
    if rank:
        dist.barrier()
        check(stage, batch)
        return
    check(stage, batch)
    outputs = runner(batch)
    before = {key: one.clone() for key, one in outputs.items()}
    runner(batch_of(4, 2))
    assert all(not torch.equal(before[key], one) for key, one in outputs.items())  # they are overwritten
    dist.barrier()
    stage.flush()


def test_what_is_sent_stays_as_it_was(two: Processes) -> None:
    """Outputs are overwritten by the next replay, but not what of them is under way."""
    two.run(overtaken)


def optional(rank: int, *, captured: bool) -> None:
    """The first stage runs eagerly, and sends other keys in each step."""
    absent = [{"pp_residual", "pp_topk_indices"}, {"pp_topk_indices"}]
    runner: Any = part_of(rank, 2, absent=absent) if rank and captured else eager_part(rank, 2)
    stage, seen = PipelineStage(runner), Seen(runner) if rank and captured else None
    patterns = itertools.cycle([ALL, ALL[:1], ALL[:2], ALL[::2]])
    for step, keys in zip(range(30), patterns, strict=False):
        check(stage, batch_of(1 + step % 9, step, keys=keys))
        if seen is not None:
            fits = step % 9 < 8 and keys != ALL[::2]  # of which pattern there is no graph
            assert seen.in_place == dict.fromkeys(keys, fits)
    stage.flush()


@pytest.mark.parametrize("captured", [True, False])
def test_optional_keys(two: Processes, captured: bool) -> None:  # noqa: FBT001 - a parameter
    """Absent ones are absent in the view, never the last step's; a pattern without a graph runs eagerly."""
    two.run(functools.partial(optional, captured=captured))


def alone(rank: int) -> None:
    """Two groups of one rank each."""
    groups: list[Any] = [dist.new_group([place]) for place in range(2)]
    stage = PipelineStage(part_of(0, 1), groups[rank])
    assert (stage.first, stage.last, stage.size) == (True, True, 1)
    check(stage, batch_of(3, rank))
    stage.flush()
    with pytest.raises(ConfigError, match="group: expected a process group that this process is in"):
        PipelineStage(stage.runner, groups[1 - rank])


def test_one_stage(two: Processes) -> None:
    """It is first and last, and needs no group."""
    two.run(alone)
    check(PipelineStage(eager_part(0, 1)), batch_of(3, 1))


class LaterPrefill(Prefill):
    """What a later stage of a prefill reads beside."""

    hidden_states: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pipe.hidden_states"))


def mismatched(rank: int) -> list[str]:
    """In every second step the first stage sends what the second does not expect; errors of each."""
    part = Part(0, 2)
    stage = PipelineStage(part_of(1, 2) if rank else eager_part(0, 2, part))
    found = []
    for number, fault in enumerate(itertools.chain.from_iterable((change, "") for change in CHANGES)):
        part.fault = fault
        found.append(raised(check, stage, batch_of(3, number)) or raised(stage.flush))
    return found


def test_other_proxies_are_refused(two: Processes) -> None:
    """With what was sent and what the slot expects; the steps after go on."""
    sender, receiver = two.run(mismatched)
    assert sender == ["" for _ in range(2 * len(CHANGES))]
    assert receiver[1::2] == [""] * len(CHANGES)
    faults = {
        "keys": "'extra' is read by no slot",
        "shape": "'hidden_states' is not what slot 'pp_hidden_states' expects, float64 [3, 16] on cpu",
        "rows": "'topk_indices' is not what slot 'pp_topk_indices' expects, int32 [3, 3] on cpu",
        "dtype": "'residual' is not what slot 'pp_residual' expects, float64 [3, 16] on cpu",
    }
    for number, change in enumerate(CHANGES):
        assert receiver[2 * number].startswith(f"RankError: step {2 * number + 1}: rank 0 sends ")
        assert faults[change] in receiver[2 * number]


def lacks(rank: int) -> list[str]:
    """A required key does not come, once; nor are the batches of both the same, once."""
    keys = list[str]()

    def step(view: Prefill) -> Any:
        return dict.fromkeys(keys, weights(400, VOCAB, HIDDEN)[view.input_ids])

    runner: Any = (
        EagerRunner(LaterPrefill, lambda view: view.hidden_states, backend="cpu")
        if rank
        else EagerRunner(Prefill, step, backend="cpu")
    )
    stage, found = PipelineStage(runner, proxies="pipe"), []
    for number in range(3):
        keys[:] = ["hidden_states"] if number else []
        batch = prefilled.batch_of([3, 2 + rank * (number == 1)], number)
        found.append(raised(stage, batch) or raised(stage.flush))
    return found


def test_a_missing_key_and_another_batch(two: Processes) -> None:
    """Are refused by the stage that reads them."""
    sender, receiver = two.run(lacks)
    assert sender == ["", "", ""]
    assert "rank 0 sends nothing; rank 1 refuses it: 'hidden_states' is missing" in receiver[0]
    assert receiver[1].startswith("BatchError: slot 'hidden_states': expected a size of 6 on dim 0")
    assert receiver[2] == ""


def storm(rank: int) -> list[str]:
    """Forty steps, in each of which one stage, or none, fails in one of three ways; whose error each was."""
    size, draw, found = dist.get_world_size(), random.Random(8), list[str]()  # noqa: S311 - as above
    part, key = Part(rank, size), f"odd{rank}"

    def step(view: Any) -> Any:
        outputs = part(view)
        return {**outputs, key: torch.ones(2)} if part.fault == "key" else outputs

    stage = PipelineStage(eager_part(rank, size, step))
    for number in range(40):
        where, how = draw.randrange(size), draw.choice(["", "raises", "batch", "key"])
        how = "" if how == "key" and where == size - 1 else how
        batch, part.fault = batch_of(draw.randint(0, 9), number), how if rank == where else ""
        given = {**batch, "positions": f"of rank {rank}"} if part.fault == "batch" else batch
        error = raised(check, stage, given) or raised(stage.flush)
        marks = {
            "": "",
            "raises": f"stage {where} lost",
            "batch": "slot 'positions'",
            "key": f"'odd{where}' is read by no",
        }
        first = where + (how == "key")  # who meets the fault
        right = marks[how] in error and bool(error) == bool(how) if rank >= first else not error
        if rank > first and how:
            right &= error.startswith(f"RankError: step {number + 1}: rank {rank - 1} has nothing for rank {rank}: ")
        found.append(how if right else f"{how} of {where}: {error}")
    return found


def test_random_failures(four: Processes) -> None:
    """Nobody waits for what does not come; those behind a failure are told of it, and the next step is as any."""
    found = four.run(storm)
    assert found == [found[0]] * 4
    assert set(found[0]) == {"", "raises", "batch", "key"}


def lost(rank: int, where: int, *, dies: bool) -> list[str]:
    """One rank leaves after the first step, dead or not; what the others say of two steps more."""
    stage = PipelineStage(eager_part(rank, dist.get_world_size()))
    check(stage, batch_of(3, 1))
    stage.flush()
    dist.barrier()
    for end in (stage._before, stage._after):
        if end is not None and not dies:
            end.patience = 0.2 + 2 * rank  # from now on
    if rank == where:
        if dies:
            os._exit(1)
        return []
    return [raised(stage, batch_of(3, number)) or raised(stage.flush) for number in range(2)]


@pytest.mark.parametrize(("where", "dies"), [(0, True), (1, True), (0, False), (1, False)])
def test_a_lost_rank_is_named(tmp_path: pathlib.Path, where: int, dies: bool) -> None:  # noqa: FBT001 - a parameter
    """At once where it is dead, after the timeout where it stalls; by both neighbours, and by all behind them."""
    with ranks(4, tmp_path) as made:
        outcomes = made.outcomes(functools.partial(lost, dies=dies), where)
    how = "is gone: its connection was lost" if dies else "said nothing for "
    for rank, one in enumerate(outcomes):
        assert (one is None) == (rank == where and dies)
        if one is not None and rank != where:
            assert one.kind is None, one.trace
            assert [f"rank {where} {how}" in message for message in one.value] == [True, True], one.value


def out_of_step(rank: int) -> list[str]:
    """The first stage makes a call that the second does not."""
    stage = PipelineStage(eager_part(rank, 2))
    if rank == 0:
        errors = [raised(stage, {}), raised(check, stage, batch_of(3, 1)), raised(stage.flush)]
        stage._steps += 1
        return [*errors, raised(stage, batch_of(3, 2)), raised(stage.flush)]
    return [raised(check, stage, batch_of(3, number)) for number in (1, 1, 2)]


def test_stages_out_of_step(two: Processes) -> None:
    """Steps are counted, whatever became of them; proxies of another step are refused."""
    first, second = two.run(out_of_step)
    apart = "rank 0 is at step 4 of the pipeline, rank 1 at step 3"
    assert first[0].startswith("MissingSourceError: ")
    assert first[1:] == ["", "", "", ""]
    assert second == [f"RankError: step 1: rank 0 has nothing for rank 1: {first[0]}", "", f"RankError: {apart}"]


class Whole(First):
    """A slot that takes all of the argument."""

    hidden: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pp_proxy_tensors"))


NO_PROXIES: tuple[tuple[Any, str], ...] = (
    (torch.ones(2, 3), "got something of type Tensor"),
    ({"hidden_states": 5}, "got something of type int under 'hidden_states'"),
    ({f"{'long' * 30}{key}": torch.ones(2) for key in range(90)}, "90 proxies have too many or too long keys"),
)


def refusals(rank: int) -> list[str]:
    """What makes no sense: of the constructor, proxies that are given to a call, and steps that return none."""
    runner, later = eager_part(rank, 2), EagerRunner(LaterPrefill, print, backend="cpu")
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (runner, {"proxies": "a b"}, r"proxies: expected the name"),
        (runner, {"timeout": 0}, r"timeout: expected seconds"),
        (EagerRunner(Whole, print, backend="cpu"), {}, "slot 'hidden' reads argument pp_proxy_tensors: proxies are"),
        (eager_part(0, 2), {}, "stage 1 of 2 has no slot that reads pp_proxy_tensors")
        if rank
        else (later, {"proxies": "pipe"}, "its slots require 'hidden_states' of pipe"),
    ]
    for made, options, said in refused:
        with pytest.raises(ConfigError, match=said):
            PipelineStage(made, **options)
    outputs, answers = list[Any](), Part(0, 2)
    if not rank:
        runner = EagerRunner(First, lambda view: outputs[0] if outputs else answers(view), backend="cpu")
    stage, given = PipelineStage(runner), {"pp_proxy_tensors": {"hidden_states": torch.ones(1, HIDDEN)}}
    found = [
        raised(stage, batch_of(1, number), **(given if rank == number else {})) or raised(stage.flush)
        for number in range(2)
    ]
    for wrong, _ in NO_PROXIES:
        outputs[:] = [wrong]
        found.append(raised(stage, batch_of(2, 1)))
    outputs.clear()
    check(stage, batch_of(1, 3))
    stage.flush()
    return found


def test_what_makes_no_sense_is_refused(two: Processes) -> None:
    """By the constructor, where it can be; by the stage that has it, whose followers are told."""
    first, second = two.run(refusals)
    given = "ConfigError: pp_proxy_tensors is received from the stage before: do not give it"
    assert first[:2] == [given, ""]
    assert second[:2] == [f"RankError: step 1: rank 0 has nothing for rank 1: {given}", given]
    for (_, message), *said in zip(NO_PROXIES, first[2:], second[2:], strict=True):
        assert [message in one for one in said] == [True, True]
    with pytest.raises(ConfigError, match=r"the first stage receives nothing, but its slots require 'hidden_s"):
        PipelineStage(EagerRunner(LaterPrefill, print, backend="cpu"), proxies="pipe")


def comes_alone(rank: int) -> str:
    """One rank makes its stage, the other does not."""
    return "" if rank else raised(PipelineStage, eager_part(0, 2), timeout=0.1)


def test_a_stage_that_is_not_made(tmp_path: pathlib.Path) -> None:
    """Whoever waits for it says so."""
    with ranks(2, tmp_path) as made:
        said = made.run(comes_alone)[0]
        assert said == "RankError: rank 0: rank 1 did not come to make its stage of the pipeline"
