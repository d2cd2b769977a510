"""The kernel for lists of attention, in Triton's interpreter and on a device, beside the functions it stands for."""

import importlib
import sys
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, attention
from slotgraph.backends.cuda import CudaBackend
from slotgraph.dataflow.axes import extent
from slotgraph.dataflow.sources import compute_of
from slotgraph.runners.attention import layouts, parts
from tests.triton_interpreter import interpreted

KERNEL: Final = "slotgraph.runners.attention.lists_kernel"
SETS: Final[dict[str, Any]] = {
    "FlashAttention": layouts.flash_attention_lists,
    "FlashInferDecode": layouts.flashinfer_lists,
    "FlashInferVerify": layouts.flashinfer_query_lists,
    "TritonDecode": layouts.split_token_lists,
    "TritonBalanced": layouts.token_lists,
    "FlexDecode": layouts.flex_lists,
    "FlashMLA": layouts.flash_mla_lists,
    "WindowCache": parts.window_bounds,
    "FlashInferWindow": parts.window_page_lists,
    "TritonWindow": parts.window_token_lists,
}
UNUSED: Final = (
    "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k", "kv_last_page_len", "num_kv_splits", "num_splits",
    "window_kv_offsets", "window_kv_lens", "window_num_kv_splits",
)  # fmt: skip
"""Slots that a declaration may drop, and keep the kernel for the others."""
BLOCK: Final = 8
"""Items that a program writes at a time, fewer than a request has."""


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Any:
    """Where the kernel runs."""
    if request.param == "cuda":
        if not (available := CudaBackend.is_available()):
            pytest.skip(f"cuda: {available.reason}")
        yield torch.device("cuda")
        return
    module: ModuleType = interpreted(KERNEL)
    language: Any = importlib.import_module("triton.language")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, KERNEL, module)
        patch.setattr(module, "BLOCK", BLOCK)
        standard = language.standard
        patch.setattr(language, "sum", lambda one: language.reduce(one, 0, standard._sum_combine))
        patch.setattr(language, "max", lambda one: language.reduce(one, 0, standard._elementwise_max))
        patch.setattr(language, "min", lambda one: language.reduce(one, 0, standard._elementwise_min))
        patch.setattr(language, "cumsum", lambda one: language.associative_scan(one, 0, standard._sum_combine))
        yield torch.device("cpu")


@pytest.mark.parametrize("name", SETS)
@settings(max_examples=settings().max_examples // 3)  # the interpreter is slow
@given(data=st.data(), page=st.sampled_from([1, 3, 16]), columns=st.integers(1, 20), rows=st.integers(1, 9))
def test_the_kernel_writes_what_the_functions_return(
    name: str, device: torch.device, data: st.DataObject, page: int, columns: int, rows: int
) -> None:
    """Random lengths, none and full ones too, and rows of a wider table; nothing else is written."""
    width, most = data.draw(st.integers(1, 3)), columns * page
    lens = data.draw(st.lists(st.sampled_from([0, 1, page, most]) | st.integers(0, most), min_size=rows, max_size=rows))
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    wide = torch.randint(0, 1000, (rows, 2 * columns), generator=seed, dtype=torch.int32).to(device)
    given_ = {
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "page_table": data.draw(st.sampled_from([wide[:, :columns], wide[:, ::2]])),
        "page_size": torch.tensor([page], dtype=torch.int32, device=device),
        "split_tile_size": torch.tensor([5], dtype=torch.int32, device=device),
        "extend_seq_lens": torch.randint(0, 7, (rows,), generator=seed, dtype=torch.int32).to(device),
    }
    window = data.draw(st.integers(1, 2 * most))
    given_["window_size"] = torch.tensor([window], dtype=torch.int32, device=device)
    given_["window_page_table"] = given_["page_table"].flip(1)
    compute = compute_of(SETS[name])
    sizes = {
        attention.PAGES: columns,
        attention.PAGE_SIZE: page,
        attention.SM_PARTS: data.draw(st.integers(1, 20)),
        attention.WINDOW: window,
    }
    slots = getattr(attention, name).slotgraph.slots
    dropped = [one for one in UNUSED if one in compute.fills and data.draw(st.booleans())]
    kept = [slot for slot in compute.fills if slot not in dropped]
    made, expected = (buffers(slots, kept, sizes, rows, width, device) for _ in range(2))
    arguments = {need: given_[need] for need in compute.needs}
    if compute.writes_out:
        compute.function(**arguments, out={slot: one[:-1].view(shape) for slot, (one, shape) in expected.items()})
    else:
        values = dict(zip(compute.fills, compute.function(**arguments), strict=True))
        for slot, (one, shape) in expected.items():
            assert values[slot].dtype == one.dtype
            one[:-1].view(shape).copy_(values[slot])
    assert compute.kernel is not None
    compute.kernel(**arguments, out={slot: one[:-1].view(shape) for slot, (one, shape) in made.items()})
    for slot in kept:
        assert torch.equal(made[slot][0], expected[slot][0]), slot


def buffers(slots: Any, names: Any, sizes: Any, rows: int, width: int, device: torch.device) -> dict[str, Any]:
    """A poisoned buffer for each slot, with one element behind it that must stay as it is, and the slot's shape."""
    found = {}
    for name in names:
        shape = extent(slots[name].shape, {**sizes, BATCH: rows, TOKENS: rows * width})
        count = int(torch.Size(shape).numel())
        found[name] = torch.full((count + 1,), -7, dtype=slots[name].dtype, device=device), shape
    return found


@pytest.mark.parametrize("name", SETS)
def test_lengths_that_are_too_long_are_written_nowhere_else(name: str, device: torch.device) -> None:
    """As a check has them in padded rows: the plain functions raise, the kernel keeps to the slots."""
    rows, columns, page, width = 5, 4, 3, 2
    compute, slots = compute_of(SETS[name]), getattr(attention, name).slotgraph.slots
    given_ = {
        "seq_lens": torch.tensor([7, 1 << 29, 12, 1 << 29, 3], dtype=torch.int32, device=device),
        "page_table": torch.ones(rows, columns, dtype=torch.int32, device=device),
        "page_size": torch.tensor([page], dtype=torch.int32, device=device),
        "split_tile_size": torch.tensor([5], dtype=torch.int32, device=device),
        "extend_seq_lens": torch.ones(rows, dtype=torch.int32, device=device),
        "window_size": torch.tensor([4], dtype=torch.int32, device=device),
        "window_page_table": torch.ones(rows, columns, dtype=torch.int32, device=device),
    }
    sizes = {attention.PAGES: columns, attention.PAGE_SIZE: page, attention.SM_PARTS: 7}
    sizes[attention.WINDOW] = 4
    whole = torch.full((1 << 16,), -7, dtype=torch.int64, device=device)  # all slots lie in it, with room between
    outs, free = {}, torch.ones(1 << 16, dtype=torch.bool, device=device)
    for number, slot in enumerate(compute.fills):
        shape = extent(slots[slot].shape, {**sizes, BATCH: rows, TOKENS: rows * width})
        begin, count = (number + 1) << 13, int(torch.Size(shape).numel())
        memory = whole[begin : begin + count * slots[slot].dtype.itemsize // 8 + 1]
        outs[slot] = memory.view(slots[slot].dtype)[:count].view(shape)
        free[begin : begin + len(memory)] = False
    assert compute.kernel is not None
    compute.kernel(**{need: given_[need] for need in compute.needs}, out=outs)
    assert (whole[free] == -7).all()
