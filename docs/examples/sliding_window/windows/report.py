"""The report: what one run showed."""

from collections.abc import Iterator, Sequence

from serving.comparison import Comparison
from slotgraph.runners.engine.statistics import CaptureReport, human_bytes
from windows.engine import Engine
from windows.options import Options
from windows.requests import WindowRequest


def lines(
    options: Options, engine: Engine, requests: Sequence[WindowRequest], captured: CaptureReport, found: Comparison
) -> Iterator[str]:
    """A line for each thing that is worth to know."""
    stats, pools = engine.decode.stats(), engine.pools
    sliding = sum(kind for kind, _ in pools.layers)
    window, full = pools.window.cache, pools.full
    beyond = sum(request.seq_len > options.window for request in requests)
    tokens = [token for request in requests for token in request.generated]
    yield f"model            {len(pools.layers)} layers, {sliding} of them with a window of {options.window} tokens"
    yield f"backend          {engine.decode.stage.backend.name}, {len(captured.captured)} buckets captured"
    yield f"pool for all     {full.pages} pages, {human_bytes(full.nbytes)}"
    yield f"pool for windows {window.pages} pages, {engine.ring} a request, {human_bytes(window.nbytes)}"
    made = pools.window.translations
    yield f"look-ups         {made} of a layer's places were run or captured" + " (--translate)" * options.translate
    yield f"requests         {len(requests)}, {beyond} longer than the window, in {engine.steps} engine steps"
    speed = found.tokens / engine.seconds
    yield f"tokens           {found.tokens}, {len(set(tokens))} different ones; {speed:.0f} a second"
    yield f"decode steps     {stats['steps']['graph']} from graphs, {stats['steps']['eager']} eagerly"
    for rows, use in stats["buckets"].items():
        live = f"{use['live']} live of {use['padded']} rows, {use['waste']:.0%} waste"
        yield f"  bucket {rows:<8} {use['steps']} steps by {use['path']}, {live}"
    yield f"logits           differ from generate()'s by {found.largest:.2g} at most; they spread by {found.spread:.2g}"
    if found.difference is None:
        yield "equality         generate() chose the same tokens"
    else:
        yield f"DIFFERENT from generate() in {found.apart} requests: {found.difference}"
