"""Pipelines: what stages on several ranks compute is what one process computes, bit for bit, or an error on both sides.

All numbers of the models are whole and below a prime, in float64: no order of additions changes a bit.
"""

import functools
import itertools
import os
import pathlib
import random
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import nn

from slotgraph import (
    BATCH,
    TOKENS,
    BreakableRunner,
    DecodeRunner,
    EagerRunner,
    InputPool,
    Inputs,
    PrefillRunner,
    copied,
    side,
)
from slotgraph import standard as std
from slotgraph.dataflow.admission import is_in_place
from slotgraph.dataflow.errors import BatchError, ConfigError, RankError, ReplayError
from slotgraph.dataflow.sources import Side
from slotgraph.runners.ranks.pipeline import PipelineStage
from slotgraph.runners.ranks.proxies import Proxies, flattened
from slotgraph.runners.watching import Watcher
from tests.ranks.processes import Outcome, Processes, ranks
from tests.runners import prefilled
from tests.runners.prefilled import HIDDEN, PRIME, SPLIT, VOCAB, Layers, Prefill

ROOM = 64
CHOSEN = 3
LAYERS = 4
ALL = ("hidden_states", "residual", "topk_indices")
SIZES = {std.HIDDEN: HIDDEN, std.INDEX_TOPK: CHOSEN}
POISON = 77


class Tokens(Inputs):
    """What each stage of a decode step reads."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)


class First(Tokens):
    """What the first one reads. keys: of what its outputs have."""

    keys: Any = ALL


@std.model_dtype(torch.float64)
class Later(Tokens, std.PipelineProxies, std.PipelineIndices):
    """What a later stage reads beside."""


@functools.cache
def weights(place: int, *shape: int, device: torch.device | None = None) -> torch.Tensor:
    """Whole numbers, the same in each process."""
    return prefilled.whole(*shape, generator=torch.Generator().manual_seed(place)).data.to(device)


Flow = dict[str, torch.Tensor | None]


def layer(place: int, view: Tokens, flow: Flow) -> Flow:
    """One layer: it mixes in positions and lengths, and what the residual and the indices of the layer before say."""
    hidden, residual, chosen = (flow[key] for key in ALL)
    assert hidden is not None
    width = len(view.input_ids) // max(len(view.seq_lens), 1) or 1
    lengths = view.seq_lens.repeat_interleave(width).double()[:, None]
    mixed = hidden + weights(100 + place, ROOM, HIDDEN, device=hidden.device)[view.positions] * lengths
    if residual is not None:
        mixed = mixed + residual * 3
    if chosen is not None:
        mixed = mixed + hidden.gather(1, chosen.long() % HIDDEN).sum(1, keepdim=True)
    out = torch.remainder(mixed @ weights(place, HIDDEN, HIDDEN, device=hidden.device), PRIME)
    left = None if residual is None else torch.remainder(residual + hidden, PRIME)
    again = None if chosen is None else torch.remainder(out[:, :CHOSEN], HIDDEN).int() + 1
    return {"hidden_states": out, "residual": left, "topk_indices": again}


def begin(view: First) -> Flow:
    """Embeddings; with a residual and indices, where the keys ask for them."""
    ids = view.input_ids
    hidden = weights(200, VOCAB, HIDDEN, device=ids.device)[ids]
    residual = hidden.flip(1) + 1 if "residual" in view.keys else None
    chosen = ids[:, None].int().repeat(1, CHOSEN) + 1 if "topk_indices" in view.keys else None
    return {"hidden_states": hidden, "residual": residual, "topk_indices": chosen}


def end(flow: Flow) -> torch.Tensor:
    """Logits."""
    hidden = flow["hidden_states"]
    assert hidden is not None
    return hidden @ weights(300, HIDDEN, VOCAB, device=hidden.device)


def whole(view: First) -> torch.Tensor:
    """The model in one process."""
    return end(functools.reduce(lambda flow, place: layer(place, view, flow), range(LAYERS), begin(view)))


@attrs.frozen(eq=False)
class Part:
    """The layers of one stage."""

    rank: int
    size: int

    def __call__(self, view: Any) -> Any:
        """Proxies, or logits of the last."""
        flow = begin(view) if self.rank == 0 else {key: getattr(view, f"pp_{key}") for key in ALL}
        each = LAYERS // self.size
        for place in range(self.rank * each, (self.rank + 1) * each):
            flow = layer(place, view, flow)
        return end(flow) if self.rank == self.size - 1 else flow


def batch_of(requests: int, seed: int, width: int = 1, keys: tuple[str, ...] = ALL) -> dict[str, Any]:
    """Random tokens, never 0."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(1, VOCAB, (requests * width,), generator=draw),
        "positions": torch.randint(1, ROOM, (requests * width,), generator=draw),
        "seq_lens": torch.randint(1, 9, (requests,), generator=draw, dtype=torch.int32),
        "keys": keys,
    }


def part_of(rank: int, size: int, **options: Any) -> DecodeRunner[Any]:
    """A stage, captured unless its memory is that of a pool."""
    inputs: type[Tokens] = Later if rank else First
    given: dict[str, Any] = {"buckets": [2, 4, 8], "backend": "cpu", **options}
    expected(batch_of(1, 1), given["backend"])  # weights are made before a graph is
    runner: DecodeRunner[Any] = DecodeRunner(
        inputs, Part(rank, size), sizes=SIZES if rank else {}, progress=False, **given
    )
    if "phase" not in options:
        runner.capture()
    return runner


def eager_part(rank: int, size: int) -> EagerRunner[Any]:
    """One that is not."""
    return EagerRunner(Later if rank else First, Part(rank, size), sizes=SIZES if rank else {}, backend="cpu")


def expected(batch: Mapping[str, Any], backend: str = "cpu") -> torch.Tensor:
    """Of the whole model."""
    out: torch.Tensor = EagerRunner(First, whole, backend=backend)(batch)
    return out.cpu()


def poison(runner: Any) -> None:
    """Write what no step may depend on over all slots, as something that the runner is told of."""
    buffers = runner.graphs.buffers
    for buffer in buffers:
        buffer.tensor.fill_(1 if buffer.tensor.dtype == torch.bool else POISON)
    buffers.distrust()


def check(stage: PipelineStage, batch: Mapping[str, Any]) -> None:
    """One step of this rank's stage; on the last, its outputs are the whole model's."""
    outputs = stage(batch)
    if stage.last:
        assert torch.equal(outputs.cpu(), expected(batch))
    else:
        assert outputs is None


class Seen(Watcher):
    """Remembers which proxies of the last step came from their own slots, by key."""

    def __init__(self, runner: Any, argument: str = "pp_proxy_tensors") -> None:
        self.slots = {key: want.name for key, want in Proxies(runner, argument).wanted}
        self.runner, self.argument = runner, argument
        self.in_place: dict[str, bool] = {}
        runner.watch.add(self)

    def before_fill(self, batch: Any, side: Side) -> None:
        del batch
        proxies, buffers = flattened(side[self.argument]), self.runner.graphs.buffers
        self.in_place = {key: is_in_place(one, buffers[self.slots[key]]) for key, one in proxies.items()}


def decodes(rank: int, options: dict[str, Any], group: dist.ProcessGroup | None = None) -> int:
    """Random steps, of buckets and none; steps whose proxies were in place."""
    runner = part_of(rank, dist.get_world_size(), **options)
    width = runner.config.width
    stage, draw, there = PipelineStage(runner, group), random.Random(5), 0  # noqa: S311 - steps, not keys
    seen = Seen(runner) if rank else None
    for step in range(40):
        requests = draw.choice([1, 2, 3, 4, 5, 7, 8, 8, 9, 12, 0])
        poison(runner)
        batch = batch_of(requests, step, width)
        check(stage, batch)
        if seen is not None and 0 < requests <= 8:
            assert seen.in_place == dict.fromkeys(ALL, True)
            assert runner.decide(batch, pp_proxy_tensors=dict.fromkeys(ALL, torch.ones(1))).bucket is not None
            there += 1
    stage.flush()
    return there


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
    first, last = two.run(decodes, options)
    assert first == 0
    assert last > 20


def test_four_stages(four: Processes) -> None:
    """Stages in the middle receive and send."""
    counts = four.run(decodes, {})
    assert counts[0] == 0
    assert min(counts[1:]) > 20


def decodes_on_devices(rank: int, options: dict[str, Any]) -> int:
    """Each rank on a device of its own, and proxies by NCCL."""
    torch.cuda.set_device(rank)
    group: Any = dist.new_group([0, 1], backend="nccl")
    try:
        return decodes(rank, {"backend": "cuda", **options}, group)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two CUDA devices are needed")
@pytest.mark.parametrize("options", [{}, {"lowering": "foreach"}, {"width": 3}], ids=str)
def test_decode_on_devices(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
    """The same over NCCL: received in the slots, and in stream order with the graphs."""
    with ranks(2, tmp_path) as made:
        first, last = made.run(decodes_on_devices, options)
        assert first == 0
        assert last > 20


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


def tails(rank: int) -> dict[str, list[float]]:
    """One row in a bucket of two, over poison; what the second row holds."""
    runner = part_of(rank, 2)
    stage = PipelineStage(runner)
    poison(runner)
    check(stage, batch_of(1, 3))
    stage.flush()
    slots = vars(runner.inputs(2))
    return {name: slots[name][1:].double().flatten().unique().tolist() for name in slots if name[:3] in ("pp_", "pos")}


def test_tails_of_decode_are_kept(two: Processes) -> None:
    """Proxies' padded rows are as they were, and those of other slots reset."""
    found = two.run(tails)[1]
    assert found == {"positions": [0]} | {f"pp_{key}": [POISON] for key in ALL}


def generates(rank: int, requests: int) -> list[list[int]]:
    """Tokens, greedily, each of which the first stage embeds in the next step."""
    size = dist.get_world_size()
    stage = PipelineStage(part_of(rank, size), dist.group.WORLD)
    batch, tokens = batch_of(requests, 1), []
    for _ in range(12):
        outputs = stage(batch)
        ids = torch.zeros(requests, dtype=torch.int64) if outputs is None else outputs.argmax(-1)
        dist.broadcast(ids, size - 1)
        tokens.append(ids.tolist())
        batch = {**batch, "input_ids": ids, "positions": (batch["positions"] + 1) % ROOM}
    return tokens


def test_greedy_tokens(four: Processes) -> None:
    """Those of the whole model."""
    batch, tokens = batch_of(3, 1), []
    for _ in range(12):
        ids = expected(batch).argmax(-1)
        tokens.append(ids.tolist())
        batch = {**batch, "input_ids": ids, "positions": (batch["positions"] + 1) % ROOM}
    assert four.run(generates, 3) == [tokens] * 4


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
    runner: DecodeRunner[Any] = DecodeRunner(First, whole, buckets=[4], backend="cpu", progress=False)
    runner.capture()
    stage = PipelineStage(runner, groups[rank])
    assert (stage.first, stage.last, stage.size) == (True, True, 1)
    check(stage, batch_of(3, rank))
    stage.flush()
    with pytest.raises(ConfigError, match="group: expected a process group that this process is in"):
        PipelineStage(runner, groups[1 - rank])


def test_one_stage(two: Processes) -> None:
    """It is first and last, and needs no group."""
    two.run(alone)
    stage = PipelineStage(eager_part(0, 1))
    assert torch.equal(stage(batch_of(3, 1)), expected(batch_of(3, 1)))


class LaterPrefill(Prefill):
    """What a later stage of a prefill reads beside."""

    hidden_states: torch.Tensor = copied(
        TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pipe.flow.hidden_states")
    )


class Piece(nn.Module):
    """Inner layers of one stage, with attention and caches of their own."""

    def __init__(self, rank: int, size: int, *, named: bool) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        self.inner = Layers(torch.Generator().manual_seed(rank), named=named)

    def forward(self, view: Any, hidden: torch.Tensor | None = None) -> Any:
        """Nested proxies, or logits of the last. hidden: from the piece before, where one process has them all."""
        if hidden is None:
            hidden = view.hidden_states if self.rank else self.embedded(view)
        out: torch.Tensor = self.inner(hidden, view)
        if self.rank < self.size - 1:
            return {"flow": {"hidden_states": out, "nothing": None}}
        return out @ weights(402, HIDDEN, VOCAB)

    def embedded(self, view: Prefill) -> torch.Tensor:
        """What the first one begins with."""
        return weights(400, VOCAB, HIDDEN)[view.input_ids] + weights(401, ROOM, HIDDEN)[view.positions]


def prefill_part(rank: int, kind: str, **options: Any) -> Any:
    """A stage of a prefill, captured unless its memory is that of a pool."""
    named = kind == "piecewise"
    inputs: type[Prefill] = LaterPrefill if rank else Prefill
    given: dict[str, Any] = {"stack": "inner", "buckets": [4, 16], "max_batch": 5, "output_rows": TOKENS, **options}
    piece, made = Piece(rank, dist.get_world_size(), named=named), {**given, "backend": "cpu", "progress": False}
    runner: Any = (
        PrefillRunner(inputs, piece, splits=[SPLIT], **made) if named else BreakableRunner(inputs, piece, **made)
    )
    if "phase" not in options:
        runner.capture()
    return runner


@attrs.frozen(eq=False)
class Pieces:
    """Those of all stages in one process."""

    pieces: list[Piece]

    def __call__(self, view: Prefill) -> torch.Tensor:
        """Logits."""
        hidden = None
        for piece in self.pieces[:-1]:
            hidden = piece(view, hidden)["flow"]["hidden_states"]
        out: torch.Tensor = self.pieces[-1](view, hidden)
        return out


def prefills(rank: int, kind: str) -> None:
    """Random prompts."""
    size, runner, draw = dist.get_world_size(), prefill_part(rank, kind), random.Random(9)  # noqa: S311 - steps, not keys
    pieces = [Piece(place, size, named=kind == "piecewise") for place in range(size)]
    reference, stage = EagerRunner(Prefill, Pieces(pieces), backend="cpu"), PipelineStage(runner, proxies="pipe")
    seen = Seen(runner, "pipe") if rank else None
    for step in range(25):
        lengths = [draw.randint(1, 5) for _ in range(draw.randint(1, 5))]
        batch, tokens = prefilled.batch_of(lengths, step), sum(lengths)
        poison(runner)
        outputs, answer = stage(batch), reference(batch)
        assert outputs is None if not stage.last else torch.equal(outputs, answer), lengths
        if seen is not None and tokens <= 16:
            assert seen.in_place == {"flow.hidden_states": True}
            graphs, whole = runner.graphs, frozenset[str]()
            padded = graphs.view(graphs.get(4 if tokens <= 4 else 16, whole), whole)
            assert not padded.hidden_states[tokens:].any()
    stage.flush()


@pytest.mark.parametrize("kind", prefilled.KINDS)
def test_prefill(two: Processes, kind: str) -> None:
    """Graphs in parts, and too large prompts eagerly; padded rows of proxies are 0."""
    two.run(prefills, kind)


def test_prefill_of_four_stages(four: Processes) -> None:
    """As of two."""
    four.run(prefills, "breakable")


def shares(rank: int) -> int:
    """Prefill and decode by turns, in the same memory."""
    size, draw, pool = dist.get_world_size(), random.Random(4), InputPool("prefill", "decode")  # noqa: S311 - as above
    runners: list[Any] = [
        prefill_part(rank, "breakable", phase=pool["prefill"], sharing=True),
        part_of(rank, size, phase=pool["decode"], sharing=True),
    ]
    saved = pool.seal().saved
    for runner in runners:
        runner.capture()
    prefill, decode = PipelineStage(runners[0], proxies="pipe"), PipelineStage(runners[1])
    reference = EagerRunner(Prefill, Pieces([Piece(place, size, named=False) for place in range(size)]), backend="cpu")
    for step in range(30):
        if draw.random() < 0.5:
            check(decode, batch_of(draw.randint(1, 10), step))
            continue
        batch = prefilled.batch_of([draw.randint(1, 5) for _ in range(draw.randint(1, 5))], step)
        outputs, answer = prefill(batch), reference(batch)
        assert outputs is None if not prefill.last else torch.equal(outputs, answer)
    prefill.flush()
    decode.flush()
    return saved


def test_prefill_and_decode_in_one_pool(two: Processes) -> None:
    """Two stages a rank, of runners that share their inputs' memory."""
    assert min(two.run(shares)) > 0


def told(outcomes: list[Outcome | None]) -> list[str]:
    """Kind and message of each rank's error."""
    return [f"{one.kind}: {one.message}" if one is not None else "gone" for one in outcomes]


Change = Callable[[dict[str, Any]], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "extra": lambda flow: {**flow, "extra": torch.ones(3, 2)},
    "shape": lambda flow: {**flow, "hidden_states": flow["hidden_states"][:, :5]},
    "rows": lambda flow: {key: one[:2] for key, one in flow.items()},
    "dtype": lambda flow: {**flow, "residual": flow["residual"].float()},
}


def mismatched(rank: int, change: str) -> list[str]:
    """The first stage sends what the second does not expect, in the first of three steps; errors of each."""
    odd, found = [True], []

    def step(view: First) -> Any:
        flow = Part(0, 2)(view)
        return CHANGES[change](flow) if odd[0] else flow

    stage = PipelineStage(part_of(1, 2) if rank else EagerRunner(First, step, backend="cpu"))
    for number in range(3):
        odd[0] = number == 0
        try:
            outputs = stage(batch_of(3, number))
            stage.flush()
            if rank:
                assert torch.equal(outputs, expected(batch_of(3, number)))
            found.append("")
        except RankError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("extra", "'extra' is read by no slot"),
        ("shape", "'hidden_states' is not of the shape of slot 'pp_hidden_states'"),
        ("rows", "'topk_indices' is not of the shape of slot 'pp_topk_indices'"),
        ("dtype", "'residual' is not of the dtype of slot 'pp_residual'"),
    ],
)
def test_other_proxies_are_refused_on_both_sides(two: Processes, change: str, fault: str) -> None:
    """With the keys of both; the steps after go on."""
    sender, receiver = two.run(mismatched, change)
    assert sender[1:] == receiver[1:] == ["", ""]
    for message in (sender[0], receiver[0]):
        assert fault in message
        assert "step 1: rank 0 sends " in message
        assert "rank 1 expects hidden_states float64 [3, 16] on cpu (optional), residual float64" in message
    assert sender[0].startswith("rank 1 refused what rank 0 sent in step 1: ")


def lacks(rank: int) -> list[str]:
    """A required key does not come, once; nor are the batches of both the same, once."""
    keys, found = list[tuple[str, ...]]([()]), list[str]()

    def step(view: Prefill) -> Any:
        hidden = weights(400, VOCAB, HIDDEN)[view.input_ids]
        return {"flow": dict.fromkeys(keys[0], hidden)}

    def last(view: LaterPrefill) -> torch.Tensor:
        return view.hidden_states

    runner: Any = EagerRunner(LaterPrefill, last, backend="cpu") if rank else EagerRunner(Prefill, step, backend="cpu")
    stage = PipelineStage(runner, proxies="pipe")
    for number, there in enumerate([(), ("hidden_states",), ("hidden_states",)]):
        keys[0] = there
        try:
            stage(prefilled.batch_of([3, 2 + rank * (number == 1)], number))
            stage.flush()
            found.append("")
        except RankError as error:
            found.append(str(error))
    return found


def test_a_missing_key_and_another_batch(two: Processes) -> None:
    """Both are refused on both sides."""
    for found in two.run(lacks):
        assert "rank 0 sends nothing; rank 1 expects flow.hidden_states float64 [5, 16] on cpu" in found[0]
        assert found[0].endswith("'flow.hidden_states' is missing")
        assert "sends flow.hidden_states float64 [5, 16] on cpu; rank 1 expects flow.hidden_states float64" in found[1]
        assert found[2] == ""


def one_fails(rank: int, where: int, how: str) -> list[str]:
    """One stage fails in the second of four steps."""
    size, found = dist.get_world_size(), []
    failing = [False]

    def step(view: Any) -> Any:
        if failing[0]:
            message = "on purpose"
            raise ValueError(message)
        return Part(rank, size)(view)

    runner = EagerRunner(Later if rank else First, step, sizes=SIZES if rank else {}, backend="cpu")
    stage = PipelineStage(runner)
    for number in range(4):
        batch = batch_of(3, number)
        if rank == where and number == 1:
            failing[0] = how == "step"
            batch = batch if how == "step" else {**batch, "positions": batch["positions"][:1]}
        try:
            outputs = stage(batch)
            if stage.last:
                assert torch.equal(outputs, expected(batch))
            found.append("")
        except (ValueError, RankError) as error:
            found.append(f"{type(error).__name__}: {error}")
        failing[0] = False
    stage.flush()
    return found


@pytest.mark.parametrize(("where", "how"), [(0, "step"), (1, "step"), (0, "batch"), (1, "batch"), (3, "step")])
def test_one_stage_fails(four: Processes, where: int, how: str) -> None:
    """Later stages raise in this step, too, and name it; the next one is run by all."""
    found = four.run(one_fails, where, how)
    kind = {"step": "ValueError", "batch": "BatchError"}[how]
    assert all(one[0] == one[2] == one[3] == "" for one in found)
    assert all(one[1] == "" for one in found[:where])
    assert found[where][1].startswith(f"{kind}: ")
    for rank in range(where + 1, 4):
        assert found[rank][1].startswith(f"RankError: step 2: rank {rank - 1} has nothing for rank {rank}: ")
        assert found[where][1] in found[rank][1]


def storm(rank: int) -> list[str]:
    """Forty steps, in each of which one stage, or none, fails in one of three ways; whose error each was."""
    size, draw, failing, found = dist.get_world_size(), random.Random(8), [""], list[str]()  # noqa: S311 - as above

    def step(view: Any) -> Any:
        if failing[0] == "step":
            message = f"of rank {rank}"
            raise ValueError(message)
        flow = Part(rank, size)(view)
        return {**flow, f"odd{rank}": torch.ones(2)} if failing[0] == "key" else flow

    stage = PipelineStage(EagerRunner(Later if rank else First, step, sizes=SIZES if rank else {}, backend="cpu"))
    for number in range(40):
        where, how = draw.randrange(size), draw.choice(["", "step", "batch", "key"])
        how = "" if how == "key" and where == size - 1 else how
        batch, failing[0] = batch_of(draw.randint(0, 9), number), how if rank == where else ""
        try:
            outputs = stage({**batch, "positions": f"of rank {rank}"} if failing[0] == "batch" else batch)
            stage.flush()
            assert rank < where or not how
            assert outputs is None if not stage.last else torch.equal(outputs, expected(batch))
        except (ValueError, RankError) as error:
            marks = {"step": f"of rank {where}", "batch": "slot 'positions'", "key": f"'odd{where}' is read by no slot"}
            found.append(how if marks[how] in str(error) and rank >= where else f"{how} of {where}: {error}")
    return found


def test_random_failures(four: Processes) -> None:
    """Nobody waits for what does not come; those behind a failure are told of it, and the next step is as any."""
    found = four.run(storm)
    assert {how for one in found for how in one} == {"step", "batch", "key"}
    assert len(found[0]) < len(found[3]) < 40


def lost(rank: int, where: int, *, dies: bool) -> list[str]:
    """One rank leaves after the first step, dead or not; what the others say of two steps more."""
    stage, found = PipelineStage(eager_part(rank, dist.get_world_size())), list[str]()
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
    for number in range(2):
        try:
            stage(batch_of(3, number))
            stage.flush()
            found.append("")
        except RankError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "stalls"])
def test_a_lost_rank_is_named(tmp_path: pathlib.Path, where: int, dies: bool) -> None:  # noqa: FBT001 - a parameter
    """At once where it is dead, after the timeout where it stalls; and in each step after."""
    with ranks(2, tmp_path) as made:
        outcomes = made.outcomes(functools.partial(lost, dies=dies), where)
        assert (outcomes[where] is None) == dies
        other = outcomes[1 - where]
        assert other is not None
        how = "is gone: its connection was lost" if dies else "said nothing for "
        assert other.kind is None, other.trace
        assert [one.startswith(f"rank {1 - where}: rank {where} {how}") for one in other.value] == [True, True]


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("dies", [True, False], ids=["dies", "stalls"])
def test_a_rank_of_four_is_lost(tmp_path: pathlib.Path, where: int, dies: bool) -> None:  # noqa: FBT001 - a parameter
    """Both neighbours name it, and so do all who are behind them."""
    with ranks(4, tmp_path) as made:
        outcomes = made.outcomes(functools.partial(lost, dies=dies), where)
        how = "is gone: its connection was lost" if dies else "said nothing for "
        for rank, one in enumerate(outcomes):
            assert one is not None or (rank == where and dies)
            if one is not None and rank != where:
                assert one.kind is None, one.trace
                assert [f"rank {where} {how}" in message for message in one.value] == [True, True], one.value


def out_of_step(rank: int) -> str:
    """The first stage makes a call that the second does not."""
    stage = PipelineStage(eager_part(rank, 2))
    if rank == 0:
        with pytest.raises(BatchError):
            stage({})
        stage(batch_of(3, 1))
        stage.flush()
        stage._steps += 1
        stage(batch_of(3, 2))
        with pytest.raises(RankError, match="rank 1 refused what rank 0 sent in step 4: rank 0 is at step 4"):
            stage.flush()
        return ""
    with pytest.raises(RankError, match="rank 0 has nothing for rank 1: MissingSourceError: "):
        stage(batch_of(3, 1))
    check(stage, batch_of(3, 1))
    with pytest.raises(RankError) as caught:
        stage(batch_of(3, 2))
    return str(caught.value)


def test_stages_out_of_step(two: Processes) -> None:
    """Steps are counted, whatever became of them; proxies of another step are refused."""
    assert two.run(out_of_step)[1] == "rank 0 is at step 4 of the pipeline, rank 1 at step 3"


def refusals(rank: int) -> None:
    """What makes no sense."""
    runner = eager_part(rank, 2)
    wrong: list[dict[str, Any]] = [{"proxies": "a b"}, {"timeout": 0}]
    for given in wrong:
        with pytest.raises(ConfigError, match=r"proxies: expected the name|timeout: expected seconds"):
            PipelineStage(runner, **given)
    if rank:
        with pytest.raises(ConfigError, match="stage 1 of 2 has no slot that reads pp_proxy_tensors"):
            PipelineStage(eager_part(0, 2))
    else:
        with pytest.raises(ConfigError, match=r"its slots require 'flow.hidden_states' of pipe"):
            PipelineStage(EagerRunner(LaterPrefill, print, backend="cpu"), proxies="pipe")
    stage, given = PipelineStage(runner), {"pp_proxy_tensors": {"hidden_states": torch.ones(1, HIDDEN)}}
    with pytest.raises((ConfigError, RankError), match="pp_proxy_tensors is received from the stage before"):
        stage(batch_of(1, 1), **(given if rank == 0 else {}))
    if rank:
        with pytest.raises(ConfigError, match="pp_proxy_tensors is received from the stage before"):
            stage(batch_of(1, 2), **given)
    else:
        stage(batch_of(1, 2))
        with pytest.raises(RankError, match="rank 1 refused what rank 0 sent in step 2: ConfigError: pp_proxy_tensors"):
            stage.flush()
    check(stage, batch_of(1, 3))
    stage.flush()


def test_what_makes_no_sense_is_refused(two: Processes) -> None:
    """By the constructor, where it can be."""
    two.run(refusals)


class Whole(First):
    """A slot that takes all of the argument."""

    hidden: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pp_proxy_tensors"))


class Untold(Inputs):
    """Proxies alone tell the tokens."""

    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1)
    hidden: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float64, pad=0, source=side("pp_proxy_tensors.hidden"))


def test_declarations_that_no_stage_can_have() -> None:
    """A slot reads one key; and its rows are known without it, or follow from those that are."""
    with pytest.raises(ConfigError, match="slot 'hidden' reads argument pp_proxy_tensors as a whole"):
        PipelineStage(EagerRunner(Whole, print, backend="cpu"))
    with pytest.raises(ConfigError, match="Untold: no copied slot tells the size of TOKENS"):
        PipelineStage(EagerRunner(Untold, print, backend="cpu"))
    runner = DecodeRunner(Untold, lambda view: view.hidden, buckets=[2], width=3, backend="cpu", progress=False)
    with pytest.raises(ConfigError, match=r"the first stage receives nothing, but its slots require 'hidden'"):
        PipelineStage(runner)


def returns(rank: int, outputs: Any) -> str:
    """The first stage returns something else than proxies."""
    stage = PipelineStage(eager_part(1, 2) if rank else EagerRunner(First, lambda _: outputs, backend="cpu"))
    with pytest.raises((ReplayError, RankError, ConfigError)) as caught:
        stage(batch_of(2, 1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (torch.ones(2, 3), "got something of type Tensor"),
        ({"hidden_states": 5}, "got something of type int under 'hidden_states'"),
        ({f"{'long' * 30}{key}": torch.ones(2) for key in range(30)}, "30 proxies have too many or too long keys"),
    ],
    ids=["tensor", "number", "keys"],
)
def test_what_is_no_proxies(two: Processes, outputs: Any, message: str) -> None:
    """The stage that has it raises, and the next one is told."""
    first, second = two.run(returns, outputs)
    assert message in first
    assert message in second


def comes_alone(rank: int) -> str:
    """One rank makes its stage, the other does not."""
    if rank:
        return ""
    with pytest.raises(RankError) as caught:
        PipelineStage(eager_part(0, 2), timeout=0.1)
    return str(caught.value)


def test_a_stage_that_is_not_made(tmp_path: pathlib.Path) -> None:
    """Whoever waits for it says so."""
    with ranks(2, tmp_path) as made:
        said = made.run(comes_alone)[0]
        assert said == "rank 0: rank 1 did not come to make its stage of the pipeline"
