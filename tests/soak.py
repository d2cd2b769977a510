"""A soak: very many random steps, several in flight, held to the oracle by samples; no test, but a program.

    python -m tests.soak --steps 1000000 --backend cuda

Batches come from a pool that is prepared beforehand, with the answers that a runner gives that fills slot by slot, so
that the host spends little more than the steps themselves take. Sources are tensors of all makes, lists and arrays;
they are given as they are, as fresh copies that go at once, or written in place; steps are whole, or a fill and a
replay; some batches are too large or do not fit; now and then another stream takes over. Every so many steps are
compared on the device without waiting for it, and every thousandth is compared exactly. Exit code 1 where any differs,
or where memory grows.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import attrs
import torch

from slotgraph import BATCH, CACHE_LOC, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import Backend, load
from slotgraph.dataflow.errors import BatchError
from tests.memory import resident

BUCKETS: Final = (1, 2, 4, 8, 16, 32)
POOL: Final = 256
LOOSE: Final = 16
"""Every so many steps are compared on the device."""
EXACT: Final = 1000
"""Every so many steps are compared on the host."""
STREAM: Final = 97
"""Every so many steps another stream takes over."""
LARGE: Final = 211
"""Every so many batches are too large for a graph."""
_NEGATED: Final[Callable[[torch.Tensor], torch.Tensor]] = vars(torch)["_neg_view"]
DEVICE_GROWTH, HOST_GROWTH = 8 << 20, 64 << 20
Batch = dict[str, Any]


class Few(Inputs):
    """What goes into the graph in one upload."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.bfloat16, pad=9, strided=True, converts=(torch.float32,))
    tables: torch.Tensor = copied(BATCH, 12, dtype=torch.int32, pad=-1)
    live: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)


class Many(Few):
    """The same with slots that a batch may lack, that are written apart, and that no graph reads."""

    mask: torch.Tensor = copied(2, TOKENS, dtype=torch.bool, pad=True, strided=True)
    extra: torch.Tensor | None = copied(TOKENS, dtype=torch.float32, pad=2, default=None)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=4, placement="host")


def step(view: Few) -> torch.Tensor:
    """Two whole numbers a token that hang on every slot that is read, tails and all."""
    whole = view.ids.sum() + view.places.sum() * 3 + view.pairs.float().sum().long() + view.tables.sum() * 5 + view.live
    if isinstance(view, Many):
        whole = whole + view.mask.sum() * 7
        whole = whole if view.extra is None else whole + view.extra.sum().long() * 11
    return torch.stack([view.ids * 3 + view.places, whole.expand(len(view.ids))], 1)


def values_of(kind: type[Few], rows: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Random whole numbers for a batch."""
    found = {
        "ids": torch.randint(1, 9999, (rows,), generator=draw),
        "places": torch.randint(1, 9999, (rows,), generator=draw),
        "pairs": torch.randint(1, 99, (rows, 2), generator=draw).to(torch.bfloat16),
        "tables": torch.randint(0, 999, (rows, 12), generator=draw, dtype=torch.int32),
    }
    if kind is Many:
        found["mask"] = torch.randint(0, 2, (2, rows), generator=draw).bool()
        found["here"] = torch.randint(0, 99, (rows,), generator=draw)
    if kind is Many and rows % 2:
        found["extra"] = torch.randint(0, 99, (rows,), generator=draw).float()
    return found


MAKES: Final[dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "list": lambda host, _: host.tolist() if host.dim() == 1 else None,
    "tuple": lambda host, _: tuple(host.tolist()) if host.dim() == 1 else None,
    "array": lambda host, _: None if host.dtype == torch.bfloat16 else host.numpy(),
    "host": lambda host, _: host,
    "narrow": lambda host, device: device.to(torch.int32) if host.dtype == torch.int64 else None,
    "float": lambda host, device: device.float() if host.dtype == torch.bfloat16 else None,
    "part": lambda _, device: torch.cat([device[:1], device])[1:] if len(device) else None,
    "strided": lambda host, device: torch.stack([device] * 2, -1)[..., 0] if host.dtype == torch.bfloat16 else None,
    "negated": lambda host, device: _NEGATED(-device) if host.dtype == torch.int64 else None,
    "columns": lambda host, device: device.t().contiguous().t() if host.dtype == torch.bool else None,
}
REFUSES: Final = {"ids": {"narrow"}, "here": {"narrow"}}
"""What a slot does not take."""


@attrs.frozen
class Prepared:
    """One batch of the pool: for which runner, what it brings, as device tensors too, and the oracle's answer."""

    which: int
    rows: int
    batch: Batch
    plain: Batch
    answer: torch.Tensor


class Soak:
    """Two runners, a pool, and the books."""

    def __init__(self, backend: Backend, lowering: str, seed: int) -> None:
        self.backend = backend
        self.is_cuda = backend.device.type == "cuda"
        self.draw = random.Random(seed)  # noqa: S311 - data, no secrets
        self.runners = [self._runner(kind, lowering) for kind in (Few, Many)]
        oracles = [self._runner(kind, "slot_by_slot") for kind in (Few, Many)]
        generator = torch.Generator().manual_seed(seed)
        self.pool = [self._prepared(oracles, index, generator) for index in range(POOL)]
        self.large = [self._prepared(oracles, index, generator, BUCKETS[-1] + 3) for index in range(2)]
        self.streams = [torch.cuda.Stream(backend.device) for _ in range(3)] if self.is_cuda else []  # type: ignore[no-untyped-call]
        self.wrong = [torch.zeros((), dtype=torch.int64, device=backend.device) for _ in range(1 + len(self.streams))]
        self.mismatches = self.compared = self.stream = 0
        backend.synchronize()

    def _runner(self, kind: type[Few], lowering: str) -> DecodeRunner[Any]:
        absent = [{"extra"}] if kind is Many else []
        runner = DecodeRunner(
            kind, step, buckets=BUCKETS, backend=self.backend, absent=absent, lowering=lowering, progress=False
        )
        runner.capture()
        return runner

    def _prepared(
        self, oracles: Sequence[DecodeRunner[Any]], index: int, draw: torch.Generator, rows: int | None = None
    ) -> Prepared:
        """A batch whose sources are for the most part plain."""
        which, rows = index % 2, self.draw.randint(0, BUCKETS[-1]) if rows is None else rows
        host = values_of((Few, Many)[which], rows, draw)
        plain = {name: one if name == "here" else one.to(self.backend.device) for name, one in host.items()}
        batch = dict(plain)
        for name in host:
            make = self.draw.choice(list(MAKES))
            if index % 8 < 2 and make not in REFUSES.get(name, ()):
                made = MAKES[make](host[name], plain[name])
                batch[name] = plain[name] if made is None else made
        return Prepared(which, rows, batch, plain, oracles[which](plain).clone())

    def plainly(self, one: Prepared) -> torch.Tensor:
        """A whole step."""
        outputs: torch.Tensor = self.runners[one.which](one.batch)
        return outputs

    def freshly(self, one: Prepared) -> torch.Tensor:
        """A whole step with sources that are gone when it returns."""
        outputs: torch.Tensor = self.runners[one.which]({name: value.clone() for name, value in one.plain.items()})
        return outputs

    def by_halves(self, one: Prepared) -> torch.Tensor:
        """A fill, and a replay."""
        runner = self.runners[one.which]
        outputs: torch.Tensor = runner.replay(runner.fill(one.batch))
        return outputs

    def in_place(self, one: Prepared) -> torch.Tensor:
        """A producer writes one slot where it belongs."""
        runner, bucket = self.runners[one.which], next(size for size in BUCKETS if size >= one.rows)
        absent = () if one.which == 0 or "extra" in one.batch else ("extra",)
        place = runner.inputs(bucket, absent).tables[: one.rows]
        outputs: torch.Tensor = runner({**one.batch, "tables": place.copy_(one.plain["tables"])})
        return outputs

    def refused(self, one: Prepared) -> torch.Tensor:
        """A batch that does not fit, then the one that does."""
        runner = self.runners[one.which]
        try:
            runner({**one.batch, "tables": one.plain["ids"]})
        except BatchError:
            return self.plainly(one)
        self.mismatches += 1
        return self.plainly(one)

    def check(self, number: int, outputs: torch.Tensor, one: Prepared) -> None:
        """Compare a step."""
        self.compared += 1
        if number % EXACT == 0:
            if not torch.equal(outputs, one.answer):
                self.mismatches += 1
        elif outputs.shape == one.answer.shape:
            self.wrong[self.stream] += (outputs != one.answer).any()
        else:
            self.mismatches += 1

    def run(self, steps: int) -> None:
        """So many steps."""
        ways = [self.plainly] * 22 + [self.freshly] * 5 + [self.by_halves] * 3 + [self.in_place, self.refused]
        chosen = self.draw.choices(range(POOL), k=4099)
        how = self.draw.choices(ways, k=4093)  # two primes, so that every way meets every batch
        with ExitStack() as stack:
            for number in range(1, steps + 1):
                one, way = self.pool[chosen[number % 4099]], how[number % 4093]
                if number % STREAM == 0:
                    self.switch(stack)
                    way = self.plainly  # a producer writes on the stream of the step before
                elif number % LARGE == 0:
                    one, way = self.large[number % 2], self.plainly
                outputs = way(one)
                if number % LOOSE == 0 or number % EXACT == 0:
                    self.check(number, outputs, one)

    def switch(self, stack: ExitStack) -> None:
        """Have another stream issue the next steps; it waits for nothing: runners see to that."""
        if self.streams:
            stack.close()
            self.stream = self.draw.randint(0, len(self.streams))
            if self.stream:
                stack.enter_context(torch.cuda.stream(self.streams[self.stream - 1]))

    def memory(self) -> tuple[int, int]:
        """Bytes that are held on the device, and those that the process holds on the host."""
        self.backend.synchronize()
        held = torch.cuda.memory_allocated(self.backend.device) if self.is_cuda else 0
        return held, resident()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--lowering", default="in_graph")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    soak = Soak(_backend(given.backend), given.lowering, given.seed)
    warm = max(given.steps // 10, 1)
    soak.run(warm)
    before, start = soak.memory(), time.perf_counter()
    soak.run(given.steps - warm)
    issued = time.perf_counter() - start
    device, host = (late - early for early, late in zip(before, soak.memory(), strict=True))
    wrong = soak.mismatches + sum(map(int, soak.wrong))
    each = 1e6 * issued / max(given.steps - warm, 1)
    lines = [
        f"{given.steps} steps on {soak.backend.name}, {given.lowering}, {each:.1f} us a step on the host",
        f"{wrong} mismatches in {soak.compared} that were compared",
        f"memory grew by {device} bytes on the device, {host} on the host",
        *(
            f"{type(runner).__name__}: {runner.stats()['lowerings']} {runner.stats()['detours']}"
            for runner in soak.runners
        ),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(wrong > 0 or device > DEVICE_GROWTH or host > HOST_GROWTH)


def _backend(name: str) -> Backend:
    if name != "auto":
        return load(name)()
    cuda = load("cuda")
    return cuda() if cuda.is_available() else load("cpu-capture")()


if __name__ == "__main__":
    logging.getLogger("slotgraph").setLevel(logging.ERROR)
    sys.exit(main())
