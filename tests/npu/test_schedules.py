"""Steps in flight at random: buckets, runners, streams, threads and where sources are, on the stand-in's two orders."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, DecodeRunner, computed, copied
from slotgraph.backends.npu import NpuBackend
from tests.npu.test_parameters import BUCKETS, LENGTH, Attending, Model

pytestmark = pytest.mark.modes("eager", "lazy")
STREAMS = 3


class Scheduled(Attending):
    """Host parameters, what the host or the device has, and what the host computes, in one step."""

    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=9)
    rows: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


@attrs.frozen
class Stepped:
    """One step: whose it is, where it runs, what it reads, and where that is."""

    runner: int
    stream: int
    threaded: bool
    where: str
    requests: tuple[tuple[int, int, float], ...]

    @property
    def batch(self) -> dict[str, Any]:
        """What the runner is handed, in memory of its own."""
        ids, lengths, weights = (list(one) for one in zip(*self.requests, strict=True))
        if self.where == "lists":
            return {"input_ids": ids, "seq_lens_cpu": lengths, "weights": weights}
        held = {"input_ids": torch.tensor(ids), "weights": torch.tensor(weights)}
        if self.where == "pinned":
            held = {name: one.pin_memory() for name, one in held.items()}
        elif self.where == "device":
            held = {name: one.to("npu") for name, one in held.items()}
        return {**held, "seq_lens_cpu": torch.tensor(lengths, dtype=torch.int32)}


requests = st.lists(
    st.tuples(st.integers(0, 8), st.integers(1, LENGTH), st.integers(1, 9).map(float)), min_size=1, max_size=BUCKETS[-1]
)
stepped = st.builds(
    Stepped,
    runner=st.integers(0, 1),
    stream=st.integers(0, STREAMS),
    threaded=st.booleans(),
    where=st.sampled_from(["lists", "host", "pinned", "device"]),
    requests=requests.map(tuple),
)


class Fleet:
    """Two runners, and streams, for all examples."""

    def __init__(self, npu: Any) -> None:
        self.npu = npu
        self.backend = NpuBackend()
        self.model = Model(self.backend.device)
        self.streams = [npu.Stream() for _ in range(STREAMS)]
        self.runners = [self._runner(offset) for offset in (0, 100)]

    def _runner(self, offset: int) -> DecodeRunner[Scheduled]:
        def step(view: Scheduled) -> torch.Tensor:
            return self.model(view) * view.weights[:, None] + view.rows + offset

        runner = DecodeRunner(Scheduled, step, buckets=BUCKETS, backend=self.backend, progress=False)
        runner.capture()
        return runner

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Have a stream be the current one; the last number stands for the default one."""
        return nullcontext() if number == STREAMS else self.npu.stream(self.streams[number])

    def run(self, step: Stepped) -> torch.Tensor:
        """Hand a step over, on its stream and in its thread, and overwrite what it was handed on the host."""
        found: list[torch.Tensor] = []

        def there() -> None:
            with self.on(step.stream):
                batch = step.batch
                found.append(self.runners[step.runner](batch).clone())
                for one in batch.values():
                    if isinstance(one, torch.Tensor):
                        one.fill_(1)

        if step.threaded:
            with ThreadPoolExecutor(1) as other:
                other.submit(there).result()
        else:
            there()
        return found[0]

    def expected(self, step: Stepped) -> torch.Tensor:
        """The same in plain torch on the CPU."""
        ids, lengths, weights = (list(one) for one in zip(*step.requests, strict=True))
        plain = self.model.expected(ids, lengths) * torch.tensor(weights)[:, None]
        return plain + len(ids) + (0, 100)[step.runner]


@pytest.fixture(scope="module")
def fleet(npu: Any) -> Fleet:
    """Two runners, made once."""
    return Fleet(npu)


@settings(max_examples=40)
@given(steps=st.lists(stepped, min_size=1, max_size=12))
def test_schedules(fleet: Fleet, steps: list[Stepped]) -> None:
    """Whatever comes after whatever, none of it awaited, each step gives what the CPU gives."""
    with torch.no_grad():
        outputs = [fleet.run(step) for step in steps]
    fleet.backend.synchronize()
    for step, found in zip(steps, outputs, strict=True):
        torch.testing.assert_close(found.cpu(), fleet.expected(step))
