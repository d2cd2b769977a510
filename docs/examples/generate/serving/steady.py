"""Steady batches: requests that are over, brought back to the middle of their texts, to be timed again and again."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import attrs

from serving.batch import decode_batch
from serving.cache import PageAllocator
from serving.engine import Engine
from serving.inputs import DecodeInputs
from serving.options import Options
from serving.request import Request

VARIANTS = 4
MOST_SIZES = 4


@attrs.frozen
class Size:
    """So many live requests, and the bucket that takes them."""

    live: int
    bucket: int


@attrs.frozen
class Steady:
    """A finished run's requests that decoded at all, and the engine whose cache is theirs again."""

    engine: Engine
    options: Options
    requests: Sequence[Request]

    @classmethod
    def after(cls, engine: Engine, options: Options, requests: Sequence[Request]) -> "Steady":
        """What can be timed after a run; nothing where no request made two tokens."""
        decoded = [request for request in requests if len(request.generated) > 1]
        return cls(engine, options, decoded[: options.max_batch])

    def sizes(self) -> list[Size]:
        """One size a captured bucket, a request less than it holds, so that there is a tail; the largest last."""
        report = self.engine.decode.report
        buckets = () if report is None else report.captured
        sizes = list(_sizes(buckets, len(self.requests)))
        apart = max(1, -(-len(sizes) // MOST_SIZES))
        return sizes[::-1][::apart][::-1]

    def batches(self, size: Size) -> list[DecodeInputs]:
        """A few batches of one size, each with its own tensors: a step must not find its inputs where it left them."""
        page_size, device = self.options.page_size, self.engine.decode.stage.backend.device
        allocator = PageAllocator(self.engine.steps.cache.pages)
        again = [self._again(request, allocator) for request in self.requests[: size.live]]
        return [decode_batch(requests, page_size, device) for requests in zip(*again, strict=True)]

    def _again(self, request: Request, allocator: PageAllocator) -> list[Request]:
        """The request at several places in the middle of its text, on pages of its own."""
        pages = allocator.take(request.pages_needed(self.options.page_size))
        middle = len(request.generated) // 2
        kept = (max(1, middle - variant) for variant in range(VARIANTS))
        return [attrs.evolve(request, generated=request.generated[:count], pages=pages) for count in kept]


def _sizes(buckets: Sequence[int], most: int) -> Iterator[Size]:
    for smaller, bucket in pairwise((0, *buckets)):
        live = min(max(bucket - 1, smaller + 1), most)
        if live > smaller:
            yield Size(live, bucket)
