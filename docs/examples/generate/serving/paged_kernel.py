"""A Triton kernel of our own: each request's newest token attends over the pages of its cache, in parts (split-KV)."""

# Triton's language is no typed Python: it infers types, and capitals are values that it compiles in.
# ruff: noqa: ANN001, ANN201, N803, PLR0913, PLR0917 - see above; and many arguments
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, Final

import torch
import triton
import triton.language as tl

PART: Final = 256
"""Tokens in a part. Parts depend on a request's own length alone, so its result is the same in any batch."""
BLOCK_BYTES: Final = 128
"""How many tokens a program reads at once, times the bytes of an element."""
LEAST: Final = 16
"""The fewest rows and columns that a product has on tensor cores."""
FUSED: Final = {"enable_fp_fusion": True}
"""Products are added in one instruction. Triton's default differs by version, and 3.9 warns of it."""


@triton.jit
def attend_part(
    query, keys, values, page_table, seq_lens, out, logs, scale, width,
    PAGE: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_GROUP: tl.constexpr, BLOCK_HEAD: tl.constexpr, WORK: tl.constexpr,
):  # fmt: skip
    """Let all query heads of one KV head see one part of a request's tokens.

    out: [rows, heads, parts, head size], zeros for a part without tokens. logs: the logarithm of the sum of each part's
    exponentials, [rows, heads, parts], minus infinity for a part without tokens. width: pages in a row of page_table.
    """
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    kv_heads, parts = tl.num_programs(1), tl.num_programs(2)
    group, dims, block = tl.arange(0, BLOCK_GROUP), tl.arange(0, BLOCK_HEAD), tl.arange(0, BLOCK)
    is_dim = dims[None, :] < HEAD
    is_asked = (group[:, None] < GROUP) & is_dim
    heads = (row * kv_heads + head) * GROUP + group
    q = tl.load(query + heads[:, None] * HEAD + dims[None, :], mask=is_asked, other=0.0).to(WORK)

    best = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    found = tl.zeros([BLOCK_GROUP, BLOCK_HEAD], tl.float32)
    length = tl.minimum(tl.load(seq_lens + row).to(tl.int32), width * PAGE)
    end = tl.minimum(length, (part + 1) * PART)
    for begin in range(part * PART, end, BLOCK):
        tokens = begin + block
        is_seen = tokens < end
        page = tl.load(page_table + row * width + tokens // PAGE, mask=is_seen, other=0).to(tl.int64)
        places = ((page * PAGE + tokens % PAGE) * kv_heads + head) * HEAD
        cells, is_cell = places[:, None] + dims[None, :], is_seen[:, None] & is_dim
        k = tl.load(keys + cells, mask=is_cell, other=0.0).to(WORK)
        v = tl.load(values + cells, mask=is_cell, other=0.0).to(WORK)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        larger = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - larger[:, None])
        shrink = tl.exp(best - larger)
        found = found * shrink[:, None] + tl.dot(weights.to(WORK), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = larger

    total = tl.where(total > 0, total, 1.0)
    found = (found / total[:, None]).to(out.dtype.element_ty)
    places = heads * parts + part
    tl.store(logs + places, best + tl.log(total), mask=group < GROUP)
    tl.store(out + places[:, None] * HEAD + dims[None, :], found, mask=is_asked)


@triton.jit
def add_parts(some, logs, out, parts, HEAD: tl.constexpr, BLOCK_PARTS: tl.constexpr, BLOCK_HEAD: tl.constexpr):
    """Put the parts of one head of a request together, each by its share of the whole sum."""
    head = tl.program_id(0).to(tl.int64)
    numbers, dims = tl.arange(0, BLOCK_PARTS), tl.arange(0, BLOCK_HEAD)
    places = head * parts + numbers
    is_part, is_dim = numbers < parts, dims < HEAD
    sums = tl.load(logs + places, mask=is_part, other=float("-inf"))
    best = tl.max(sums, 0)
    weights = tl.exp(sums - tl.where(best > float("-inf"), best, 0.0))
    cells = places[:, None] * HEAD + dims[None, :]
    rows = tl.load(some + cells, mask=is_part[:, None] & is_dim[None, :], other=0.0)
    total = tl.sum(weights, 0)
    found = tl.sum(rows * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * HEAD + dims, found.to(out.dtype.element_ty), mask=is_dim)


def attend_pages(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend over the first `seq_lens` tokens in the pages of each row; return [rows, heads, head size].

    The grid depends on shapes alone, so a graph that holds the launch is right for any lengths and pages. A row without
    tokens gets zeros.

    query: [rows, heads, head size]. keys, values: a layer's cache, contiguous, [pages, page size, KV heads, head size],
    where heads are a multiple of KV heads. page_table: [rows, most pages], and seq_lens: [rows], of whole numbers.
    """
    query, page_table = query.contiguous(), page_table.contiguous()
    rows, heads, size = query.shape
    page, kv_heads = keys.shape[1:3]
    width = page_table.shape[1]
    parts = -(-width * page // PART)
    some = query.new_empty(rows, heads, parts, size, dtype=query.dtype if parts == 1 else torch.float32)
    logs = query.new_empty(rows, heads, parts, dtype=torch.float32)
    block_head = max(LEAST, triton.next_power_of_2(size))
    attend_part[rows, kv_heads, parts](
        query, keys, values, page_table, seq_lens, some, logs, scale, width,
        PAGE=page, GROUP=heads // kv_heads, HEAD=size, PART=PART, BLOCK=BLOCK_BYTES // query.element_size(),
        BLOCK_GROUP=max(LEAST, triton.next_power_of_2(heads // kv_heads)), BLOCK_HEAD=block_head, WORK=_work(query),
        **FUSED,
    )  # fmt: skip
    if parts == 1:
        return some[:, :, 0]
    out = torch.empty_like(query)
    block_parts = triton.next_power_of_2(parts)
    add_parts[(rows * heads,)](
        some, logs, out, parts, HEAD=size, BLOCK_PARTS=block_parts, BLOCK_HEAD=block_head, **FUSED
    )
    return out


def _work(query: torch.Tensor) -> Any:
    """The dtype of products, whose sums are float32. Triton's interpreter, on a CPU, multiplies no bfloat16."""
    own = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return own.get(query.dtype, tl.float32) if query.is_cuda else tl.float32
