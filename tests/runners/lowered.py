"""What the tests of lowerings share: declarations of many slots, a step that reads every byte, batches, and pairs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, Axis, DecodeRunner, Inputs, Step, computed, copied, keep, staged
from slotgraph.backends import Backend
from slotgraph.dataflow.axes import Sizes, extent
from slotgraph.dataflow.capabilities import resolve_dtype
from slotgraph.dataflow.slots import Slot
from slotgraph.extend import HOST, once, side
from tests.packing import backend_of
from tests.sources import FLAT, Maker
from tests.strategies import same_bytes

PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)
SIZES: dict[type[Inputs], Sizes] = {}
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
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=9, converts=(torch.float32,))
    count: torch.Tensor = computed(lambda step, bias: step.live(BATCH) + bias, shape=1, dtype=torch.int8)


def twice(step: Step) -> list[int]:
    """Computed on the host, many numbers."""
    return [2 * row + step.live(TOKENS) for row in range(step.padded(BATCH))]


class Rich(Quick):
    """Slots of every kind that take much, some of which no kernel writes."""

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


SIZES |= {Quick: {}, Rich: {PAGES: 5, HIDDEN: 3}}
_OF_BYTES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """One whole number of every bit of a tensor and of where it stands."""
    bits = tensor.contiguous().view(_OF_BYTES[tensor.itemsize]).flatten().long()
    return ((torch.arange(bits.numel(), device=bits.device) + 1) * 2654435761 * (bits + 77)).sum()


def digest_step(view: Any) -> dict[str, torch.Tensor]:
    """A row for each token: its own number, and a digest of every slot with its padded rows; writes what is staged."""
    slots, ids = type(view).slotgraph.slots, view.ids
    shown = [(n, getattr(view, n)) for n in sorted(slots)]
    moved = [(n, one.to(ids.device, non_blocking=True)) for n, one in shown if one is not None]
    all_of_them = torch.stack([digest(one) for _, one in moved])
    if "scratch" in slots:
        view.scratch.copy_(ids.float() + 0.125)
        view.heat.mul_(-1)
    each = {name: all_of_them[index].expand(len(ids)) * 1 for index, (name, _) in enumerate(moved)}
    return {"rows": ids * 3 + 1, **each}


def runner_of(kind: type[Inputs], backend: str | Backend, **options: Any) -> DecodeRunner[Any]:
    """A captured runner."""
    given: dict[str, Any] = {"buckets": BUCKETS, "width": WIDTH, "sizes": SIZES[kind], "progress": False, **options}
    given["backend"] = backend_of(backend) if isinstance(backend, str) else backend
    runner = DecodeRunner(kind, digest_step, absent=[ABSENT] if kind is Rich else [], **given)
    runner.capture()
    return runner


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
    def of(cls, kind: type[Inputs], backend: str | Backend, lowering: str, **options: Any) -> "Pair":
        """Both, captured."""
        right = backend if isinstance(backend, str) else "cpu"
        mine = runner_of(kind, backend, lowering=lowering, **options)
        return cls(mine, runner_of(kind, right, lowering="slot_by_slot"))

    def batches(
        self, rows: int, seed: int, kinds: Sequence[str], absent: frozenset[str] = ABSENT
    ) -> tuple[Batch, Batch]:
        """A batch whose sources are of some kinds, in turn, and the same as tensors of their own."""
        live = {BATCH: rows, TOKENS: rows * WIDTH, PAGES: seed % 6, HIDDEN: 3}
        brought, plain = Batch(bias=seed % 9), Batch(bias=seed % 9)
        stage, buffers = self.mine.stage, self.mine.graphs.buffers
        present = [(n, s) for n, s in stage.declaration.slots.items() if s.reads(n) and n not in absent]
        turns = [(kinds[index % len(kinds)], seed + index, name, slot) for index, (name, slot) in enumerate(present)]
        for wanted, number, name, slot in sorted(turns, key=lambda turn: turn[0] != "in place"):  # producers come first
            dtype = resolve_dtype(slot.dtype, stage.backend.capabilities)
            dtypes = (dtype, dtype, *slot.converts_from())
            value = values(slot, dtypes[number // 5 % len(dtypes)], extent(slot.shape, live), number)
            value = value if slot.placement == HOST else value.to(stage.backend.device)
            is_eager = absent not in (ABSENT, frozenset())  # such a run may have other buffers
            as_plain = (is_eager and wanted == "in place") or (wanted in FLAT and not value.isfinite().all())
            given = Maker(buffers[name], dtype, value, buffers, live).make("plain" if as_plain else wanted)
            brought[name], plain[name] = given.value, given.plain
        for batch in (brought, plain):
            batch["nested"] = {"tables": batch.pop("tables", None)}
        return brought, plain


def arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a batch brings beside it."""
    return {"proxy": {"beside": batch["beside"]}} if "beside" in batch else {}


def assert_same_views(mine: Inputs, right: Inputs) -> None:
    """Both show the same bytes in every slot, but for what is computed in the graph."""
    declaration = type(mine).slotgraph
    for name, slot in declaration.slots.items():
        if slot.computes() is not None and declaration.side(name) == "device":
            continue
        one, other = getattr(mine, name), getattr(right, name)
        assert (one is None) == (other is None), name
        assert one is None or same_bytes(one.cpu(), other.cpu()), f"{name}: {one} is not {other}"


def assert_same_outputs(mine: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Both gave the same."""
    assert mine.keys() == right.keys()
    for name, output in mine.items():
        assert torch.equal(output, right[name]), f"{name}: {output} is not {right[name]}"
