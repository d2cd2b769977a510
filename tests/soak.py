"""A soak: very many random steps, several in flight, held to the oracle by samples; no test, but a program.

    python -m tests.soak --steps 1000000 --backend cuda

Batches come from a pool that is prepared beforehand, with the answers of a runner that fills slot by slot, so that the
host spends little more than the steps themselves take. Steps are whole, or a fill and a replay; their sources are kept,
or are copies that go at once; some batches are refused; now and then another stream takes over. Samples are compared on
the device without waiting for it. Exit code 1 where any differs, or where memory grows.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import torch

from slotgraph.backends import Backend, load
from slotgraph.dataflow.errors import BatchError
from tests.memory import resident
from tests.runners.test_lowerings import ABSENT, Pair, Quick, Rich, arguments
from tests.sources import HOST_DATA, OTHERS

POOL: Final = 256
SAMPLE: Final = 16
"""Every so many steps are compared."""
STREAM: Final = 97
"""Every so many steps another stream takes over."""
KINDS: Final = ("plain",) * 40 + tuple({*HOST_DATA, *OTHERS} - {"slot's array"})
DEVICE_GROWTH, HOST_GROWTH = 8 << 20, 64 << 20


class Soak:
    """Two runners, a pool, and the books."""

    def __init__(self, backend: Backend, lowering: str, seed: int) -> None:
        self.backend = backend
        self.is_cuda = backend.device.type == "cuda"
        self.draw = random.Random(seed)  # noqa: S311 - data, no secrets
        self.pairs = [Pair.of(kind, backend.name, lowering) for kind in (Quick, Rich)]
        self.pool = [self._prepared(self.pairs[index % 2], index) for index in range(POOL)]
        self.streams = [torch.cuda.Stream(backend.device) for _ in range(3)] if self.is_cuda else []  # type: ignore[no-untyped-call]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=backend.device) for _ in range(1 + len(self.streams))]
        self.mismatches = self.compared = self.stream = 0
        backend.synchronize()

    def _prepared(self, pair: Pair, number: int) -> tuple[Pair, dict[str, Any], torch.Tensor]:
        """A batch, and what the oracle gives for it; what keeps its tails is left out, since it knows each step."""
        kinds = [self.draw.choice(KINDS) for _ in range(8)]
        batch, plain = pair.batches(self.draw.randint(0, 10), number, kinds, self.draw.choice([ABSENT, frozenset()]))
        return pair, batch, self._told(pair.right(plain, **arguments(plain))).clone()

    def _told(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([outputs[name] for name in sorted({*outputs} - {"halves", "heat", "scratch"})])

    def step(self, number: int, pair: Pair, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """One step, in one of four ways."""
        runner, way = pair.mine, self.draw.randrange(32)
        if way == 0:
            with suppress(BatchError):
                runner({**batch, "ids": None}, **arguments(batch))
                self.mismatches += 1
        elif way < 5:
            batch = {n: one.clone() if isinstance(one, torch.Tensor) else one for n, one in batch.items()}
        elif way < 8 and number % STREAM:
            return dict(runner.replay(runner.fill(batch, **arguments(batch))))
        return dict(runner(batch, **arguments(batch)))

    def run(self, steps: int) -> None:
        """So many steps."""
        with ExitStack() as stack:
            for number in range(1, steps + 1):
                if number % STREAM == 0 and self.streams:  # it waits for nothing: runners see to that
                    stack.close()
                    self.stream = self.draw.randint(0, len(self.streams))
                    if self.stream:
                        stack.enter_context(torch.cuda.stream(self.streams[self.stream - 1]))
                pair, batch, answer = self.draw.choice(self.pool)
                outputs = self.step(number, pair, batch)
                if number % SAMPLE == 0:
                    self.compared += 1
                    self.wrong[self.stream] += (self._told(outputs) != answer).any()

    def memory(self) -> tuple[int, int]:
        """Bytes that are held on the device, and those that the process holds on the host."""
        self.backend.synchronize()
        return torch.cuda.memory_allocated(self.backend.device) if self.is_cuda else 0, resident()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--backend", default="cuda" if load("cuda").is_available() else "cpu-capture")
    parser.add_argument("--lowering", default="in_graph")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    soak = Soak(load(given.backend)(), given.lowering, given.seed)
    warm = max(given.steps // 10, 1)
    soak.run(warm)
    before, start = soak.memory(), time.perf_counter()
    soak.run(given.steps - warm)
    each = 1e6 * (time.perf_counter() - start) / max(given.steps - warm, 1)
    device, host = (late - early for early, late in zip(before, soak.memory(), strict=True))
    wrong = soak.mismatches + sum(map(int, soak.wrong))
    sys.stdout.write(
        f"{given.steps} steps on {soak.backend.name}, {given.lowering}, {each:.1f} us a step on the host\n"
        f"{wrong} mismatches in {soak.compared} that were compared\n"
        f"memory grew by {device} bytes on the device, {host} on the host\n"
    )
    return int(wrong > 0 or device > DEVICE_GROWTH or host > HOST_GROWTH)


if __name__ == "__main__":
    logging.getLogger("slotgraph").setLevel(logging.ERROR)
    sys.exit(main())
