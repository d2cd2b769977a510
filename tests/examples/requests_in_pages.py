"""Random requests over a paged cache for tests of the demo's kernel, and attention in plain torch over them."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

Attend = Callable[..., Tensor]
PAGES: Final = 24
CLOSE: Final = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far a result may be from that of float64: by rounding, of a few numbers around 1."""


@attrs.frozen(kw_only=True)
class Case:
    """Requests over a cache of random numbers, whose unused places are not finite: who reads them is found."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    size: int
    page: int
    lens: Sequence[int]
    spare: int
    seed: int

    def tensors(self, device: torch.device) -> dict[str, Any]:
        """The kernel's arguments. Behind a request's pages its row names page 0, which is finite."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, width = len(self.lens), -(-max(self.lens) // self.page) + self.spare
        shape = (PAGES, self.page, self.kv_heads, self.size)
        keys, values = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        query = torch.randn(rows, self.kv_heads * self.group, self.size, generator=generator, dtype=torch.float64)
        table = torch.zeros(rows, width, dtype=torch.int32)
        used = torch.zeros(PAGES, self.page, dtype=torch.bool)
        for row, length in enumerate(self.lens):
            count = -(-length // self.page)
            table[row, :count] = torch.randint(0, PAGES, (count,), generator=generator)
            used.view(-1)[self.places(table[row], length)] = True
        for cache in (keys, values):
            cache[~used] = torch.nan
        lens = torch.tensor(self.lens, dtype=torch.int32)
        floats = {"query": query, "keys": keys, "values": values}
        given = {name: tensor.to(self.dtype) for name, tensor in floats.items()} | {
            "page_table": table,
            "seq_lens": lens,
        }
        return {name: tensor.to(device) for name, tensor in given.items()} | {"scale": self.size**-0.5}

    def places(self, pages: Tensor, length: int) -> Tensor:
        """Where a request's tokens are."""
        return (pages.long()[:, None] * self.page + torch.arange(self.page, device=pages.device)).flatten()[:length]


def expected(case: Case, tensors: dict[str, Any]) -> Tensor:
    """Each request by itself, in float64."""
    found = []
    for row, length in enumerate(case.lens):
        places = case.places(tensors["page_table"][row], length)
        keys, values = (tensors[name].flatten(0, 1)[places].double() for name in ("keys", "values"))
        keys, values = (tensor.repeat_interleave(case.group, 1) for tensor in (keys, values))
        scores = torch.einsum("hd,thd->ht", tensors["query"][row].double(), keys) * tensors["scale"]
        found.append(torch.einsum("ht,thd->hd", scores.softmax(1), values))
    return torch.stack(found)


def assert_close(case: Case, attend: Attend, device: torch.device) -> None:
    """A kernel's result is that of plain torch."""
    tensors = case.tensors(device)
    out = attend(**tensors)
    assert (out.dtype, out.shape) == (case.dtype, tensors["query"].shape)
    torch.testing.assert_close(out.double(), expected(case, tensors), atol=CLOSE[case.dtype], rtol=CLOSE[case.dtype])


def cases() -> st.SearchStrategy[Case]:
    """Lengths of one token, of whole pages, and of several parts; heads in groups; pages and heads of any size."""
    pages = st.sampled_from([1, 3, 16, 32])
    lens = st.lists(
        st.one_of(st.just(1), st.integers(1, 6).map(lambda n: 16 * n), st.integers(1, 100)), min_size=1, max_size=5
    )
    return st.builds(
        Case,
        dtype=st.sampled_from([*CLOSE]),
        kv_heads=st.integers(1, 3),
        group=st.sampled_from([1, 3, 4, 17]),
        size=st.sampled_from([8, 24, 32, 64]),
        page=pages,
        lens=lens,
        spare=st.integers(0, 3),
        seed=st.integers(0, 1 << 31),
    )
