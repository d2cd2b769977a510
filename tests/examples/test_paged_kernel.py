"""The demo's kernel, in Triton's interpreter and on a device, beside attention in plain torch, request by request."""

import importlib
import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from tests.examples.demo import NEEDS, QUICK, Generate, module
from tests.examples.requests_in_pages import CLOSE, Case, assert_close, cases, expected
from tests.programs import python
from tests.triton_interpreter import need_interpreter, need_triton

KERNEL = "serving.paged_kernel"


def test_the_kernel_attends_as_plain_torch_does_in_the_interpreter() -> None:
    """All tests of `interpreted.py` pass, in a process in which Triton's interpreter runs all kernels."""
    need_interpreter()
    suite = Path(__file__).with_name("interpreted.py")
    done = python("-m", "pytest", suite, "-q", "-n", "0", "-p", "no:cacheprovider", env={"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chip", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_for_chips_that_are_not_here(
    chip: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler takes both kernels for chips that are not here, and what they hold fits: nothing is spilled."""
    need_triton()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler, targets = (importlib.import_module(f"triton.{name}.compiler") for name in ("compiler", "backends"))
    language, kernel = importlib.import_module("triton.language"), module(KERNEL)
    work = {"fp32": language.float32, "bf16": language.bfloat16}[dtype]
    block = kernel.BLOCK_BYTES // (work.primitive_bitwidth // 8)
    blocks = {"PAGE": 16, "GROUP": 3, "HEAD": 64, "PART": kernel.PART, "BLOCK": block, "BLOCK_GROUP": 16, "WORK": work}
    tables = {
        "page_table": "*i32",
        "seq_lens": "*i32",
        "logs": "*fp32",
        "scale": "fp32",
        "width": "i32",
        "parts": "i32",
    }
    floats = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}") | {"some": "*fp32"}
    numbers = blocks | {"BLOCK_HEAD": 64, "BLOCK_PARTS": 4}
    for function in (kernel.attend_part, kernel.add_parts):
        given = {name: numbers[name] for name in function.arg_names if name in numbers}
        kinds = floats | tables | dict.fromkeys(given, "constexpr")
        source = compiler.ASTSource(function, {name: kinds[name] for name in function.arg_names}, given)
        made = compiler.compile(source, target=targets.GPUTarget("cuda", chip, 32), options=kernel.FUSED)
        assert made.metadata.shared <= 48 << 10
        assert "ld.local" not in made.asm["ptx"]


def device_or_skip() -> torch.device:
    """The current CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("cuda: torch finds no device")
    need_triton()
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.cuda
@settings(max_examples=20)  # each of which may compile for a second
@given(case=cases(), part=st.sampled_from([32, 256]))
def test_the_compiled_kernel_attends_as_plain_torch_does(case: Case, part: int) -> None:
    """On a device, with tensor cores: float32 is not rounded to less."""
    device, kernel = device_or_skip(), module(KERNEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "PART", part)
        assert_close(case, kernel.attend_pages, device)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_of_the_kernel_is_right_for_other_lengths(dtype: torch.dtype) -> None:
    """A graph that was captured on one token a row is replayed on lengths and pages that it has not seen."""
    device, kernel = device_or_skip(), module(KERNEL)
    case = Case(dtype=dtype, kv_heads=3, group=3, size=64, page=16, lens=[350, 16, 1, 257], spare=1, seed=2)
    tensors = case.tensors(device)
    given = {name: tensors[name].clone() for name in ("page_table", "seq_lens")}
    tensors["seq_lens"].fill_(1)
    tensors["page_table"].fill_(int(given["page_table"][0, 0]))
    kernel.attend_pages(**tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel.attend_pages(**tensors)
    for name, tensor in given.items():
        tensors[name].copy_(tensor)
    graph.replay()
    torch.testing.assert_close(out.double(), expected(case, tensors), atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_demo_makes_equal_tokens_by_its_kernel(generate: Generate, dtype: str) -> None:
    """On CUDA the demo takes the kernel; its tokens are those of generate(), as by torch's own attention."""
    pytest.importorskip("transformers", reason=NEEDS)
    device_or_skip()
    status, report, _ = generate("--backend", "cuda", "--dtype", dtype, "--rounds", "2", "--no-compare")
    assert (status, report["attention"], report["comparison"]["difference"]) == (0, "triton", None)
    assert {way: len(speeds) for way, speeds in report["turns"].items()} == {
        "sdpa, --ahead 1": 3,
        "triton, --ahead 1": 3,
    }
    other = generate("--backend", "cuda", "--dtype", dtype, "--attention", "sdpa")[1]
    assert (other["passed"], other["attention"]) == (True, "sdpa")
    if dtype == "float32":
        assert other["texts"] == report["texts"]


@pytest.mark.cuda
@pytest.mark.parametrize("prefill", ["eager", "breakable", "piecewise"])
def test_prompts_that_attend_in_one_call_make_equal_tokens(generate: Generate, prefill: str) -> None:
    """In 16 bits torch attends within all prompts in one call, where it has one; padded rows stay finite."""
    pytest.importorskip("transformers", reason=NEEDS)
    device, attention = device_or_skip(), module("serving.attention")
    if not attention.takes_all_at_once(torch.empty(1, dtype=torch.bfloat16, device=device)):
        pytest.skip(f"torch {torch.__version__} attends request by request on this device")
    status, report, _ = generate("--backend", "cuda", "--dtype", "bfloat16", *QUICK, "--prefill", prefill)
    assert (status, report["comparison"]["difference"]) == (0, None)


@pytest.mark.parametrize("prefill", ["eager", "breakable", "piecewise"])
def test_prompts_can_attend_in_one_call(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, prompts: str, prefill: str
) -> None:
    """The call gets each prompt's offsets and the longest length; what it leaves in padded rows is no number."""
    pytest.importorskip("transformers", reason=NEEDS)
    attention, calls = module("serving.attention"), list[tuple[int, ...]]()

    def in_one_call(query: torch.Tensor, *tensors: Any, scale: float) -> torch.Tensor:
        keys, values, offsets, others, longest, most = tensors
        out, ends = torch.full_like(query, torch.nan), offsets.tolist()
        assert (ends, longest) == (others.tolist(), most)
        calls.append(tuple(ends))
        for begin, end in itertools.pairwise(ends):
            assert end - begin <= longest
            q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (query, keys, values))
            seen = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            out[begin:end] = seen[0].transpose(0, 1)
        return out

    monkeypatch.setattr(attention, "_VARLEN", in_one_call)
    monkeypatch.setattr(attention, "takes_all_at_once", lambda _: True)
    status, report, _ = generate("--prompts", prompts, *QUICK, "--prefill", prefill)
    assert (status, report["comparison"]["difference"]) == (0, None)
    assert max(len(set(ends)) for ends in calls) > 2
