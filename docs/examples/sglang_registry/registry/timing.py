"""Times of a fill and its view on the host, by SGLang's own registry and by the drop-in, in turn."""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch

from registry.batches import ForwardBatch
from registry.original import Original

PADDED: Final = 256
WARM: Final = 8
"""Untimed steps before each round."""
ROUNDS: Final = 15
SETS: Final = 8
"""Memories that the sources of batches lie in."""
STEPS: Final = 256
"""Steps of a round: on a device, the host waits for it after each 20 of them."""
QUEUED: Final = 20
Step = Callable[[Any], object]


@attrs.frozen
class Row:
    """One line of the table.

    Attributes:
        name: What is timed.
        sizes: Live and padded rows of each step of a round.
        is_eager: Whether the registry is that of steps without graphs.
        in_graph: Whether the drop-in's fill is in the graph, so that slots are read after the replay.
    """

    name: str
    sizes: Sequence[tuple[int, int]]
    is_eager: bool = False
    in_graph: bool = False


@attrs.frozen
class Result:
    """Microseconds of a step on the host, the median over all rounds."""

    row: Row
    original: float
    ours: float

    @property
    def ratio(self) -> float:
        """How many times less the drop-in takes."""
        return self.original / self.ours


def rows(device: torch.device) -> list[Row]:
    """Return the lines of the table for a device."""
    each = list(range(1, PADDED + 1))
    random.Random(3).shuffle(each)
    known = {"7 of 8 rows": (7, 8), "200 of 256 rows": (200, PADDED), "256 of 256 rows": (PADDED, PADDED)}
    if device.type == "cpu":
        found = [Row(name, [sizes] * STEPS) for name, sizes in known.items()]
        return [
            *found,
            Row("of 256 rows, live sizes never seen", [(size, PADDED) for size in each]),
            Row("unpadded, sizes never seen", [(size, size) for size in each], is_eager=True),
            Row("padded and live sizes never seen", [(max(1, size - size // 4), size) for size in each]),
        ]
    found = list[Row]()
    for how, in_graph in (("slots read after the replay", True), ("slots read before it, too", False)):
        given = known | {"of 256 rows, live sizes never seen": (0, PADDED)}
        for name, (live, padded) in given.items():
            sizes = [(live, padded)] * STEPS if live else [(size, padded) for size in each]
            found.append(Row(f"{name}, {how}", sizes, in_graph=in_graph))
    return found


class Batches:
    """Decode batches of 11 slots, one of them on the host. They lie in a few memories in turn, as an allocator's do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memories = [dict[str, torch.Tensor]() for _ in range(SETS)]
        self._generator = torch.Generator().manual_seed(0)

    def of(self, size: int, number: int) -> Any:
        """Make a batch of so many rows in the memory of a number."""
        memory = self._memories[number % SETS]

        def numbers(name: str, *shape: int, dtype: torch.dtype = torch.int64, most: int = 100) -> torch.Tensor:
            if name not in memory:
                drawn = torch.randint(0, most, (3 * PADDED,), generator=self._generator)
                memory[name] = drawn.to("cpu" if name == "seq_lens_cpu" else self._device, dtype)
            return memory[name][: math.prod(shape)].view(shape)

        names = ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu")
        return ForwardBatch(
            batch_size=size,
            mrope_positions=numbers("mrope_positions", 3, size),
            mamba_track_indices=numbers("mamba_track_indices", size),
            mamba_track_mask=numbers("mamba_track_mask", size, dtype=torch.bool, most=2),
            encoder_lens=numbers("encoder_lens", size, dtype=torch.int32),
            num_token_non_padded=numbers("num_token_non_padded", 1, dtype=torch.int32),
            **{name: numbers(name, size) for name in names},
        )


def registry_of(module: Any, device: torch.device, *, is_eager: bool) -> Any:
    """Make a registry of 11 slots, or of the 10 that steps without graphs have."""
    options: dict[str, Any] = {
        "device": device,
        "max_bs": PADDED,
        "max_num_token": PADDED,
        "cache_loc_dtype": torch.int64,
        "enable_mamba_track": True,
        "is_encoder_decoder": True,
    }
    if is_eager:
        return module.build_eager_registry(**options)
    more: Any = {"seq_len_fill_value": 1, "enable_num_token_non_padded": True, "register_global_num_tokens": False}
    return module.build_decode_registry(**options, **more, share_pool=False)


def step_of(registry: Any) -> Callable[[Any, int], Any]:
    """Return a call that fills a registry from a batch, and extracts the padded batch."""

    def step(batch: Any, padded: int) -> Any:
        rows = batch.batch_size
        registry.fill_from(
            batch, raw_bs=rows, padded_bs=padded, raw_num_tokens=rows, padded_num_tokens=padded, pp_proxy_tensors=None
        )
        return registry.extract_buffer(padded_bs=padded, padded_num_tokens=padded, forward_batch_template=batch)

    return step


def captured(registry: Any, padded: int, template: Any, *, in_graph: bool) -> Callable[[], None]:
    """Capture the smallest step over a registry's slots, and return its replay."""
    ids = registry.get_slot("input_ids").buffer[:padded]

    def model() -> torch.Tensor:
        if in_graph:
            registry.fill_in_graph(padded_bs=padded, padded_num_tokens=padded, forward_batch_template=template)
        return ids + 1

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model()
    return graph.replay


def steps_of(module: Any, row: Row, device: torch.device, template: Any, *, ours: bool) -> Callable[[Any, int], Any]:
    """Make a new registry, and return its step: fill, view and, on a device, a replay."""
    registry = registry_of(module, device, is_eager=row.is_eager)
    step = step_of(registry)
    if device.type == "cpu":
        return step
    padded = row.sizes[0][1]
    replay = captured(registry, padded, template, in_graph=row.in_graph and ours)

    def whole(batch: Any, padded: int) -> None:
        step(batch, padded)
        replay()

    return whole


def timed(step: Callable[[Any, int], Any], batches: Sequence[tuple[Any, int]], device: torch.device) -> list[float]:
    """Return the microseconds of each step."""
    found, clock = list[float](), time.perf_counter_ns
    for number, (batch, padded) in enumerate(batches):
        if device.type != "cpu" and number % QUEUED == 0:
            torch.cuda.synchronize(device)
        start = clock()
        step(batch, padded)
        found.append((clock() - start) / 1e3)
    return found


@torch.no_grad()
def measure(original: Original, ours: Any, device: torch.device, rounds: int = ROUNDS) -> Iterator[Result]:
    """Time all lines. In each round both have a new registry, so that sizes never seen are that in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        for row in rows(device):
            drawn = Batches(device)
            batches = [(drawn.of(live, number), padded) for number, (live, padded) in enumerate(row.sizes)]
            times: tuple[list[float], list[float]] = [], []
            for number in range(rounds + 1):
                for own, module in zip(times, (original.registry, ours), strict=True):
                    original.forget_pool()
                    step = steps_of(module, row, device, batches[0][0], ours=module is ours)
                    timed(step, batches[:1] * WARM, device)
                    found = timed(step, batches[1:], device)
                    own.extend(found if number else ())  # the first round warms up
            yield Result(row, *map(statistics.median, times))
    finally:
        torch.set_num_threads(threads)
        gc.enable()
