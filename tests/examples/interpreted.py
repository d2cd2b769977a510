"""Tests for a process in which Triton's interpreter runs all kernels, of which TRITON_INTERPRET=1 tells it.

`test_paged_kernel.py` starts it. The interpreter leaves triton changed, so it is not for a process that compiles, too.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import paged_kernel
from serving.paged_kernel import attend_pages
from tests.examples.demo import NEEDS, Generate, module
from tests.examples.requests_in_pages import PAGES, Case, assert_close, cases


@settings(max_examples=30)  # the interpreter is slow
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


def by_kernel(asked: str, _device: torch.device) -> str:
    """The demo's choice, as if this were CUDA."""
    return "sdpa" if asked == "sdpa" else "triton"


@pytest.mark.parametrize(
    "argv",
    [
        ("--page-size", "3", "--max-batch", "2"),
        ("--ahead", "1", "--chunk", "3"),
        ("--dtype", "bfloat16", "--ahead", "1"),
    ],
    ids=" ".join,
)
def test_the_demo_makes_equal_tokens_by_its_kernel(
    generate: Generate, prompts: str, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    """Replayed steps attend by the kernel at lengths and batch sizes that no capture had."""
    pytest.importorskip("transformers", reason=NEEDS)
    monkeypatch.setattr(module("serving.engine"), "best_attention", by_kernel)
    given = ("--prompts", prompts, "--max-new-tokens", "5", "--prefill", "eager", "--max-batch", "3")
    status, report, out = generate(*given, *argv)
    assert (status, report["attention"], report["comparison"]["difference"]) == (0, "triton", None)
    assert "a Triton kernel over the pages" in out


def test_ways_to_decode_are_timed_in_turns(generate: Generate, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decode steps attend by the kernel, runs and steps by torch's own attention are measured beside them."""
    pytest.importorskip("transformers", reason=NEEDS)
    monkeypatch.setattr(module("serving.engine"), "best_attention", by_kernel)
    monkeypatch.setattr(module("serving.measuring"), "FEWEST", 1)
    monkeypatch.setattr(module("serving.by_hand"), "PAIRS", 1)
    monkeypatch.setattr(module("serving.by_hand"), "PAIRS_A_ROUND", 1)
    given = ("--prompts", prompts, "--max-new-tokens", "3", "--prefill", "eager", "--max-batch", "2")
    timed = ("--rounds", "2", "--arrival-gap", "0", "--ahead", "1", "--chunk", "2")
    status, report, out = generate(*given, *timed)
    ways = ("sdpa, --ahead 1", "triton, --ahead 1", "triton, --ahead 1, --chunk 2")
    assert (status, {way: len(speeds) for way, speeds in report["turns"].items()}) == (0, dict.fromkeys(ways, 3))
    [times] = report["measured"]["times"]
    assert [*times["ways"]] == ["DecodeRunner, step", "DecodeRunner, step by sdpa"]
    assert all(f"tokens a second, {way:34} " in out for way in ways)


def test_the_paged_loop_makes_equal_tokens_by_the_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts attend over shared pages by it, too, in one call for all requests."""
    pytest.importorskip("transformers", reason=NEEDS)
    program = module("paging.program")
    monkeypatch.setattr(module("paging.model"), "best_attention", by_kernel)
    monkeypatch.setattr(program, "RULES", ("You are a clerk. ",) * 2)
    argv = ["--requests", "2", "--max-new-tokens", "3", "--pages", "40", "--buckets", "2", "--prefill-buckets", "8"]
    status = program.main(argv)
    out = capsys.readouterr().out
    assert status == 0, out
    assert "slotgraph, triton attention" in out
    assert int(out.partition("shared ")[2].split()[0]) > 0
