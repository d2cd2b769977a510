"""A graph owns what it reads: others in the process may clear workspaces, plans and caches at any time.

    python -m tests.backends.test_cuda_neighbours KIND ORDER

As a program: KIND of step beside a compiled model; ORDER: which is made first. It fails where an output differs.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.nn import functional

from slotgraph import TOKENS, DecodeRunner, Inputs, copied

ROOT: Final = Path(__file__).parents[2]
STEPS: Final = 1000
WIDE: Final = 512
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class Rows(Inputs):
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


def matrices(hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Products by cuBLAS and, with a bias, by cuBLASLt; few rows by many columns, which they split and add up."""
    for weight in weights:
        wide = weight.repeat(1, 16)
        hidden = torch.addmm(weight[0], torch.relu(hidden @ wide), wide.t())
        hidden = torch.relu(hidden @ wide) @ wide.t()
        hidden = (hidden.float() @ weight.float()).to(weight.dtype) / 8
    return hidden


def side_stream(hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The same on two streams, as shared experts run."""
    here = torch.cuda.current_stream()
    SIDE.wait_stream(here)
    with torch.cuda.stream(SIDE):
        other = matrices(hidden, weights)
    own = matrices(hidden, weights)
    here.wait_stream(SIDE)
    return own + other


def attention(hidden: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Scaled dot-product attention, whichever kernel torch chooses."""
    heads = (hidden @ weights[0]).view(1, 8, -1, 64).contiguous()
    return functional.scaled_dot_product_attention(heads, heads, heads).reshape(hidden.shape) @ weights[1]


KINDS: Final[dict[str, Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]]] = {
    "matrices": matrices,
    "side_stream": side_stream,
    "attention": attention,
    "convolution": lambda hidden, weights: functional.conv1d(
        hidden[None], weights[0][: len(hidden), None, :4].contiguous(), groups=len(hidden)
    )[0],
    "transform": lambda hidden, weights: torch.fft.rfft(hidden.float() + weights[0][0, 0].float()).abs(),
    "noise": lambda hidden, weights: matrices(hidden, weights) + 0 * torch.rand_like(hidden),
}


def runner_of(kind: str) -> tuple[DecodeRunner[Any], Callable[[torch.Tensor], torch.Tensor]]:
    """A captured runner, and its step on ids alone."""
    here: Any = {"generator": torch.Generator(device="cuda").manual_seed(1), "device": "cuda", "dtype": torch.bfloat16}
    table, weights = torch.randn(64, WIDE, **here), [torch.randn(WIDE, WIDE, **here) / WIDE**0.5 for _ in range(3)]

    def run(ids: torch.Tensor) -> torch.Tensor:
        return KINDS[kind](table[ids], weights)

    runner = DecodeRunner(Rows, lambda view: run(view.ids), buckets=[8, 16], backend="cuda", progress=False)
    runner.capture()
    return runner, run


def compiled_model() -> Callable[[], torch.Tensor]:
    """Another model with graphs of torch's own: a call of it records or replays."""
    torch.manual_seed(2)
    layers = (layer for _ in range(3) for layer in (nn.Linear(WIDE, WIDE), nn.GELU()))
    model = nn.Sequential(*layers).cuda().bfloat16().requires_grad_(requires_grad=False)
    fast = torch.compile(model, mode="reduce-overhead")
    rows = torch.randn(16, WIDE, device="cuda", dtype=torch.bfloat16)

    def call() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        out: torch.Tensor = fast(rows)
        return out.clone()

    for _ in range(4):
        call()
    return call


def clear_all() -> None:
    """What any library in the process may do at any time."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.backends.cuda.cufft_plan_cache.clear()
    torch.cuda.empty_cache()


def main(kind: str, order: str) -> None:
    """Both in turn, with all that libraries keep cleared now and then."""
    theirs = compiled_model() if order == "theirs_first" else None
    runner, run = runner_of(kind)
    batches = [{"ids": torch.randint(0, 64, (rows,), device="cuda")} for rows in (8, 5, 16, 11)]
    firsts = [runner(batch).clone() for batch in batches]
    for batch, first in zip(batches, firsts, strict=True):
        padded = functional.pad(batch["ids"], (0, (8 if len(batch["ids"]) <= 8 else 16) - len(batch["ids"])))
        torch.testing.assert_close(first.float(), run(padded)[: len(first)].float(), rtol=2e-2, atol=2e-2)
    theirs = theirs or compiled_model()
    other = theirs()
    for step in range(STEPS):
        if step % 100 == 50:
            clear_all()
            litter = [torch.full((4 << 20,), float("nan"), device="cuda") for _ in range(16)]
            del litter
        assert torch.equal(runner(batches[step % 4]), firsts[step % 4]), f"step {step}"
        assert torch.equal(theirs(), other), f"the other model, step {step}"
    torch.cuda.synchronize()
    sys.stdout.write(f"{kind} {order}: {STEPS} steps equal\n")


@pytest.mark.parametrize("order", ["ours_first", "theirs_first"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_right_beside_graphs_of_torch_compile(kind: str, order: str) -> None:
    """1,000 steps in turn with a model under `torch.compile(mode="reduce-overhead")`, with caches cleared between."""
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "tests.backends.test_cuda_neighbours", kind, order]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1000 steps equal" in done.stdout


if __name__ == "__main__":
    if torch.cuda.is_available():
        SIDE = torch.cuda.Stream()
    main(*sys.argv[1:])
