"""Sets of attention in a graph, compiled and as written, beside their functions called by hand. -s shows the tables."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from rich.console import Console

from slotgraph import DecodeRunner, attention
from slotgraph.backends import Backend
from tests.benchmarks.shown import race
from tests.runners.attention.kinds import with_tokens

PAGE: Final = 16
WINDOW: Final = 1024
SIZES: Final[dict[Any, int]] = {
    attention.PAGE_SIZE: PAGE,
    attention.TILE: 512,
    attention.SM_PARTS: 132,
    attention.WINDOW: WINDOW,
}
KINDS: Final = (
    "FlashAttention", "FlashInferDecode", "FlexDecode", "TritonDecode", "FlashMLA", "FlashInferWindow", "TritonWindow",
)  # fmt: skip


def smallest(view: Any) -> torch.Tensor:
    """One kernel."""
    out: torch.Tensor = view.queries + 1
    return out


def runner_of(name: str, backend: Backend, rows: int, pages: int, *, is_compiled: bool) -> DecodeRunner[Any]:
    """A captured runner of a declaration for steps of one token a request."""
    inputs = with_tokens(name)
    known = {**SIZES, attention.PAGES: pages}
    sizes = {axis: size for axis, size in known.items() if axis in inputs.slotgraph.axes}
    made: DecodeRunner[Any] = DecodeRunner(
        inputs, smallest, buckets=[rows], sizes=sizes, backend=backend, compile_computed=is_compiled
    )
    made.capture()
    return made


def kernels_of(replay: Callable[[], object]) -> str:
    """The kernels of a replay, as the profiler sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            replay()
        torch.cuda.synchronize()
    rows = [one for one in profile.key_averages() if one.self_device_time_total]
    total = sum(one.self_device_time_total for one in rows) / 10
    nodes = sum(one.count for one in rows) / 10
    names = "; ".join(f"{one.key[:60]} x{one.count / 10:g} {one.self_device_time_total / 10:.2f}" for one in rows)
    return f"{nodes:g} nodes, {total:.2f} us: {names}"


@pytest.mark.slow
@pytest.mark.slotgraph_backends("cpu", "cuda")
@pytest.mark.parametrize("kind", KINDS)
def test_sets(kind: str, backend: Backend) -> None:
    """A replay with a set beside one without; and the functions of the set, called between replays by hand."""
    is_cuda = backend.device.type == "cuda"
    rows, pages = (256, 512) if is_cuda else (16, 32)  # a CPU computes as long as it copies, and compiles for long
    runners = {
        "no set": runner_of("PagedCache", backend, rows, pages, is_compiled=False),
        "as written": runner_of(kind, backend, rows, pages, is_compiled=False),
        "compiled": runner_of(kind, backend, rows, pages, is_compiled=is_cuda),
    }
    draw, live = torch.Generator().manual_seed(0), rows - 7
    lens = torch.randint(1, pages * PAGE + 1, (live,), generator=draw)
    table = torch.randint(1, 100_000, (live, pages), generator=draw)
    batch = {"queries": torch.randn(live, 4), "seq_lens": lens, "page_table": table, "window_page_table": table.flip(1)}
    for made in runners.values():
        made(batch)
    captured = {name: made.graphs.captured[rows, frozenset(), ()] for name, made in runners.items()}
    if is_cuda:
        console = Console(width=200)
        for name, one in captured.items():
            console.print(f"{kind}, {name}: {kernels_of(one.graph.replay)}", highlight=False, markup=False)
    bucket = captured["as written"].filling.bucket
    functions = [one for _, one in bucket.computations(bucket.views)]

    def by_hand(_: Any) -> None:
        for one in functions:
            one.run(None)
        captured["no set"].graph.replay()

    ways = {name: lambda _, graph=one.graph: graph.replay() for name, one in captured.items()}
    race(f"{kind}: replays", {**ways, "by hand": by_hand}, [None], backend)
    views = [runners[name].fill(batch) for name in ("as written", "compiled")]
    for name, view in zip(("as written", "compiled"), views, strict=True):
        runners[name].replay(view)
    for slot in [one.slot for one in functions]:
        assert torch.equal(*(getattr(view, slot) for view in views)), slot
