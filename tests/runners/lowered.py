"""What the tests of a runner's lowerings share: two declarations, a step that reads every byte, batches, and pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from slotgraph import (
    BATCH,
    CACHE_LOC,
    TOKENS,
    Axis,
    DecodeRunner,
    Inputs,
    Step,
    computed,
    copied,
    keep,
    once,
    side,
    staged,
)
from slotgraph.dataflow.axes import Sizes, extent
from slotgraph.dataflow.capabilities import resolve_dtype
from slotgraph.dataflow.slots import Slot
from tests.packing import backend_of
from tests.sources import Maker
from tests.strategies import noise, same_bytes

PAGES = Axis("PAGES")
HIDDEN = Axis("HIDDEN", fixed=True)
SIZES: dict[type[Inputs], Sizes] = {}
WIDTH = 2
BUCKETS = (2, 4, 8)
ABSENT = frozenset({"extra", "beside"})
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
    """Slots of every kind, some of which no kernel writes."""

    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, source="nested.tables")
    mask: torch.Tensor = copied(3, TOKENS, dtype=torch.bool, pad=True, strided=True)
    halves: torch.Tensor = copied(TOKENS, HIDDEN, dtype=torch.float16, pad=keep("shown as it was"))
    heat: torch.Tensor = copied(BATCH, 1, dtype=torch.float32, pad=once(1.5), rewritten=True)
    doubles: torch.Tensor = copied(BATCH + 1, dtype=torch.float64, pad=2.5, converts=(torch.float32,))
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=4, placement="host")
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.float32, pad=0.25, default=None)
    beside: torch.Tensor | None = copied(BATCH, dtype=torch.uint8, pad=7, default=None, source=side("proxy.beside"))
    twice: torch.Tensor = computed(twice, shape=BATCH, dtype=torch.int64)
    sums: torch.Tensor = computed(lambda ids: ids.cumsum(0), shape=TOKENS, dtype=torch.int64)
    there: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int64, placement="host")
    scratch: torch.Tensor = staged(TOKENS, dtype=torch.float32, pad=-0.5)


SIZES |= {Quick: {}, Rich: {PAGES: 5, HIDDEN: 3}}
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """One whole number that hangs on every bit of a tensor and on where it stands."""
    bits = tensor.contiguous().view(_WHOLE[tensor.itemsize]).flatten().long()
    return ((torch.arange(bits.numel(), device=bits.device) + 1) * 2654435761 * (bits + 77)).sum()


def digest_step(view: Inputs) -> dict[str, torch.Tensor]:
    """A row for each token: its own number, and a digest of every slot with its padded rows; writes what is staged."""
    slots = type(view).slotgraph.slots
    ids: torch.Tensor = view.ids  # type: ignore[attr-defined] # of both declarations
    shown = [(n, getattr(view, n)) for n in sorted(slots)]
    moved = [(n, one.to(ids.device, non_blocking=True)) for n, one in shown if one is not None]
    all_of_them = torch.stack([digest(one) for _, one in moved])
    if "scratch" in slots:
        view.scratch.copy_(ids.float() + 0.125)  # type: ignore[attr-defined] # of the one that has it
        view.heat.mul_(-1)  # type: ignore[attr-defined] # likewise
    each = {name: all_of_them[index].expand(len(ids)) * 1 for index, (name, _) in enumerate(moved)}
    return {"rows": ids * 3 + 1, **each}


def runner_of(kind: type[Inputs], backend: str, **options: Any) -> DecodeRunner[Inputs]:
    """A captured runner."""
    absent = [ABSENT] if kind is Rich else []
    given: dict[str, Any] = {"buckets": BUCKETS, "width": WIDTH, **options}
    runner = DecodeRunner(kind, digest_step, sizes=SIZES[kind], absent=absent, backend=backend_of(backend), **given)
    runner.capture()
    return runner


@attrs.frozen
class Pair:
    """A runner of one lowering, and another that fills slot by slot: the oracle."""

    mine: DecodeRunner[Any]
    right: DecodeRunner[Any]

    @classmethod
    def of(cls, kind: type[Inputs], backend: str, lowering: str, **options: Any) -> "Pair":
        """Both, captured."""
        mine = runner_of(kind, backend, lowering=lowering, **options)
        return cls(mine, runner_of(kind, backend, lowering="slot_by_slot", **options))

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
            is_eager = absent not in (ABSENT, frozenset())  # such a run may have other buffers
            kind = "plain" if is_eager and wanted == "in place" else wanted
            given = Maker(buffers[name], dtype, self._value(slot, live, number), buffers, live).make(kind)
            brought[name], plain[name] = given.value, given.plain
        for batch in (brought, plain):
            batch["nested"] = {"tables": batch.pop("tables", None)}
        return brought, plain

    def _value(self, slot: Slot, live: Sizes, seed: int) -> torch.Tensor:
        backend = self.mine.stage.backend
        dtypes = (resolve_dtype(slot.dtype, backend.capabilities), *slot.converts_from())
        which = seed // 5 % len(dtypes) if seed % 5 == 0 else 0
        value = noise(extent(slot.shape, live), dtypes[which], seed)
        return value if slot.placement == "host" else value.to(backend.device)


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
