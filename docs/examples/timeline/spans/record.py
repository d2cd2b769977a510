"""Recording steps: one bar for each call on the host, one for each kernel and each copy on the device."""

import contextlib
import gc
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch

from slotgraph.backends import Backend

if TYPE_CHECKING:  # `spans.ahead` needs none of what these load
    from spans.ways import Batch, Way

STEP: Final = "slotgraph.timeline.step"
"""The name under which the profiler notes a call."""
FILL: Final = "fill_lanes"
"""The fused kernel's name: it is the graph's first node, and all the same the inputs' work."""
WARMUPS: Final = 3
ON_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Kind = Literal["call", "inputs", "step"]


@attrs.frozen
class Bar:
    """Something that took time, in microseconds since the first call: a call on the host, or work on the device."""

    kind: Kind
    start: float
    stop: float


@attrs.frozen
class Recording:
    """The bars of one way's steps."""

    name: str
    bars: Sequence[Bar]

    def took(self, kind: Kind) -> float:
        """Microseconds of all bars of one kind."""
        return sum(bar.stop - bar.start for bar in self.bars if bar.kind == kind)


def record(way: "Way", batches: "Sequence[Batch]", backend: Backend) -> Recording:
    """Run the batches one behind another, the host waiting only at the end."""

    def run(around: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        for batch in batches:
            with around():
                way.call(batch)
        backend.synchronize()

    with quiet():
        for _ in range(WARMUPS):
            run(contextlib.nullcontext)
        take = _by_clock if backend.device.type == "cpu" else _by_profiler
        return Recording(way.name, take(run))


Run = Callable[[Callable[[], contextlib.AbstractContextManager[object]]], None]


def _by_clock(run: Run) -> list[Bar]:
    """Where the host is the device there is nothing to record but the calls."""
    spans: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def noted() -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        spans.append((start, time.perf_counter_ns()))

    run(noted)
    begin = spans[0][0]
    return [Bar("call", (start - begin) / 1e3, (stop - begin) / 1e3) for start, stop in spans]


def _by_profiler(run: Run) -> list[Bar]:
    """Calls and device work on the profiler's one clock. It makes calls on the host longer than they are without it."""

    def passes() -> None:
        run(contextlib.nullcontext)  # the profiler's own start is in this pass
        run(lambda: torch.profiler.record_function(STEP))

    return bars_of(trace(passes))


def trace(run: Callable[[], object]) -> list[Mapping[str, Any]]:
    """What the profiler notes of a call on the host and on a CUDA device: events of a Chrome trace, in microseconds."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events: list[Mapping[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return events


def bars_of(events: Iterable[Mapping[str, Any]]) -> list[Bar]:
    """The bars of a profiler's trace: calls by their name, device work by whether a graph's launch brought it."""
    known = [event for event in events if "cat" in event and "dur" in event]
    calls = [event for event in known if event["cat"] == "user_annotation" and event["name"] == STEP]
    begin = min(event["ts"] for event in calls)
    launches = {_correlation(event) for event in known if "GraphLaunch" in event["name"]}
    bars = [_bar("call", event, begin) for event in calls]
    for event in known:
        if event["cat"] in ON_DEVICE and event["ts"] >= begin:
            in_step = _correlation(event) in launches and FILL not in event["name"]
            bars.append(_bar("step" if in_step else "inputs", event, begin))
    return sorted(bars, key=lambda bar: (bar.kind, bar.start))


def _correlation(event: Mapping[str, Any]) -> object:
    """What joins a call into the driver and the work that it brought."""
    return event.get("args", {}).get("correlation", event["ts"])


def _bar(kind: Kind, event: Mapping[str, Any], begin: float) -> Bar:
    start = float(event["ts"]) - begin
    return Bar(kind, start, start + float(event["dur"]))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """As engines run: without gradients, and without a garbage collection in the middle of a step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_on:
            gc.enable()
