"""Runners of every lowering, on every backend that is here, against a runner that fills slot by slot."""

import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, DecodeRunner, Inputs, Step, computed, copied, keep, staged
from slotgraph.backends import load
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.dataflow.axes import Sizes, extent
from slotgraph.dataflow.capabilities import LADDER, resolve_dtype
from slotgraph.dataflow.errors import BatchError, ComputeError, ConfigError, ReplayError
from slotgraph.dataflow.slots import Slot
from slotgraph.extend import HOST, once, side
from tests.operators import Operators
from tests.packing import NAME, backend_of
from tests.runners.models import batch_for, decoder, memory_of, same_batch, snapshot
from tests.sources import FLAT, HOST_DATA, IN_BUFFERS, KINDS, Maker
from tests.strategies import declaration_of, same_bytes

LOWERINGS: Final = ("in_graph", "fused", "direct", "foreach")
PLAIN: Final = ("plain",)
DEVICES: Final = ("cuda", "npu")
MODES: Final[Mapping[str, Callable[[], AbstractContextManager[Any]]]] = {
    "plain": nullcontext,
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "meta": lambda: torch.device("meta"),
}
PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)
WIDTH = 2
BUCKETS = (2, 4, 8)
ABSENT = frozenset({"extra", "beside"})
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)
EXTREMES: Final = (math.inf, -math.inf, math.nan, 1e300, -1e-310, 65519.99, 65520.0, 3.5e38, -0.0, 1.0004882812500002)
Batch = dict[str, Any]


class Quick(Inputs):
    """All that a whole step needs is in the graph: tensors on the device, and a number that the host computes."""

    bias: int
    mode: str = "usual"
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=9, converts=(torch.float32,))
    count: torch.Tensor = computed(lambda step, bias: step.live(BATCH) + bias, shape=1, dtype=torch.int8)


def twice(step: Step) -> list[int]:
    """Computed on the host, many numbers."""
    return [2 * row + step.live(TOKENS) for row in range(step.padded(BATCH))]


class Rich(Quick):  # slots of every kind that take much, some of which no kernel writes
    tables: torch.Tensor = copied(
        BATCH, PAGES, dtype=torch.int32, pad=-1, source="nested.tables", strided=True, converts=(torch.int64,)
    )
    mask: torch.Tensor = copied(3, TOKENS, dtype=torch.bool, pad=True, strided=True)
    mrope: torch.Tensor = copied(
        3, TOKENS, dtype=torch.int64, pad=7, strided=True, converts=(torch.int32, torch.float32)
    )
    halves: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float16, pad=keep("shown as it was"), converts=FLOATS)
    heat: torch.Tensor = copied(BATCH, 1, dtype=torch.float32, pad=once(1.5), rewritten=True)
    heats: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=2.5, converts=(*FLOATS, *WHOLE))
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, converts=(*WHOLE, *FLOATS))
    doubles: torch.Tensor = copied(BATCH + 1, dtype=torch.float64, pad=2.5, converts=(torch.float32,))
    here: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=-9, placement=HOST, strided=True, converts=(*WHOLE, *FLOATS)
    )
    wide: torch.Tensor = copied(2, BATCH, dtype=torch.float64, pad=0.5, placement=HOST, converts=(torch.float32,))
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.bfloat16, pad=4, default=None, converts=(torch.float64,))
    beside: torch.Tensor | None = copied(BATCH, dtype=torch.uint8, pad=7, default=None, source=side("proxy.beside"))
    twice: torch.Tensor = computed(twice, shape=BATCH, dtype=torch.int64)
    sums: torch.Tensor = computed(lambda ids: ids.cumsum(0), shape=TOKENS, dtype=torch.int64)
    there: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int64, placement=HOST)
    scratch: torch.Tensor = staged(TOKENS, dtype=torch.float32, pad=-0.5)


SIZES: Final[dict[type[Inputs], Sizes]] = {Quick: {}, Rich: {PAGES: 5, HIDDEN: 3}}
_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(one: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One whole number of every bit of a tensor and of where it stands; columns of a host slot go row by row.

    CUDA captures no other copy of them.
    """
    rows = [one] if one.is_contiguous() or not one.is_cpu else [*one]
    tensor = torch.stack([row.to(device, non_blocking=True) for row in rows])
    bits = tensor.contiguous().view(_OF_BYTES[tensor.itemsize]).flatten().long()
    return ((torch.arange(bits.numel(), device=bits.device) + 1) * 2654435761 * (bits + 77)).sum()


def digest_step(view: Any) -> dict[str, torch.Tensor]:
    """A row for each token: its own number, and a digest of every slot with its padded rows; writes what is staged."""
    assert not torch.is_grad_enabled()
    slots, ids = type(view).slotgraph.slots, view.ids
    shown = [(name, getattr(view, name)) for name in sorted(slots)]
    can_copy = ids.device.type != "npu"  # whose graphs read host slots as operators' parameters alone
    each = {n: digest(one, ids.device) for n, one in shown if one is not None and (can_copy or not one.is_cpu)}
    if "scratch" in slots:
        view.scratch.copy_(ids.float() + 0.125)
        view.heat.mul_(-1)
    return {"rows": ids * 3 + 1, **{name: one.expand(len(ids)) * 1 for name, one in each.items()}}


def values(slot: Slot, dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random numbers of all sizes, those on the verge of other dtypes among them, where a conversion is defined."""
    draw, own = torch.Generator().manual_seed(seed), slot.dtype
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    if not dtype.is_floating_point:
        bits = torch.randint(-(1 << 62), 1 << 62, shape, generator=draw)
        return (bits >> torch.randint(0, 62, shape, generator=draw)).to(dtype)
    made = torch.randn(shape, generator=draw, dtype=torch.float64) * 100
    if isinstance(own, torch.dtype) and (own.is_floating_point or own == torch.bool):
        odd = torch.tensor(EXTREMES, dtype=torch.float64)[torch.randint(0, len(EXTREMES), shape, generator=draw)]
        made = torch.where(torch.rand(shape, generator=draw) < 0.5, made, odd)
        if own.is_floating_point and (dtype != own or own == torch.bfloat16):
            made = made.nan_to_num(1.0, math.inf, -math.inf)  # no conversion promises the bits of NaN
    return made.to(dtype)


@attrs.frozen
class Pair:
    """A runner of one lowering, and another that fills slot by slot: the oracle."""

    mine: DecodeRunner[Any]
    right: DecodeRunner[Any]

    @classmethod
    def of(cls, kind: type[Inputs], backend: str, lowering: str) -> "Pair":
        """Both, captured."""
        options: dict[str, Any] = {"buckets": BUCKETS, "width": WIDTH, "sizes": SIZES[kind]}
        options["absent"] = [ABSENT] if kind is Rich else []
        ways = ({"backend": backend_of(backend), "lowering": one} for one in (lowering, "slot_by_slot"))
        return cls(*(decoder(kind, digest_step, **options, **way) for way in ways))

    def batches(
        self, rows: int, seed: int, kinds: Sequence[str], absent: frozenset[str] = ABSENT
    ) -> tuple[Batch, Batch]:
        """A batch whose sources are of some kinds, in turn, and the same as tensors of their own."""
        live = {BATCH: rows, TOKENS: rows * WIDTH, PAGES: seed % 6, HIDDEN: 3}
        brought = Batch(bias=seed % 9) if seed % 5 else Batch(bias=seed % 9, mode="rare")  # which no graph has seen
        plain = Batch(brought)
        stage, buffers = self.mine.stage, self.mine.graphs.buffers
        present = [(n, s) for n, s in stage.declaration.slots.items() if s.reads(n) and n not in absent]
        turns = [(kinds[index % len(kinds)], seed + index, name, slot) for index, (name, slot) in enumerate(present)]
        for wanted, number, name, slot in sorted(turns, key=lambda turn: turn[0] != "in place"):  # producers come first
            dtype = resolve_dtype(slot.dtype, stage.backend.capabilities)
            dtypes = (dtype, dtype, *slot.converts_from())
            value = values(slot, dtypes[number // 5 % len(dtypes)], extent(slot.shape, live), number)
            value = value if slot.placement == HOST else value.to(stage.backend.device)
            is_eager = absent not in (ABSENT, frozenset()) or "mode" in plain  # such a run may have other buffers
            as_plain = (is_eager and wanted == "in place") or (wanted in FLAT and not value.isfinite().all())
            maker = Maker(buffers[name], dtype, value, buffers, live)
            given = maker.make("plain" if as_plain else wanted)
            if given.plain.dtype != dtype and given.plain.isnan().any():  # of another slot, whose NaN have any bits
                given = maker.make("plain")
            brought[name], plain[name] = given.value, given.plain
        for batch in (brought, plain):
            batch["nested"] = {"tables": batch.pop("tables", None)}
        return brought, plain


def arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch brings beside it."""
    return {"proxy": {"beside": batch["beside"]}} if "beside" in batch else {}


EXACTLY: Final[Any] = {"rtol": 0, "atol": 0}


pair_of = functools.cache(Pair.of)  # one that all examples share, which go on where others ended
rows = st.sampled_from([3, 3, 3, 3, 8, 8, 0, 1, 2, 4, 5, 7, 9, 10])  # the same ones often, with other batches
kinds = st.one_of(st.just(PLAIN), *(st.lists(st.sampled_from(of), min_size=1) for of in (KINDS, HOST_DATA, IN_BUFFERS)))
absents = st.sampled_from([ABSENT, ABSENT, frozenset[str](), frozenset({"extra"})])
ops = st.sampled_from(
    ["run", "again", "fill"] * 2 + ["replay", "produce", "refuse", "raise", "change", "loop", "twice", "halves"]
)
steps = st.tuples(ops, rows, st.integers(0, 9999), kinds, absents, st.sampled_from([*MODES, "plain"]))
Op = tuple[str, int, int, Sequence[str], frozenset[str], str]


class Game:
    """Steps of two runners, compared after each."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.views: tuple[Inputs, Inputs] | None = None
        self.last: tuple[Batch, Batch] | None = None
        self.outputs: torch.Tensor | None = None

    def play(self, op: Op) -> None:
        """One step of both; only the first is in the mode."""
        what, size, seed, of, absent, mode = op
        if what == "replay":
            self.replay(mode)
        elif what in ("again", "change") and self.last is not None:
            self.again(what, seed, *self.last, mode)
        elif what == "refuse":
            wide = 2 if size == 1 else size  # two tokens of one request and one row more are two requests
            self.refuse(*self.pair.batches(wide, seed, PLAIN, absent), seed)
        elif what == "raise":
            self.fail(self.pair.batches(max(1, size), seed, PLAIN, absent)[0])
        else:
            of = self.produce(size, absent) if what == "produce" else of
            batch, plain = self.pair.batches(size, seed, of, absent)
            is_apart = set(of).isdisjoint(IN_BUFFERS)
            is_apart &= not self.borrow(what, batch, plain)
            before = snapshot(batch)
            (self.fill if what in ("fill", "halves") else self.run)(batch, plain, mode)
            assert not is_apart or same_batch(batch, before)
            self.last = (batch, plain) if is_apart else None  # else those sources hold something else by now
            if what == "halves" and is_apart:  # a replay reads no sources, and the next step reads them anew
                self.again("change", seed, batch, plain, mode)
                self.replay(mode)
                self.fill(batch, plain, mode)
                self.again("again", 3 * seed + 1, batch, plain, mode)
        assert torch.is_grad_enabled()

    def borrow(self, what: str, batch: Batch, plain: Batch) -> bool:
        """Take the last step's outputs, as a decode loop does, or one tensor for two slots; whether it was done."""
        if what == "loop" and self.outputs is not None and len(self.outputs) == len(plain["ids"]):
            batch["ids"], plain["ids"] = self.outputs, self.outputs.clone()
            return True
        slots = self.pair.mine.graphs.buffers
        if what == "twice" and slots["ids"].tensor.dtype == slots["places"].tensor.dtype:
            batch["places"], plain["places"] = batch["ids"], plain["ids"].clone()  # maybe an array over the own memory
            return True
        return False

    def again(self, what: str, seed: int, batch: Batch, plain: Batch, mode: str) -> None:
        """The same batch, with other numbers where the last had its own; where they only change, it was read before."""
        ids = batch["ids"]
        if isinstance(ids, torch.Tensor) and not ids.is_inference():
            for same in (ids, plain["ids"]):
                same.add_(seed)
        if what == "change":
            self.replay(mode)
        else:
            (self.fill if seed % 3 == 0 else self.run)(batch, plain, mode)

    def run(self, batch: Batch, plain: Batch, mode: str) -> None:
        """Whole steps."""
        self.views = None
        brought = types.SimpleNamespace(**batch) if len(batch["ids"]) % 2 else batch
        with MODES[mode]():
            outputs = self.pair.mine(brought, **arguments(batch))
        torch.testing.assert_close(outputs, self.pair.right(plain, **arguments(plain)), **EXACTLY)
        assert not any(one.requires_grad for one in outputs.values())
        self.outputs = outputs["rows"]

    def fill(self, batch: Batch, plain: Batch, mode: str) -> None:
        """Fills, whose views show the same bytes in every slot."""
        with MODES[mode]():
            mine = self.pair.mine.fill(batch, **arguments(batch))
        right = self.pair.right.fill(plain, **arguments(plain))
        declaration = type(mine).slotgraph
        for name, slot in declaration.slots.items():
            if slot.computes() is None or declaration.side(name) != "device":  # which the graph computes
                one, other = getattr(mine, name), getattr(right, name)
                assert (one is None) == (other is None), name
                assert one is None or same_bytes(one.cpu(), other.cpu()), f"{name}: {one} is not {other}"
        self.views = (mine, right)

    def replay(self, mode: str) -> None:
        """Replays of the views filled last."""
        if self.views is not None:
            mine, right = self.views
            with MODES[mode]():
                outputs = self.pair.mine.replay(mine)
            torch.testing.assert_close(outputs, self.pair.right.replay(right), **EXACTLY)

    def produce(self, size: int, absent: frozenset[str]) -> Sequence[str]:
        """A producer writes every row of some slots; the batch's own rows are then written there, too."""
        bucket = next((one for one in BUCKETS if one >= size), None)
        runner = self.pair.mine
        if bucket is not None and absent in (ABSENT, frozenset()) and runner.graphs.has(bucket, absent & ABSENT):
            view = runner.inputs(bucket, absent if runner.stage.declaration.optional else ())
            for name in ("ids", "places", "pairs"):
                getattr(view, name).fill_(5)
        return ("in place", "in place", "in place", "plain")

    def refuse(self, batch: Batch, plain: Batch, seed: int) -> None:
        """A batch that does not fit leaves every byte, the view and later steps as they were."""
        spoils = [one for one in SPOILS if one[0] in batch]
        name, spoil = spoils[seed % len(spoils)]
        mine, before = self.pair.mine, memory_of(self.pair.mine)
        for use in (mine, mine.fill):
            with pytest.raises(BatchError):
                use({**batch, name: spoil(batch[name])}, **arguments(batch))
            with pytest.raises(BatchError, match="side argument 'proxies'"):
                use(batch, proxies=plain["ids"])
        assert memory_of(mine) == before
        self.replay("plain")

    def fail(self, batch: Batch) -> None:
        """A function whose number its slot cannot hold; the view before it stands or is refused, and is never wrong."""
        if "halves" in batch:  # whose tail keeps what a fill wrote that broke off
            return
        for method in (self.pair.mine, self.pair.mine.fill):
            with pytest.raises(ComputeError, match="slot 'count'"):
                method({**batch, "bias": 127}, **arguments(batch))
        with suppress(ReplayError):
            self.replay("plain")
        self.views = None


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """One row too many."""
    return torch.cat([tensor, tensor[:1] if len(tensor) else tensor.new_zeros(1, *tensor.shape[1:])])


MISFITS: Final[list[Callable[[Any], Any]]] = [
    lambda _: None,
    longer,
    lambda one: one.to(torch.complex64),
    lambda one: one.unsqueeze(0),
    lambda one: ["word"] * (1 + len(one)),
    lambda _: "word",
]
SPOILS: Final[list[tuple[str, Callable[[Any], Any]]]] = [
    *itertools.product(("ids", "places", "pairs"), MISFITS),
    *itertools.product(("heats", "here", "flags", "halves"), (longer,)),
    *itertools.product(("here", "flags"), (lambda one: ["a"] * (len(one) or 1),)),
    ("halves", lambda one: [[1e9] * 3] * len(one) or [[1e9]]),
]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("place", ["host", *(pytest.param(one, marks=getattr(pytest.mark, one)) for one in DEVICES)])
@settings(max_examples=2 * settings().max_examples)  # over three backends and two declarations
@given(data=st.data(), played=st.lists(steps, min_size=2, max_size=12))
def test_any_sequence_gives_what_the_oracle_gives(
    place: str, lowering: str, data: st.DataObject, played: list[Op]
) -> None:
    """Whatever came before, each step gives what the oracle gives, by its own lowering; a refusal changes nothing."""
    backends = [place] if place in DEVICES else ["cpu", "cpu-capture", NAME]
    able = [one for one in backends if place == "host" or load(one).is_available()]
    able = [one for one in able if lowering in backend_of(one).capabilities.lowerings]
    if not able:
        pytest.skip(f"{place} has no lowering {lowering!r} here")
    pair = pair_of(data.draw(st.sampled_from([Quick, Rich])), data.draw(st.sampled_from(able)), lowering)
    game, mine = Game(pair), pair.mine
    for op in played:
        game.play(op)
    assert set(mine.stats()["lowerings"]) <= {mine.lowering, *(["fused"] if mine.lowering == "in_graph" else [])}
    assert not any(one.tensor.is_inference() or one.tensor.requires_grad for one in mine.graphs.buffers)


@pytest.mark.parametrize("lowering", LADDER)
def test_runners_are_right_in_every_mix_of_inference_mode(lowering: str) -> None:
    """A runner made inside of it is right in steps of either kind, through growth, and in place; the game's are not."""
    with torch.inference_mode():
        game = Game(Pair.of(Rich, "cpu-capture", lowering))
    for seed, (what, size) in enumerate(itertools.product(("run", "fill", "replay", "again"), (3, 9, 8, 40, 5))):
        of = ("in place", "plain") if seed % 3 == 0 and size < 9 else PLAIN
        game.play((what, size, seed, of, ABSENT, ("plain", "inference")[seed % 2]))


def test_a_backend_without_the_lowering_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that lacks a lowering refuses it; one that names it but has no fusion is told so."""
    kind = CpuCaptureBackend
    few = attrs.evolve(kind().capabilities, lowerings=("foreach", "slot_by_slot"))
    with monkeypatch.context() as patch:
        patch.setattr(kind, "capabilities", few)
        with pytest.raises(ConfigError, match="'in_graph': this backend has foreach, slot_by_slot; or say 'auto'"):
            DecodeRunner(Quick, digest_step, backend=kind(), lowering="in_graph")
    monkeypatch.setattr(kind, "fusion", lambda _: None)
    with pytest.raises(ConfigError, match=r"fusion\(\) returned None"):
        DecodeRunner(Quick, digest_step, backend=kind(), lowering="fused")


class Functions(TorchFunctionMode):  # counts torch's functions that are called, as a default device is told of them
    called = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: D105
        del types
        self.called += 1
        return func(*args, **(kwargs or {}))


class Rows(Inputs):  # slots of which rows may lie apart in the batch's memory
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    mrope: torch.Tensor = copied(3, TOKENS, dtype=torch.int64, pad=7, strided=True, converts=(torch.int32,))
    spans: torch.Tensor = copied(2, 2, BATCH, 3, dtype=torch.float32, pad=0.5, strided=True)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_rows_that_lie_apart_are_read_as_they_lie(kind: torch.dtype) -> None:
    """The kernel reads the first columns of something wider: no copy of them is made before it."""
    options: dict[str, Any] = {"buckets": [4, 8], "lowering": "in_graph", "output_rows": None}
    mine = decoder(Rows, lambda view: [view.ids * 1, view.mrope * 1, view.spans * 1], backend="cpu-capture", **options)
    seen = Operators()
    for seed in range(4):
        draw, rows = torch.Generator().manual_seed(seed), 3 + seed % 2
        wide = torch.randint(-99, 99, (3, rows + 5), generator=draw).to(kind)
        spans = torch.rand(2, 2, rows + 4, 3, generator=draw)[:, :, :rows]
        batch = {"ids": torch.arange(rows), "mrope": wide[:, :rows], "spans": spans}
        seen.names.clear()
        with seen:
            outputs = mine(batch)
        for found, brought in zip(outputs, batch.values(), strict=True):
            rows_at = tuple(slice(0, size) for size in brought.shape)
            assert torch.equal(found[rows_at], brought.to(found.dtype))
    assert not [one for one in seen.names if "clone" in one or "contiguous" in one]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_modes_are_not_told_of_each_source(lowering: str) -> None:
    """A mode that watches torch's functions, such as a default device, is told of no more with more slots."""
    told = []
    for slots in (3, 24):
        body = {f"slot_{number}": copied(TOKENS, dtype=torch.int64, pad=0) for number in range(slots)}
        options: dict[str, Any] = {"buckets": [4], "backend": "cpu-capture", "lowering": lowering}
        runner = decoder(declaration_of(body), lambda view: view.slot_0 + 1, **options)
        batch = {name: torch.arange(3) for name in body}
        runner(batch)
        with Functions() as counted:
            assert runner(batch) is not None
        told.append(counted.called)
    assert told[0] == told[1]


class Lines(Inputs):  # slots that vary along their first dim
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    weights: torch.Tensor = copied(BATCH, 3, dtype=torch.float32, pad=0.5)


def test_copies_slice_no_slot_for_another_size() -> None:
    """Whatever live size follows which, no slot is sliced for it, once tails of some beginnings were."""
    options: dict[str, Any] = {"buckets": [48], "lowering": "foreach", "output_rows": None}
    runner = decoder(Lines, lambda view: view.ids + 1, **options)
    batches = [batch_for(Lines, {TOKENS: rows, BATCH: rows}, rows) for rows in range(1, 49)]
    with Operators() as seen:  # a mode that watches operators is part of what a guard looks at
        for batch in (*batches[::-6], batches[0]):
            runner(batch)
        seen.names.clear()
        for place in torch.randint(0, 48, (200,), generator=torch.Generator().manual_seed(2)).tolist():
            runner(batches[place])
    assert not [one for one in seen.names if "slice" in one]
