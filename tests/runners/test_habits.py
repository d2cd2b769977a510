"""What one slot's source needs costs that slot alone: no habit of a batch moves a step to another lowering."""

import math
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from slotgraph import BATCH, HOST, TOKENS, Axis, DecodeRunner, Inputs, copied, side
from slotgraph.backends import Backend, Graph
from slotgraph.backends.base import NO_PARAMETERS
from slotgraph.backends.cpu_capture import CpuCaptureBackend
from slotgraph.backends.host import HostBackend
from tests.runners.lowered import assert_same_outputs, digest_step

PAGES = Axis("PAGES")
BUCKETS: Final = (2, 4, 8)
LOWERINGS: Final = ("in_graph", "fused", "foreach")
FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE: Final = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool)


class Everything(Inputs):
    """Slots that take much: on the device and on the host, for the kernel and apart from it."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=1, converts=WHOLE)
    heats: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=2.5, converts=(*FLOATS, *WHOLE))
    halves: torch.Tensor = copied(BATCH, dtype=torch.float16, pad=-0.5, converts=FLOATS)
    flags: torch.Tensor = copied(BATCH, dtype=torch.bool, pad=True, converts=(*WHOLE, *FLOATS))
    mrope: torch.Tensor = copied(
        3, TOKENS, dtype=torch.int64, pad=7, strided=True, converts=(torch.int32, torch.float32)
    )
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1, strided=True, converts=(torch.int64,))
    here: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=-9, placement=HOST, strided=True, converts=(*WHOLE, *FLOATS)
    )
    there: torch.Tensor = copied(2, BATCH, dtype=torch.float64, pad=0.5, placement=HOST, converts=(torch.float32,))
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.bfloat16, pad=4, default=None, converts=(torch.float64,))
    beside: torch.Tensor = copied(BATCH, dtype=torch.uint8, pad=5, source=side("beside"), converts=(torch.int64,))


SLOTS = Everything.slotgraph.slots
EXTREMES: Final = (math.inf, -math.inf, math.nan, 1e300, -1e-310, 65519.99, 65520.0, 3.5e38, -0.0, 1.0004882812500002)


def runner_of(backend: Backend | str, lowering: str) -> DecodeRunner[Everything]:
    """A captured runner."""
    options: dict[str, Any] = {"buckets": BUCKETS, "sizes": {PAGES: 5}, "absent": [{"extra"}], "progress": False}
    runner = DecodeRunner(Everything, digest_step, backend=backend, lowering=lowering, **options)
    runner.capture()
    return runner


def values(name: str, dtype: torch.dtype, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Random numbers of all sizes, those on the verge of other dtypes among them, where a conversion is defined."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    if dtype.is_floating_point:
        made = torch.randn(shape, generator=draw, dtype=torch.float64) * 100
        slot: Any = SLOTS[name].dtype
        if slot.is_floating_point or slot == torch.bool:  # of other numbers no whole one is defined
            odd = torch.tensor(EXTREMES, dtype=torch.float64)[torch.randint(0, len(EXTREMES), shape, generator=draw)]
            made = torch.where(torch.rand(shape, generator=draw) < 0.5, made, odd)
        return made.to(dtype)
    bits = torch.randint(-(1 << 62), 1 << 62, shape, generator=draw)
    return (bits >> torch.randint(0, 62, shape, generator=draw)).to(dtype)


Formed = tuple[Any, torch.Tensor]


def _as_list(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    del buffers
    return value.tolist() if value.dtype == slot.dtype and value.numel() and value.isfinite().all() else None


def _as_array(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    del slot, buffers
    return None if value.dtype == torch.bfloat16 else value.numpy()


def _in_pieces(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    array = _as_array(value, slot, buffers)
    return None if array is None else array[..., ::-1].copy()[..., ::-1]


def _strided(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    del buffers
    return torch.stack([value, torch.ones_like(value)], -1)[..., 0] if slot.takes_strided() else None


def _columns(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    """The first columns of something wider: rows that lie apart."""
    del buffers
    return torch.cat([value, value], -1)[..., : value.shape[-1]] if slot.takes_strided() else None


def _negated(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    """A lazy negation, which torch shows nowhere in public."""
    del slot, buffers
    return None if value.dtype == torch.bool else vars(torch)["_neg_view"](value.neg())


def _askew(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    del slot, buffers
    if value.itemsize == 1 or not value.numel():
        return None
    data = bytearray(1) + bytearray(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(data, dtype=value.dtype, offset=1).view(value.shape)


def _own_rows(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    """What a producer wrote where it belongs."""
    name = next(name for name, one in SLOTS.items() if one is slot)
    if value.dtype != slot.dtype or not value.numel():
        return None
    return buffers[name].tensor[tuple(slice(0, size) for size in value.shape)].copy_(value)


def _other_slot(value: torch.Tensor, slot: Any, buffers: Any) -> Any:
    """Another slot's rows, whatever they hold."""
    del slot
    rows = buffers["ids"].tensor[1 : 1 + len(value)]
    return rows if value.dtype == torch.int64 and value.dim() == 1 and len(rows) == len(value) else None


FORMS: Final[Mapping[str, Callable[[torch.Tensor, Any, Any], Any]]] = {
    "plain": lambda value, *_: value,
    "list": _as_list,
    "array": _as_array,
    "pieces": _in_pieces,
    "strided": _strided,
    "columns": _columns,
    "negated": _negated,
    "askew": _askew,
    "own rows": _own_rows,
    "other slot": _other_slot,
}


def formed(runner: DecodeRunner[Any], name: str, value: torch.Tensor, form: str) -> Formed:
    """A value as a batch may bring it, and the same as a tensor of its own; as it is, where it has no such form."""
    plain = value.clone()
    made = FORMS[form](value, SLOTS[name], runner.graphs.buffers)
    if made is None:
        return value, plain
    return made, made.clone() if form == "other slot" else plain


Turn = tuple[int, int, int, bool, bool, bool]


def both(runner: DecodeRunner[Any], turn: Turn) -> tuple[Any, Any, dict[str, Any], dict[str, Any]]:
    """A batch of any forms, the same plainly, and what comes beside both."""
    rows, pages, seed, gone, mapping, _ = turn
    draw = torch.Generator().manual_seed(seed)
    sizes = {BATCH: rows, TOKENS: rows, PAGES: pages}
    brought: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    choices: dict[str, tuple[torch.Tensor, str]] = {}
    for name, slot in SLOTS.items():
        if not (gone and name == "extra"):
            dtypes: list[Any] = [slot.dtype, slot.dtype, *slot.converts_from()]
            dtype = dtypes[int(torch.randint(0, len(dtypes), (1,), generator=draw))]
            form = [*FORMS, "plain"][int(torch.randint(0, 1 + len(FORMS), (1,), generator=draw))]
            choices[name] = values(name, dtype, tuple(dim.at(sizes) for dim in slot.shape), draw), form
    for name, (value, form) in sorted(choices.items(), key=lambda one: one[1][1] != "own rows"):  # producers come first
        brought[name], plain[name] = formed(runner, name, value, form)
    beside = {"beside": brought.pop("beside")}, {"beside": plain.pop("beside")}
    return (brought if mapping else types.SimpleNamespace(**brought)), plain, *beside


turns = st.lists(
    st.tuples(
        st.integers(1, 8), st.integers(0, 5), st.integers(0, 1 << 30), st.booleans(), st.booleans(), st.booleans()
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture(scope="module")
def pairs() -> Callable[[str, str], tuple[DecodeRunner[Everything], DecodeRunner[Everything]]]:
    """A runner of one lowering, and one of the reference, made once."""
    made: dict[tuple[str, str], tuple[DecodeRunner[Everything], DecodeRunner[Everything]]] = {}

    def pair(backend: str, lowering: str) -> tuple[DecodeRunner[Everything], DecodeRunner[Everything]]:
        if (backend, lowering) not in made:
            made[backend, lowering] = runner_of(backend, lowering), runner_of(backend, "slot_by_slot")
        return made[backend, lowering]

    return pair


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("backend", ["cpu", "cpu-capture"])
@given(played=turns)
@settings(max_examples=min(100, settings().max_examples))
def test_any_habits_in_turn(backend: str, lowering: str, pairs: Any, played: list[Turn]) -> None:
    """Steps whose sources have any form and dtype give the reference's bytes, and none of them leaves its lowering."""
    mine, right = pairs(backend, lowering)
    for turn in [*played, *played]:
        batch, plain, beside, plainly = both(mine, turn)
        outputs = mine(batch, **beside) if turn[-1] else mine.replay(mine.fill(batch, **beside))
        assert_same_outputs(outputs, right(plain, **plainly))
    assert mine.stats()["detours"] == {}
    assert set(mine.stats()["lowerings"]) <= {lowering, *(["fused"] if lowering == "in_graph" else [])}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_bad_batch_among_habits(lowering: str) -> None:
    """A source that does not fit is refused by name whatever came before, and the next step is right."""
    mine, right = runner_of("cpu", lowering), runner_of("cpu", "slot_by_slot")
    bad: Mapping[str, Any] = {
        "ids": torch.ones(3),
        "lengths": [1, 2.5, 3],
        "heats": torch.ones(2),
        "here": ["a", "b", "c"],
        "there": torch.ones(3, 2, dtype=torch.float64).T,
        "tables": [[1, 2], [3], [4, 5]],
        "halves": [1e9, 2.0, 3.0],
    }
    for number, (name, source) in enumerate(bad.items()):
        for _ in range(2):
            batch, plain, beside, plainly = both(mine, (3, 2, number, False, True, True))
            assert_same_outputs(mine(batch, **beside), right(plain, **plainly))
            with pytest.raises(ValueError, match=f"slot '{name}'"):
                mine({**batch, name: source}, **beside)
            with pytest.raises(ValueError, match="side argument 'besides'"):
                mine(batch, **beside, besides=plain["ids"])
    assert mine.stats()["detours"] == {}


@final
class TwoStreams(HostBackend):
    """cpu-capture with streams by number. current: the one that work goes to. ordered: who waited for whom."""

    name: ClassVar[str] = "two-streams"

    def __init__(self) -> None:
        self._inner = CpuCaptureBackend()
        self.current = 0
        self.ordered: list[tuple[int, int]] = []

    @property
    def capabilities(self) -> Any:
        """As cpu-capture."""
        return self._inner.capabilities

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """With true capture semantics."""
        return self._inner.capture(step, pool=pool, error_mode=error_mode, parameters=parameters)

    def stream_key(self) -> Callable[[], int]:
        """The current one."""
        return lambda: self.current

    def order(self, first: int, then: int) -> None:
        """Note it."""
        self.ordered.append((first, then))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_two_streams_in_turn(lowering: str) -> None:
    """A step on another stream waits for the one before it, and one on the same stream waits for none."""
    backend = TwoStreams()
    mine, right = runner_of(backend, lowering), runner_of("cpu", "slot_by_slot")
    draw = torch.Generator().manual_seed(3)
    for number in range(60):
        before, backend.current = backend.current, int(torch.randint(0, 3, (1,), generator=draw))
        backend.ordered.clear()
        batch, plain, beside, plainly = both(mine, (3, 2, number % 5, number % 2 == 0, True, True))
        assert_same_outputs(mine(batch, **beside), right(plain, **plainly))
        assert set(backend.ordered) == ({(before, backend.current)} if before != backend.current else set())
    assert mine.stats()["detours"] == {}
    assert mine.stats()["lowerings"] == {lowering: 60}


class Rows(Inputs):
    """Slots of which rows may lie apart in the batch's memory."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    mrope: torch.Tensor = copied(3, TOKENS, dtype=torch.int64, pad=7, strided=True, converts=(torch.int32,))
    spans: torch.Tensor = copied(2, 2, BATCH, 3, dtype=torch.float32, pad=0.5, strided=True)


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operator, and run it."""
        del types
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


def rows_batch(rows: int, kind: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """A batch whose sources are the first columns of something wider."""
    draw = torch.Generator().manual_seed(seed)
    wide = torch.randint(-99, 99, (3, rows + 5), generator=draw).to(kind)
    spans = torch.rand(2, 2, rows + 4, 3, generator=draw)[:, :, :rows]
    return {"ids": torch.randint(1, 99, (rows,), generator=draw), "mrope": wide[:, :rows], "spans": spans}


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_rows_that_lie_apart_are_read_as_they_lie(kind: torch.dtype) -> None:
    """The kernel reads the first columns of something wider: no copy of them is made before it."""
    mine, right = (
        DecodeRunner(Rows, digest_step, buckets=[4, 8], backend="cpu-capture", lowering=lowering)
        for lowering in ("in_graph", "slot_by_slot")
    )
    seen: list[list[str]] = []
    for runner in (mine, right):
        runner.capture()
    for seed in range(4):
        batch = rows_batch(3 + seed % 2, kind, seed)
        with Seen() as counted:
            outputs = mine(batch)
        seen.append(counted.operators)
        assert_same_outputs(outputs, right(batch))
    assert not [one for one in seen[-1] if "clone" in one or "contiguous" in one]


class Functions(TorchFunctionMode):
    """Lists torch's functions that are called, as a default device is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note one function, and call it."""
        del types
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


def calls_told(lowering: str, slots: int) -> list[str]:
    """Torch's functions that a mode is told of in a step over so many slots."""
    body = {f"slot_{number}": copied(TOKENS, dtype=torch.int64, pad=0) for number in range(slots)}
    annotated = {"__annotations__": dict.fromkeys(body, torch.Tensor)}
    inputs = types.new_class("Many", (Inputs,), {}, lambda space: space.update(annotated | body))
    runner: Any = DecodeRunner(
        inputs, lambda view: view.slot_0 + 1, buckets=[4], backend="cpu-capture", lowering=lowering
    )
    runner.capture()
    batch = {name: torch.arange(3) for name in body}
    runner(batch)
    with Functions() as counted:
        outputs = runner(batch)
    assert outputs.tolist() == [1, 2, 3]
    called: list[str] = counted.called
    return called


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_modes_are_not_told_of_each_source(lowering: str) -> None:
    """A mode that watches torch's functions, such as a default device, is told of no more with more slots."""
    assert len(calls_told(lowering, 3)) == len(calls_told(lowering, 24))


class Large(Inputs):
    """Slots with small tails and with large ones, of one dim that varies and of two."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=3)
    hidden: torch.Tensor = copied(TOKENS, 1024, dtype=torch.float32, pad=0.0)
    tables: torch.Tensor = copied(BATCH, PAGES, dtype=torch.int32, pad=-1)
    heats: torch.Tensor = copied(BATCH, PAGES, 700, dtype=torch.float32, pad=0.0)


def large_batch(rows: int, pages: int, seed: int) -> dict[str, torch.Tensor]:
    """Random values."""
    draw = torch.Generator().manual_seed(seed)
    ids, lengths = torch.randint(1, 99, (2, rows), generator=draw)
    hidden, heats = torch.rand(rows, 1024, generator=draw), torch.rand(rows, pages, 700, generator=draw)
    tables = torch.randint(1, 99, (rows, pages), generator=draw)
    return {"ids": ids, "lengths": lengths.int(), "hidden": hidden, "tables": tables.int(), "heats": heats}


def test_sizes_in_any_order() -> None:
    """Whatever live size comes after whatever other, over several buckets, tails are as the reference leaves them."""
    made = [
        DecodeRunner(Large, digest_step, buckets=[2, 16, 32], sizes={PAGES: 4}, backend="cpu", lowering=lowering)
        for lowering in ("foreach", "slot_by_slot")
    ]
    for runner in made:
        runner.capture()
    draw = torch.Generator().manual_seed(1)
    for seed in range(120):
        rows, pages = (int(torch.randint(0, most, (1,), generator=draw)) for most in (33, 5))
        batch = large_batch(rows, pages, seed)
        mine, right = (runner(batch) for runner in made)
        assert_same_outputs(mine, right)


class Plain(Inputs):
    """Slots with small tails."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    lengths: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=3)
    heats: torch.Tensor = copied(BATCH, 3, dtype=torch.float32, pad=0.0)


def test_sizes_that_were_seen_once_cut_no_more_views() -> None:
    """Once each live size came, a fill of any of them after any other cuts nothing anew."""
    options: dict[str, Any] = {"buckets": [48], "backend": "cpu", "lowering": "foreach", "output_rows": None}
    runner = DecodeRunner(Plain, lambda view: view.ids + 1, **options)
    runner.capture()
    sizes = list(range(1, 49))
    batches = {
        rows: {"ids": torch.arange(rows), "lengths": torch.arange(rows).int(), "heats": torch.rand(rows, 3)}
        for rows in sizes
    }
    draw = torch.Generator().manual_seed(2)
    with Seen() as counted:  # a mode that watches operators is part of what a guard looks at
        for rows in (*sizes, *reversed(sizes)):
            runner(batches[rows])
        counted.operators.clear()
        for rows in torch.randint(1, 49, (200,), generator=draw).tolist():
            runner(batches[rows])
    assert not [one for one in counted.operators if "slice" in one]
