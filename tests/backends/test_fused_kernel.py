"""The fused kernel on host memory, in Triton's interpreter and on a device, held to copy_ and fill_ byte for byte."""

import functools
import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, final

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner
from slotgraph.backends import Fusion, Graph
from slotgraph.backends.cpu import HOST_FUSION, CallableGraph, HostBackend
from slotgraph.backends.cuda import CudaBackend
from slotgraph.dataflow.buffers import span
from slotgraph.dataflow.hostdata import bytes_of_ragged
from slotgraph.dataflow.packet import (
    CODES,
    HEAD,
    KEPT_ROW,
    RAGGED,
    Lane,
    code_of,
    converts,
    has_lane,
    head_bytes,
    row_stride,
    table_of,
)
from slotgraph.dataflow.ragged import Ragged
from slotgraph.dataflow.tails import Number
from tests.dataflow import test_ragged
from tests.life import test_ahead as ahead
from tests.triton_interpreter import interpreted, need_triton

KERNEL = "slotgraph.backends.cuda_kernel"
DTYPES = (*CODES, torch.uint16, torch.float64, torch.complex64)
PAIRS = [(one, other) for one in CODES for other in CODES if one != other and converts(one, other)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
OWNERS = st.integers(1, (1 << 31) - 1)
"""Numbers that a table may have."""
MARGIN = 64
"""Bytes around each buffer that must stay as they are."""


Run = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor], int], None]
"""A launch, by the table, the packet, the buffers and the sources that these point to, and the words of a block."""


@attrs.frozen
class Way:
    """One way to run the kernel.

    blocks: elements for each table row that are tried. exact: whether a converted NaN has the reference's very bits,
    which on the CPU depend on torch's vector code. programs: about how many one launch may have at most.
    """

    device: torch.device
    blocks: tuple[int, int, int]
    exact: bool
    run: Run
    programs: int = 1 << 30


def by_triton(module: Any, table: torch.Tensor, packet: torch.Tensor, block: int) -> None:
    """The kernel of a module, compiled or interpreted."""
    module.fill_lanes[(len(table),)](table, packet, ADVANCE=False, BLOCK=block, num_warps=module.WARPS)


def on_device() -> Way:
    """The compiled kernel on the current device."""
    available = CudaBackend.is_available()
    if not available:
        pytest.skip(f"cuda: {available.reason}")
    need_triton()
    module = importlib.import_module(KERNEL)
    device = torch.device("cuda", torch.cuda.current_device())
    exact = torch.cuda.get_device_capability(device) >= (8, 0)  # before, torch rounds to bfloat16 in code of its own
    run: Run = lambda table, packet, _buffers, _sources, block: by_triton(module, table, packet, block)
    return Way(device, (8, 64, module.BLOCK), exact=exact, run=run)


def watched(module: ModuleType) -> Run:
    """A module's kernel in the interpreter: it may access only what it is given, and as a device would."""
    builder: Any = importlib.import_module("triton.runtime.interpreter").interpreter_builder

    def run(
        table: torch.Tensor,
        packet: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        block: int,
    ) -> None:
        spans = [span(tensor) for tensor in (table, packet, *buffers, *sources)]
        lows, highs = (np.array(ends, np.uint64) for ends in zip(*spans, strict=True))

        def checked(access: Callable[..., Any], mask: int) -> Callable[..., Any]:
            def call(pointers: Any, *rest: Any) -> Any:
                size = pointers.get_element_ty().primitive_bitwidth // 8
                used = pointers.data[np.broadcast_to(rest[mask].data, pointers.data.shape)]
                inside = (used[:, None] >= lows) & (used[:, None] + np.uint64(size) <= highs)
                assert inside.any(axis=1).all(), "out of bounds"
                assert not (used % size).any(), "misaligned"
                return access(pointers, *rest)

            return call

        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):  # float16 overflows as it should
            for name, mask in (("create_masked_load", 0), ("create_masked_store", 1)):
                patch.setattr(builder, name, checked(getattr(builder, name), mask))
            by_triton(module, table, packet, block)

    return run


@pytest.fixture(scope="module", params=["host", "interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def kernel(request: pytest.FixtureRequest) -> Way:
    """Each way that can be gone here."""
    if request.param == "cuda":
        return on_device()
    here = torch.device("cpu")
    if request.param == "interpreter":  # which takes a millisecond for each program
        return Way(here, (8, 64, 1024), exact=False, run=watched(interpreted(KERNEL)), programs=48)
    return Way(here, (8, 64, HOST_FUSION.block), exact=False, run=lambda *given: HOST_FUSION.kernel(*given[:3])())


@attrs.frozen
class Case:
    """One lane: a view of a buffer with room for more rows, and what a step does to it.

    dim: the dim that varies. before, ahead: elements that come before the buffer, and before the source. turned: the
    buffer has a dim of one whose stride says nothing. action: copy, reset the tail alone, or leave the lane as it is.
    apart: units of that dim by which the source's rows lie apart. bits: of the source, where they are known. own: live
    rows along the first dim, where that varies, too. lengths: of the live rows, where these are ragged. kept: ragged
    rows that stay as they are.
    """

    dtype: torch.dtype
    source: torch.dtype
    shape: tuple[int, ...]
    dim: int | None
    live: int
    seed: int
    room: int = 0
    pad: Number | None = None
    action: str = "copy"
    before: int = 0
    ahead: int = 0
    turned: bool = False
    apart: int = 0
    bits: torch.Tensor | None = None
    own: int | None = None
    lengths: tuple[int, ...] | None = None
    kept: frozenset[int] = frozenset()

    @property
    def varying(self) -> tuple[int, ...]:
        """The dims of the view that vary."""
        if self.dim is None:
            return ()
        last = self.dim + self.turned
        return (last,) if self.own is None else (0, last)

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        whole = self.whole
        data = raw[MARGIN + self.before * self.dtype.itemsize :][: math.prod(whole) * self.dtype.itemsize]
        buffer = data.view(self.dtype).view(whole)
        if self.turned:
            buffer = buffer.unsqueeze(0).transpose(0, 1)
        return buffer if self.dim is None else buffer.narrow(self.dim + self.turned, 0, self.shape[self.dim])

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(size + self.room * (dim == self.dim) for dim, size in enumerate(self.shape))

    def buffer(self, device: torch.device) -> torch.Tensor:
        nbytes = math.prod(self.whole) * self.dtype.itemsize + self.before * self.dtype.itemsize
        return noise(nbytes + 2 * MARGIN, torch.uint8, self.seed).to(device)

    def values(self, device: torch.device) -> torch.Tensor:
        """A source of known bits, or of random ones, from somewhere within a larger tensor."""
        if self.bits is not None:
            return self.bits.view(self.source).to(device)
        if self.lengths is not None:
            flat, ends = torch.cat([self.bits_of_row(0)[:0], *self.rows()]), np.cumsum([0, *self.lengths])
            rows = Ragged(flat, offsets=ends) if self.ahead else Ragged(self.wider(), counts=self.lengths)
            anything: Any = None  # as slots are asked only what they convert
            packed = bytes_of_ragged(anything, self.dtype, lambda: self.live, rows, (self.live, self.shape[1]))
            made = torch.frombuffer(bytearray(packed or bytes(8)), dtype=torch.uint8)
            for row in self.kept:
                made[8 * row : 8 * row + 8].view(torch.int64).fill_(KEPT_ROW)
            return made.to(device)
        own = self.shape if self.own is None else (self.own, *self.shape[1:])
        shape = tuple(self.live + self.apart if dim == self.dim else size for dim, size in enumerate(own))
        values = noise(self.ahead + math.prod(shape), self.source, self.seed + 1).to(device)[self.ahead :].view(shape)
        values = values if self.dim is None else values.narrow(self.dim, 0, self.live)
        return values.unsqueeze(1) if self.turned else values

    def bits_of_row(self, row: int) -> torch.Tensor:
        """Random values for a whole row."""
        return noise(self.shape[1] + self.apart, self.dtype, self.seed + 1 + row)

    def rows(self) -> list[torch.Tensor]:
        """The ragged rows."""
        return [self.bits_of_row(row)[:length] for row, length in enumerate(self.lengths or ())]

    def wider(self) -> torch.Tensor:
        """A table that has the rows, with other values behind them."""
        made = torch.empty(self.live, self.shape[1] + self.apart, dtype=self.dtype)
        for number, row in enumerate(made):
            row.copy_(self.bits_of_row(number))
        return made

    def lane(self, raw: torch.Tensor, count: int) -> Lane:
        """The lane, whose live rows are two of a packet's counts, from `count` on."""
        view, varying = self.view(raw), self.varying
        assert not has_lane(self.dtype, tuple(view.shape), varying)
        lane = Lane.of("x", view, varying, self.pad)
        if len(varying) == 2:
            lane = attrs.evolve(lane, within=math.prod(view.shape[1 : varying[1]]), owns=count + 1)
        return attrs.evolve(lane, count=count) if varying else lane

    @property
    def counts(self) -> tuple[int, int]:
        """The live rows along both dims."""
        return self.live, 0 if self.own is None else self.own

    @property
    def word(self) -> int:
        """The lane's first word."""
        return -1 if self.action == "leave" else code_of(self.source, self.dtype)

    def pace(self, values: torch.Tensor) -> int:
        """The lane's second word: elements from one row of the source to the next, 0 where none are between them."""
        if self.lengths is not None:
            return RAGGED if self.action != "reset" else 0
        if self.dim is None or values.is_contiguous():
            return 0
        found = row_stride(values, self.varying)
        assert found is not None
        return found

    def refer(self, raw: torch.Tensor, values: torch.Tensor) -> None:
        view = self.view(raw)
        if self.lengths is not None and self.action == "copy":
            assert self.pad is not None
            for number, row in enumerate(self.rows()):
                if number in self.kept:
                    continue
                view[number].fill_(self.pad)[: len(row)].copy_(row)
        elif self.action == "copy":
            self.filled(view).copy_(values)
        if self.action != "leave" and self.pad is not None and self.dim is not None:
            view.narrow(self.dim + self.turned, self.live, self.shape[self.dim] - self.live).fill_(self.pad)
            if self.own is not None:
                view.narrow(0, self.own, self.shape[0] - self.own).fill_(self.pad)

    def filled(self, view: torch.Tensor) -> torch.Tensor:
        """The part of a view that the source goes to."""
        if self.own is not None:
            view = view.narrow(0, 0, self.own)
        return view if self.dim is None else view.narrow(self.dim + self.turned, 0, self.live)

    def forgive(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Give converted NaNs the bits of the reference's, where that has a NaN too."""
        if self.action == "copy" and self.source != self.dtype and self.dtype.is_floating_point:
            one, other = (self.filled(self.view(raw)) for raw in (got, wanted))
            one.copy_(torch.where(one.isnan() & other.isnan(), other, one))


def pads(dtype: torch.dtype) -> st.SearchStrategy[Number | None]:
    """Values for a tail, the odd ones of the dtype among them, or none."""
    if dtype == torch.bool:
        return st.sampled_from((None, False, True))
    if dtype.is_floating_point or dtype.is_complex:
        return st.sampled_from((None, 0.5, -3, math.nan, -0.0, math.inf, -math.inf, torch.finfo(dtype).max))
    info = torch.iinfo(dtype)
    return st.sampled_from((None, info.min, info.max, max(-1, info.min), 7))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lanes of all dtypes and shapes, at places that allow moves of eight or sixteen bytes, or only seem to."""
    same = st.sampled_from([(dtype, dtype) for dtype in DTYPES])
    source, dtype = draw(st.one_of(same, same, st.sampled_from(PAIRS)))
    outer = draw(st.sampled_from(((), (), (1,), (2,), (5,), (2, 3))))
    inner = draw(st.sampled_from(((), (), (1,), (3,), (7,), (64,), (2, 8), (1025,))))
    rows_step, live_step, step = (draw(st.sampled_from(steps)) for steps in ((1, 8, 16), (1, 8, 16), (1, 16, 16)))
    rows = rows_step * draw(st.integers(0, 2 + 200 // math.prod(inner) // rows_step))
    dim = draw(st.sampled_from((len(outer), len(outer), len(outer), None)))
    offsets = st.integers(0, 3)
    return Case(
        dtype=dtype,
        source=source,
        shape=(*outer, rows, *inner) if dim is not None or rows else (),
        dim=dim,
        live=min(rows, live_step * draw(st.integers(0, -(-rows // live_step)))),
        room=step * draw(offsets),
        pad=draw(pads(dtype)),
        action=draw(st.sampled_from(("copy", "copy", "copy", "reset", "leave"))),
        before=step * draw(offsets),
        ahead=step * draw(offsets),
        apart=step * draw(offsets) if dim else 0,
        turned=dim is not None and dim > 0 and draw(st.booleans()),
        own=draw(st.none() | st.integers(0, outer[0])) if outer and dim is not None else None,
        seed=draw(st.integers(0, 1 << 32)),
    )


@st.composite
def ragged_cases(draw: st.DrawFn) -> Case:
    """Lanes whose rows have different lengths, empty and full ones among them, over buffers full of noise."""
    dtype, columns, live = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 70)), draw(st.integers(0, 9))
    length = st.sampled_from((0, columns)) | st.integers(0, columns)
    return Case(
        dtype=dtype,
        source=dtype,
        shape=(live + draw(st.integers(0, 5)), columns),
        dim=0,
        live=live,
        seed=draw(st.integers(0, 1 << 32)),
        room=draw(st.integers(0, 3)),
        pad=draw(pads(dtype).filter(lambda pad: pad is not None)),
        action=draw(st.sampled_from(("copy", "copy", "copy", "reset", "leave"))),
        before=draw(st.integers(0, 3)),
        ahead=draw(st.integers(0, 1)),
        apart=draw(st.integers(0, 3)),
        lengths=tuple(draw(st.lists(length, min_size=live, max_size=live))),
        kept=draw(st.frozensets(st.integers(0, live - 1))) if live else frozenset(),
    )


def float_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every float of two bytes; of four, every upper half with lower halves on, above and below all ties."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    if dtype != torch.float32:
        return upper.to(torch.uint16)
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    return (upper[:, None] << 16 | lower).flatten().to(torch.uint32)


def noise(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits; truth values are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def fill(kernel: Way, cases: Sequence[Case], block: int, *, owner: int = 1, meant_for: int | None = None) -> None:
    """Run it, and compare every byte of every buffer with torch's; meant_for: the packet's owner, where not ours."""
    raws = [case.buffer(kernel.device) for case in cases]
    wanted = [raw.clone() for raw in raws]
    values = [case.values(kernel.device) for case in cases]
    lanes = [case.lane(raw, 1 + 2 * number) for number, (case, raw) in enumerate(zip(cases, raws, strict=True))]
    counts = [1, *itertools.chain.from_iterable(case.counts for case in cases)]
    words = [case.word for case in cases]
    paces = [case.pace(v) for case, v in zip(cases, values, strict=True)]
    sources = [v.data_ptr() if case.action != "reset" else 0 for case, v in zip(cases, values, strict=True)]
    block = max(block, 1 << (sum(lane.outer * lane.row for lane in lanes) // kernel.programs).bit_length())
    table = torch.from_numpy(table_of(lanes, block, owner, len(counts))).to(kernel.device)
    head = [owner if meant_for is None else meant_for, *(0,) * (HEAD - 1), *counts, *[0] * len(counts)]
    packet = torch.tensor([*head, *words, *paces, *sources], device=kernel.device)
    assert packet.nbytes == head_bytes(len(lanes), len(counts))
    if len(table):
        kernel.run(table, packet, raws, values, block)
    for case, got, want, source in zip(cases, raws, wanted, values, strict=True):
        if meant_for is None:
            case.refer(want, source)
            if not kernel.exact:
                case.forgive(got, want)
        assert torch.equal(got, want), f"{case}: bytes {(got != want).nonzero().flatten().tolist()[:20]}"


@given(lanes=st.lists(cases() | ragged_cases(), min_size=1, max_size=3), block=st.integers(0, 2), owner=OWNERS)
@settings(max_examples=min(300, settings().max_examples))  # the interpreter takes 50 ms for one
def test_lanes_are_filled_as_by_torch_and_nothing_else_changes(
    kernel: Way, lanes: list[Case], block: int, owner: int
) -> None:
    """Lanes are copied, converted, laid out and padded as by torch, and no other byte of any buffer changes."""
    fill(kernel, lanes, kernel.blocks[block], owner=owner)


@given(lanes=st.lists(cases(), min_size=1, max_size=3), owner=OWNERS, other=st.one_of(st.just(0), OWNERS))
@settings(max_examples=10)
def test_a_packet_that_is_not_armed_fills_nothing(kernel: Way, lanes: list[Case], owner: int, other: int) -> None:
    """A packet that is not armed, or is meant for another table, fills nothing."""
    fill(kernel, lanes, kernel.blocks[-1], owner=owner, meant_for=other if other != owner else 0)


def test_every_mix_of_alignments_is_copied_right(kernel: Way) -> None:
    """Every mix of places that are multiples of four, eight and sixteen bytes, and that are not."""
    mixes = itertools.product((16, 20, 24), (0, 4, 8, 13), (0, 1, 4, 8), (0, 4, 8))
    lanes = [
        Case(torch.uint8, torch.uint8, (rows,), 0, live, number, room=5, pad=7, before=before, ahead=ahead)
        for number, (rows, live, before, ahead) in enumerate(mixes)
    ]
    fill(kernel, lanes, kernel.blocks[1])


@given(live=st.integers(0, 96), seed=st.integers(0, 1 << 32), block=st.integers(0, 2))
@settings(max_examples=5)
def test_every_conversion_gives_what_torch_gives(kernel: Way, live: int, seed: int, block: int) -> None:
    """Every pair of dtypes that may be converted is, whole numbers by wrapping."""
    lanes = [
        Case(target, source, (96,), 0, live, seed + number, room=1, pad=target == torch.bool or 1, ahead=1)
        for number, (source, target) in enumerate(PAIRS)
    ]
    fill(kernel, lanes, kernel.blocks[block])


def test_every_float_is_rounded_to_the_nearest(kernel: Way) -> None:
    """Floats are rounded to the nearest, ties to even: denormals, infinities and NaNs too."""
    pairs = [(float_bits(source), source, target) for source, target in itertools.product(FLOATS, repeat=2)]
    lanes = [Case(target, source, (len(bits),), 0, len(bits), 1, bits=bits) for bits, source, target in pairs]
    fill(kernel, lanes, kernel.blocks[-1])


@pytest.mark.parametrize("chip", [80, 90])
def test_the_kernel_compiles_for_chips_that_are_not_here(
    chip: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler takes the kernel for chips that are not here: no shared memory, moves of eight bytes."""
    need_triton()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler, targets = (importlib.import_module(f"triton.{name}.compiler") for name in ("compiler", "backends"))
    module = importlib.import_module(KERNEL)
    signature = {"table": "*i64", "packet": "*i64", "ADVANCE": "constexpr", "BLOCK": "constexpr"}
    source = compiler.ASTSource(module.fill_lanes, signature, {"ADVANCE": False, "BLOCK": module.BLOCK})
    target = targets.GPUTarget("cuda", chip, 32)
    options = {"num_warps": module.WARPS, "enable_fp_fusion": True}  # whose default differs by version
    made = compiler.compile(source, target=target, options=options)
    assert made.metadata.shared == 0
    assert [one in made.asm["ptx"] for one in ("ld.global.b64", "st.global.b64", "ld.local")] == [True, True, False]


@final
class Interpreting(HostBackend):
    """The CPU, whose fused fills and edits are Triton's interpreter's."""

    name = "interpreting"
    module: ModuleType

    def capture(self, step: Callable[[], Any], **_: Any) -> Graph:
        return CallableGraph(step)

    def fusion(self) -> Fusion:
        return Fusion(self.module.BLOCK, self.module.filling, self.module.editing)


def test_the_kernel_advances_and_edits_as_plain_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that follow one another, with requests that leave, join and change: no output and no byte differs."""
    backend = Interpreting()
    backend.module = interpreted(KERNEL)
    options: Any = {"sizes": {ahead.PAGES: ahead.WIDE}, "buckets": (4, 8, ahead.MOST), "lowering": "in_graph"}

    @functools.cache
    def runner_on(_: str, __: str, done: str | None = None) -> DecodeRunner[Any]:
        given: Any = {"chunks": ahead.CHUNKS, "done": done, **options}
        runner = DecodeRunner(ahead.AheadInputs, ahead.step, backend=backend, output_rows=BATCH, **given)
        runner.capture()
        return runner

    monkeypatch.setattr(ahead, "runner_on", runner_on)
    test_ragged.play(backend, lowering="in_graph")
    ahead.play([("interpreting", "in_graph")], examples=2, count=8)
