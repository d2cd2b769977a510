"""What tests of a runner's life share: a step that reads every row, tails too, its answers in plain code, worlds."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import pytest
import torch

from slotgraph import BATCH, TOKENS, DecodeRunner, EagerRunner, Inputs, Step, computed, copied
from slotgraph.backends import Backend
from slotgraph.runners.runner import Runner
from tests.runners import prefilled, test_draft
from tests.runners.models import Batch

BUCKETS: Final = (4, 16)
IDS, WEIGHTS, PAIRS = 49, -7.5, 9.0
"""What tails hold; no live row does."""


def live_requests(step: Step) -> int:
    """Computed on the host."""
    return step.live(BATCH)


def doubled(ids: torch.Tensor) -> torch.Tensor:
    """Computed on the device."""
    return ids * 2


class LifeInputs(Inputs):
    """One slot of each common kind, and a field that decides the path."""

    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=IDS)
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=WEIGHTS)
    pairs: torch.Tensor = copied(BATCH, 2, dtype=torch.float32, pad=PAIRS)
    count: torch.Tensor = computed(live_requests, shape=1, dtype=torch.int32)
    twice: torch.Tensor = computed(doubled, shape=TOKENS, dtype=torch.int64)
    note: str = "usual"


def step(view: LifeInputs) -> torch.Tensor:
    """[TOKENS] whole numbers and quarters; each hangs on its own row, on the count, and on every row, tails too."""
    own = view.twice * 3 + view.weights * view.pairs[:, 0] - view.pairs[:, 1]
    return (own + view.count + view.ids.sum() + view.weights.sum()).double()


def expected(batch: Mapping[str, Any], padded: int) -> torch.Tensor:
    """What the step gives for a batch in a bucket of so many rows, in plain Python."""
    ids, weights, pairs = (torch.as_tensor(batch[name]).tolist() for name in ("ids", "weights", "pairs"))
    tail = padded - len(ids)
    every = len(ids) + sum(ids) + tail * IDS + sum(weights) + tail * WEIGHTS
    rows = zip(ids, weights, pairs, strict=True)
    return torch.tensor([6 * one + weight * a - b + every for one, weight, (a, b) in rows], dtype=torch.float64)


def batch_of(requests: int, seed: int, device: str | torch.device = "cpu", **more: Any) -> Batch:
    """Random small numbers that float32 holds exactly, without a zero or a tail's value among them."""
    draw = torch.Generator().manual_seed(seed)
    found = {
        "ids": torch.randint(1, IDS, (requests,), generator=draw),
        "weights": torch.randint(1, 40, (requests,), generator=draw) / 4,
        "pairs": torch.randint(10, 90, (requests, 2), generator=draw).float(),
    }
    return {**{name: value.to(device) for name, value in found.items()}, **more}


def steps_of(runner: Runner[Any]) -> int:
    """How many steps its books know of."""
    return sum(runner.stats()["steps"].values())


def any_view(view: Any, batch: Batch) -> None:
    """Outputs tell all that there is to know of a view."""
    del view, batch


@attrs.frozen(eq=False)
class World:
    """A runner, batches for it by size and seed, and what holds its outputs and views to a batch's right answer."""

    runner: Runner[Any]
    batch: Callable[[int, int], Batch]
    assert_right: Callable[[Any, Batch], None]
    sizes: tuple[int, ...] = (2, 7, 4, 11, 1)
    assert_view: Callable[[Any, Batch], None] = any_view

    def warm(self) -> "World":
        for seed, size in enumerate((*self.sizes, *self.sizes)):
            self.runner(self.batch(size, seed))
        return self

    def assert_well(self) -> None:
        """Its next steps are right, by a call and by halves, and each is counted once."""
        before = steps_of(self.runner)
        for seed, size in enumerate(self.sizes):
            batch = self.batch(size, 500 + seed)
            self.assert_right(self.runner(batch), batch)
            other = self.batch(size, 600 + seed)
            view = self.runner.fill(other)
            self.assert_view(view, other)
            self.assert_right(self.runner.replay(view), other)
        assert steps_of(self.runner) == before + 2 * len(self.sizes)


def skip_without(backend: Backend, lowering: str) -> None:
    """Skip the test on a backend without that lowering."""
    if lowering not in backend.capabilities.lowerings:
        pytest.skip(f"{backend.name} has no lowering {lowering!r}")


def decoding(
    backend: Backend, *, captured: bool = True, inputs: type[LifeInputs] = LifeInputs, **options: Any
) -> World:
    """A decode runner; batches of more than 16 run eagerly."""
    given: dict[str, Any] = {"buckets": BUCKETS, "progress": False, **options}
    skip_without(backend, given.get("lowering", "foreach"))
    runner = DecodeRunner(inputs, step, backend=backend, **given)
    if captured:
        runner.capture()

    def assert_right(outputs: torch.Tensor, batch: Batch) -> None:
        padded = runner.decide(batch).bucket or len(batch["ids"])
        assert torch.equal(torch.as_tensor(outputs).cpu(), expected(batch, padded))

    return World(runner, lambda size, seed: batch_of(size, seed, backend.device), assert_right, (2, 7, 4, 20, 1))


def eager(backend: Backend, inputs: type[LifeInputs] = LifeInputs) -> World:
    """An eager runner."""
    runner = EagerRunner(inputs, step, backend=backend)

    def assert_right(outputs: torch.Tensor, batch: Batch) -> None:
        assert torch.equal(outputs.cpu(), expected(batch, len(batch["ids"])))

    return World(runner, lambda size, seed: batch_of(size, seed, backend.device), assert_right)


def prefilling(backend: Backend, kind: str = "breakable", **options: Any) -> World:
    """A captured prefill runner, held to an eager one over a model of the same weights."""
    models = [prefilled.Model(named=kind == "piecewise").to(backend.device) for _ in range(2)]
    runner = prefilled.runner_of(kind, models[0], backend, **options)
    runner.capture()
    twin = EagerRunner(prefilled.Prefill, models[1], backend=backend)

    def batch(size: int, seed: int) -> Batch:
        lengths = [size] if size < 3 else [1, size - 2, 1]
        return prefilled.batch_of(lengths, seed, backend.device)

    def assert_right(outputs: torch.Tensor, batch: Batch) -> None:
        assert torch.equal(outputs, twin(batch))

    return World(runner, batch, assert_right, (2, 7, 4, 20, 1))


def drafting(backend: Backend, **options: Any) -> World:
    """A captured draft runner of three steps, held to plain Python's trees."""
    runner = test_draft.made(backend, 2, 3, **options)

    def assert_right(outputs: Any, batch: Batch) -> None:
        test_draft.assert_right(outputs, batch, 2, 3)

    def assert_view(view: Any, batch: Batch) -> None:
        positions = batch["positions"]
        assert torch.equal(view.positions[: len(positions)], positions)
        assert not view.positions[len(positions) :].any()

    def batch(size: int, seed: int) -> Batch:
        return test_draft.batch_of(size, 2, 3, seed, backend.device)

    return World(runner, batch, assert_right, (3, 4, 1, 5), assert_view)


WORLDS: Final[Mapping[str, Callable[[Backend], World]]] = {
    "decode": lambda backend: decoding(backend, lowering="foreach"),
    "decode, in the graph": lambda backend: decoding(backend, lowering="in_graph"),
    "decode, fused": lambda backend: decoding(backend, lowering="fused"),
    "decode, slot by slot": lambda backend: decoding(backend, lowering="slot_by_slot"),
    "decode, debug": lambda backend: decoding(backend, debug=True),
    "eager": eager,
    "prefill": prefilling,
    "draft": drafting,
}
