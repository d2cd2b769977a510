"""Host parameters on the stand-in: one update a launch, after the launch before; and steps in flight at random."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slotgraph import BATCH, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.backends.npu import NpuBackend
from slotgraph.dataflow.errors import CaptureError, ReplayError
from tests.npu.programs import program

pytestmark = pytest.mark.modes("eager", "lazy")
DIM, LENGTH, BUCKETS = 16, 8, (2, 4)
SCALE = 0.3
STREAMS = 3


class Attending(Inputs):  # the operator takes from the host how many keys each request has
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)
    kv_lens: torch.Tensor = copied(
        BATCH, dtype=torch.int32, pad=1, source="seq_lens_cpu", argument="actual_seq_lengths_kv", placement="host"
    )


def attention(*tensors: torch.Tensor, **lengths: Any) -> torch.Tensor:
    """What takes host arguments."""
    operator: Any = torch.ops.npu.npu_fused_infer_attention_score
    outputs: torch.Tensor = operator(*tensors, num_heads=1, input_layout="BSH", scale=SCALE, **lengths)[0]
    return outputs


class Model:  # attention of each request over the first keys of its row
    def __init__(self, device: torch.device, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        rows = BUCKETS[-1]
        self.queries, self.keys, self.values = (
            torch.randn(*shape, DIM, generator=draw) for shape in ((9, 1), (rows, LENGTH), (rows, LENGTH))
        )
        self.there = [one.to(device) for one in (self.queries, self.keys, self.values)]

    def __call__(self, view: Attending) -> torch.Tensor:
        queries, keys, values = self.there
        asked, rows = queries[view.input_ids], len(view.input_ids)
        return attention(asked, keys[:rows], values[:rows], actual_seq_lengths_kv=view.kv_lens.tolist())[:, 0]

    def expected(self, ids: list[int], lengths: list[int]) -> torch.Tensor:
        """[requests, DIM], request by request in plain torch on the CPU."""
        rows = []
        for row, (one, length) in enumerate(zip(ids, lengths, strict=True)):
            scores = (self.queries[one] @ self.keys[row, :length].T * SCALE).softmax(-1)
            rows.append((scores @ self.values[row, :length])[0])
        return torch.stack(rows)


def runner_on(**options: Any) -> tuple[DecodeRunner[Attending], Model]:
    """A captured runner and its model."""
    backend = NpuBackend()
    model = Model(backend.device)
    runner = DecodeRunner(Attending, model, buckets=BUCKETS, backend=backend, progress=False, **options)
    runner.capture()
    return runner, model


def answers(text: str, **environment: str) -> list[str]:
    """What a program found true: after what it does, nothing else could run in this process."""
    return [line for line in program(text, **environment) if line in {"True", "False"}]


def in_flight(runner: DecodeRunner[Attending], model: Model) -> bool:
    """Whether a row of steps in flight comes out right."""
    lengths = [[2, 7], [8, 1], [3, 3], [1, 8]]
    outputs = [runner({"input_ids": [1, 2], "seq_lens_cpu": one}).clone() for one in lengths]
    pairs = zip(outputs, lengths, strict=True)
    return all(torch.allclose(out.cpu(), model.expected([1, 2], one), atol=1e-5) for out, one in pairs)


@pytest.mark.modes("lazy")
def test_without_the_wait_a_launch_lacks_its_update() -> None:
    """Where no one waits for the launch before, one launch takes two updates and the next has none left."""
    said = answers(
        "from slotgraph.backends.npu import UpdatedGraph\n"
        "from tests.npu.test_parameters import in_flight, runner_on\n"
        "runner, model = runner_on()\n"
        "print(in_flight(runner, model))\n"
        "def hurry(graph): pass\n"
        "UpdatedGraph._wait = hurry\n"
        "try: print(in_flight(runner, model))\n"
        "except RuntimeError as error: print('107020' in str(error))\n"  # the number for a wait that takes too long
    )
    assert said == ["True", "True"]


def test_each_launch_has_one_update(monkeypatch: pytest.MonkeyPatch, npu: Any) -> None:
    """Each launch of a graph has one update before it, with the padded values of the step."""
    runner, _ = runner_on()
    seen: list[Any] = []
    kind: Any = npu.NPUGraph
    update, replay = kind.update, kind.replay

    def updated(graph: Any, cpu_update_input: Any) -> None:
        seen.append([one["actual_seq_lengths_kv"] for one in cpu_update_input])
        update(graph, cpu_update_input)

    def launched(graph: Any) -> None:
        seen.append("launch")
        replay(graph)

    monkeypatch.setattr(kind, "update", updated)
    monkeypatch.setattr(kind, "replay", launched)
    runner({"input_ids": [1, 2, 3], "seq_lens_cpu": [4, 5, 6]})
    runner({"input_ids": [1], "seq_lens_cpu": [8]})
    view = runner.fill({"input_ids": [2], "seq_lens_cpu": [7]})
    view = runner.fill({"input_ids": [2, 1], "seq_lens_cpu": [7, 3]})
    runner.replay(view)
    assert seen == [[[4, 5, 6, 1]], "launch", [[8, 1]], "launch", [[7, 3]], "launch"]


def test_a_graph_whose_update_broke_off_is_not_launched(monkeypatch: pytest.MonkeyPatch, npu: Any) -> None:
    """A graph whose update broke off is not launched, then or later: it might wait for ever."""
    runner, _ = runner_on()
    kind: Any = npu.NPUGraph
    launches: list[Any] = []
    monkeypatch.setattr(kind, "replay", launches.append)
    batch = {"input_ids": [1, 2], "seq_lens_cpu": [3, 4]}
    with monkeypatch.context() as patched:
        patched.setattr(kind, "update", Mock(side_effect=RuntimeError("the workspace is too small")))
        with pytest.raises(ReplayError, match="the workspace is too small"):
            runner(batch)
    with pytest.raises(ReplayError, match=r"updating .* was interrupted \(the workspace is too small\): capture again"):
        runner(batch)
    assert not launches


def declared(argument: str | None) -> type[Attending]:
    """The declaration with its parameter under another argument."""

    class Misnamed(Attending, drop=["kv_lens"]):
        kv_lens: torch.Tensor = copied(
            BATCH, dtype=torch.int32, pad=1, source="seq_lens_cpu", argument=argument, placement="host"
        )

    return Misnamed


def test_a_parameter_that_reaches_no_operator_is_refused() -> None:
    """One that reaches no operator would be frozen; an operator that is told nothing is refused by name."""
    model: Any = Model(NpuBackend().device)
    options: dict[str, Any] = {"buckets": [2], "backend": "npu", "progress": False}
    runner = DecodeRunner(declared("lens"), lambda view: view.input_ids + 1, **options)
    with pytest.raises(CaptureError, match=r"takes the host parameter 'lens' \(what is taken: nothing\)"):
        runner.capture()
    runner = DecodeRunner(declared("context_lens"), model, **options)
    with pytest.raises(CaptureError, match=r"npu_fused_infer_attention_score\.out takes its host arguments") as caught:
        runner.capture()
    assert "actual_seq_lengths, actual_seq_lengths_kv" in str(caught.value)
    assert "'context_lens'" in str(caught.value)


CHANGES: dict[str, Callable[[list[int]], list[int]]] = {
    "other numbers": lambda lens: [2 * one for one in lens],
    "fewer": lambda lens: lens[:1],
    "none": lambda _: [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_worked_out_of_a_parameter_is_refused(change: str) -> None:
    """What is worked out of a parameter in the step is refused: a replay would hand over the parameter itself."""
    backend = NpuBackend()
    queries = torch.rand(2, 1, DIM, device=backend.device)
    keys = torch.rand(2, LENGTH, DIM, device=backend.device)
    lens = torch.tensor([3, 4], dtype=torch.int32)

    def step() -> torch.Tensor:
        return attention(queries, keys, keys, actual_seq_lengths_kv=CHANGES[change](lens.tolist()))

    with pytest.raises(CaptureError, match=r"was given \[.*\] for actual_seq_lengths_kv, .* holds \[3, 4\]") as caught:
        backend.capture(step, parameters={"actual_seq_lengths_kv": lens})
    assert "placement='host'" in str(caught.value)


def test_an_operator_without_host_arguments_runs_as_captured() -> None:
    """Beside operators that take a parameter, one that was given no host argument runs as it was captured."""
    backend = NpuBackend()
    model, lens = Model(backend.device), torch.tensor([3, 4], dtype=torch.int32)
    ids = torch.tensor([5, 6], device=backend.device)
    queries, keys, values = model.there
    view: Any = SimpleNamespace(input_ids=ids, kv_lens=lens)

    def step() -> torch.Tensor:
        whole: torch.Tensor = attention(queries[ids], keys[:2], values[:2])[:, 0]
        return model(view) - whole

    graph = backend.capture(step, parameters={"actual_seq_lengths_kv": lens})
    for lengths in ([1, 8], [7, 2]):
        lens.copy_(torch.tensor(lengths))
        graph.replay()
        expected = model.expected([5, 6], lengths) - model.expected([5, 6], [LENGTH, LENGTH])
        torch.testing.assert_close(graph.outputs.cpu(), expected)


@pytest.mark.modes("lazy")
def test_graphs_with_parameters_work_on_a_second_device() -> None:
    """Graphs with parameters work on another device than the first, whichever is the current one."""
    said = answers(
        "import torch, torch_npu\n"
        "from tests.npu.test_parameters import in_flight, runner_on\n"
        "print(in_flight(*runner_on()))\n"
        "with torch.npu.device(1): there = runner_on()\n"
        "print(there[0].stage.backend.device.index == 1 and torch.npu.current_device() == 0)\n"
        "print(in_flight(*there))\n"
        "with torch.npu.device(1): print(in_flight(*there))\n",
        STANDIN_NPU_COUNT="2",
    )
    assert said == ["True"] * 4


def test_an_eager_step_has_its_own_lengths() -> None:
    """A batch that no bucket takes runs eagerly, on its own lengths."""
    runner, model = runner_on(max_waste=0.2)
    ids, lengths = [1, 2, 3], [4, 8, 2]
    outputs = runner({"input_ids": ids, "seq_lens_cpu": lengths})
    assert runner.stats()["steps"] == {"graph": 0, "eager": 1}
    torch.testing.assert_close(outputs.cpu(), model.expected(ids, lengths))


class Scheduled(Attending):
    weights: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=9)
    rows: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)


@attrs.frozen
class Turn:
    runner: int
    stream: int
    threaded: bool
    where: str
    requests: tuple[tuple[int, int, float], ...]

    @property
    def batch(self) -> dict[str, Any]:
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
    Turn,
    runner=st.integers(0, 1),
    stream=st.integers(0, STREAMS),
    threaded=st.booleans(),
    where=st.sampled_from(["lists", "host", "pinned", "device"]),
    requests=requests.map(tuple),
)


class Fleet:
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

    def run(self, step: Turn) -> torch.Tensor:
        """Hand a step over, on its stream and in its thread, and overwrite what it was handed on the host."""

        def there() -> torch.Tensor:
            with self.on(step.stream):
                batch = step.batch
                found: torch.Tensor = self.runners[step.runner](batch).clone()
                for one in batch.values():
                    if isinstance(one, torch.Tensor):
                        one.fill_(1)
            return found

        with ThreadPoolExecutor(1) as other:
            return other.submit(there).result() if step.threaded else there()

    def expected(self, step: Turn) -> torch.Tensor:
        ids, lengths, weights = (list(one) for one in zip(*step.requests, strict=True))
        plain = self.model.expected(ids, lengths) * torch.tensor(weights)[:, None]
        return plain + len(ids) + (0, 100)[step.runner]


@pytest.fixture(scope="module")
def fleet(npu: Any) -> Fleet:
    """Two runners, made once."""
    return Fleet(npu)


@settings(max_examples=40)
@given(steps=st.lists(stepped, min_size=1, max_size=12))
def test_steps_in_any_schedule_give_what_the_cpu_gives(fleet: Fleet, steps: list[Turn]) -> None:
    """Whatever comes after whatever, none of it awaited, each step gives what the CPU gives."""
    with torch.no_grad():
        outputs = [fleet.run(step) for step in steps]
    fleet.backend.synchronize()
    for step, found in zip(steps, outputs, strict=True):
        torch.testing.assert_close(found.cpu(), fleet.expected(step))
