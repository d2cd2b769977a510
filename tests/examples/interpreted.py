"""Tests for a process in which Triton's interpreter runs all kernels, of which TRITON_INTERPRET=1 tells it.

`test_paged_kernel.py` starts it. The interpreter leaves triton changed, so it is not for a process that compiles, too.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serving import paged_kernel
from serving.paged_kernel import attend_pages
from tests.examples.requests_in_pages import PAGES, Case, assert_close, cases


@given(case=cases(), part=st.sampled_from([32, 256]))
def test_the_kernel_attends_as_plain_torch_does(case: Case, part: int) -> None:
    """For any number of rows, and of parts: it reads each request's tokens, and no other place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_kernel, "PART", part)
        assert_close(case, attend_pages, torch.device("cpu"))


@pytest.mark.parametrize("part", [32, 256])
def test_a_padded_row_is_finite_and_a_result_is_the_same_in_any_batch(
    monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """A row of one token on page 0 is finite, one without tokens gets zeros, and neighbours change no bit."""
    monkeypatch.setattr(paged_kernel, "PART", part)
    case = Case(dtype=torch.float32, kv_heads=2, group=2, size=32, page=16, lens=[70, 33], spare=3, seed=1)
    tensors = case.tensors(torch.device("cpu"))
    for name in ("keys", "values"):
        tensors[name][0] = 3.0
    alone = attend_pages(**tensors)
    for name in ("query", "page_table", "seq_lens"):
        tensors[name] = torch.cat([tensors[name], torch.zeros_like(tensors[name])])
    tensors["seq_lens"][2] = 1
    tensors["page_table"] = torch.cat([tensors["page_table"], torch.full((4, 9), PAGES)], 1).int()
    padded = attend_pages(**tensors)
    assert torch.equal(padded[:2], alone)
    assert torch.isfinite(alone).all()
    assert (padded[2] == tensors["values"][0, 0, 0, 0]).all()
    assert not padded[3].any()
