"""The report: what one run showed."""

from collections.abc import Iterator, Sequence

from serving.comparison import Comparison
from serving.request import Request
from slotgraph.runners.engine.statistics import CaptureReport
from states.engine import Engine
from states.options import Options


def lines(
    options: Options, engine: Engine, requests: Sequence[Request], captured: CaptureReport, comparison: Comparison
) -> Iterator[str]:
    """A line for each thing that is worth to know."""
    stats = engine.decode.stats()
    distinct = len({token for request in requests for token in request.generated})
    layers = engine.model.pools.layers
    kinds = [f"{sum(layer.state is not None for layer in layers)} with a state"]
    kinds += [f"{sum(layer.keys is not None for layer in layers)} with attention"]
    yield f"model            seeded {options.model}, {len(layers)} layers: {', '.join(kinds)}"
    yield f"backend          {engine.decode.stage.backend.name}, {len(captured.captured)} buckets captured"
    yield f"pools            {1 + engine.batch} rows, {engine.model.pools.nbytes / 2**20:.2f} MiB; row 0 is nobody's"
    yield f"requests         {options.requests}, in {engine.steps} engine steps"
    speed = comparison.tokens / engine.seconds
    yield f"tokens           {comparison.tokens}, {distinct} different ones; {speed:.0f} tokens/s"
    yield f"decode steps     {stats['steps']['graph']} from graphs, {stats['steps']['eager']} eagerly"
    for rows, use in sorted(stats["buckets"].items()):
        live, padded = use["live"], use["padded"]
        yield f"  bucket {rows:<8} {use['steps']} steps, {live} live of {padded} rows, {use['waste']:.0%} waste"
    yield f"logits           differ from generate()'s by {comparison.largest:.2g} at most"
    if comparison.difference is None:
        yield "equality         generate() chose the same tokens"
    else:
        yield f"DIFFERENT from generate(): {comparison.difference}"
