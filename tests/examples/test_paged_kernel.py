"""The demo's kernel, in Triton's interpreter and on a device, beside attention in plain torch, request by request."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.demo import module
from tests.examples.requests_in_pages import CLOSE, Case, assert_close, cases, expected
from tests.programs import python

KERNEL = "serving.paged_kernel"


def need_triton() -> None:
    """Skip where there is none."""
    if sys.platform != "linux" or importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, or not made for this system: it is for Linux")


def test_the_kernel_attends_as_plain_torch_does_in_the_interpreter() -> None:
    """All tests of `interpreted.py` pass, in a process in which Triton's interpreter runs all kernels."""
    need_triton()
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
        made = compiler.compile(source, target=targets.GPUTarget("cuda", chip, 32))
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
