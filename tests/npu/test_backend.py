"""The adapter on the stand-in runtime: what it can do, does and refuses, and what it takes from torch_npu unseen."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import choose, load
from slotgraph.backends.npu import NpuBackend
from slotgraph.dataflow.errors import CaptureError
from tests.npu.programs import program
from tests.strategies import draw


@pytest.fixture
def backend() -> NpuBackend:
    """The adapter, by name."""
    found = choose("npu")
    assert isinstance(found, NpuBackend)
    return found


@pytest.fixture
def ones(backend: NpuBackend) -> torch.Tensor:
    """[8] ones on the device."""
    return torch.ones(8, device=backend.device)


@pytest.mark.modes("eager", "zero")
def test_torch_npu_is_imported_when_it_is_asked_for() -> None:
    """Loading the adapter does not import torch_npu; asking whether it can run does."""
    *_, said = program(
        "import sys; from slotgraph.backends import load; npu = load('npu'); before = 'torch_npu' in sys.modules; "
        "npu.is_available(); print(before, 'torch_npu' in sys.modules)"
    )
    assert said == "False True"


@pytest.mark.modes("eager", "zero")
def test_a_missing_runtime_is_named() -> None:
    """Without CANN, the reason names what is missing and the script that sets it up, and "auto" goes on to the CPU."""
    *_, said = program(
        "from slotgraph.backends import choose, load; print(choose('auto').name, load('npu').is_available().reason)",
        LD_LIBRARY_PATH="",
    )
    assert said.startswith("cpu torch_npu is installed and cannot be imported (lib")
    assert "cannot open shared object file" in said
    assert "set_env.sh" in said


@pytest.mark.modes("zero")
def test_a_missing_device_is_named() -> None:
    """With CANN and no device, it says so, and so does the one for any accelerator."""
    assert "there is no NPU" in load("npu").is_available().reason
    assert "sees no accelerator" in load("accelerator").is_available().reason
    assert choose("auto").name.startswith("cpu")


def test_auto_chooses_an_npu_where_there_is_one(backend: NpuBackend) -> None:
    """Where there is an NPU, "auto" takes it, and it before the one for any accelerator."""
    assert choose("auto").name == "npu"
    assert backend.device == torch.device("npu", 0)


class Mixed(Inputs):  # slots of the role, and of int64 that kernels demand as they are
    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)
    positions: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=7)
    out_cache_loc: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=7)
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    scales: torch.Tensor = copied(BATCH, dtype=torch.float32, pad=1.5)
    rows: torch.Tensor = computed(lambda step: step.live(BATCH), shape=1, dtype=torch.int32)
    order: torch.Tensor = computed(lambda step: [*range(step.padded(BATCH), 0, -1)], shape=BATCH, dtype=torch.int64)


def batch_of(rows: int, seed: int) -> dict[str, Any]:
    """Random values of every slot, on the host."""
    most = {"input_ids": 1 << 40, "positions": 1 << 40, "out_cache_loc": 1 << 30, "seq_lens": 99, "scales": 99}
    dtypes = {"seq_lens": torch.int32, "scales": torch.float32}
    return {
        name: draw(1, high, (rows,), seed + at, dtypes.get(name, torch.int64))
        for at, (name, high) in enumerate(most.items())
    }


def test_only_the_role_is_converted(backend: NpuBackend) -> None:
    """Cache locations are int32 on the device, from int64 on the host or the device; what is int64 stays int64."""
    runner = DecodeRunner(Mixed, lambda view: view.input_ids + view.positions, buckets=[4], backend=backend)
    runner.capture()
    for seed, device in enumerate((torch.device("cpu"), backend.device)):
        batch = batch_of(3, seed)
        view = runner.fill({name: value.to(device) for name, value in batch.items()})
        assert view.out_cache_loc.dtype == torch.int32
        assert {view.input_ids.dtype, view.positions.dtype, view.order.dtype} == {torch.int64}
        for name, value in batch.items():
            assert getattr(view, name)[:3].tolist() == value.tolist(), name
        assert view.seq_lens.tolist()[3:] == [0]
        assert view.rows.tolist() == [3]
        assert view.order.tolist() == [4, 3, 2, 1]
        assert runner.replay(view).tolist() == (batch["input_ids"] + batch["positions"]).tolist()


class Seen(TorchDispatchMode):
    """Notes copies from host memory to the device, and foreach calls with what is on the host among it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uploads: list[bool] = []
        self.foreach: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what a call does, and do it."""
        del types
        name = func._schema.name
        if name == "aten::copy_" and args[1].is_cpu and not args[0].is_cpu:
            self.uploads.append(args[1].is_pinned() and bool(args[2:] and args[2]))
        if name.startswith("aten::_foreach"):
            self.foreach.append(any(one.is_cpu for group in args if isinstance(group, list) for one in group))
        if name == "aten::_to_copy" and args[0].is_cpu and str((kwargs or {}).get("device", "cpu")) != "cpu":
            self.uploads.append(False)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["host", "device", "both"])
def test_host_data_goes_up_in_one_upload(backend: NpuBackend, where: str) -> None:
    """What the host has for a step goes up in one asynchronous copy from pinned memory; foreach is for the device."""
    runner = DecodeRunner(Mixed, lambda view: view.input_ids + 1, buckets=[4], backend=backend)
    runner.capture()
    for seed in range(3):
        batch = batch_of(1 + seed, seed)  # a packet that equals the last one is not sent
        names = {"host": [], "device": list(batch), "both": ["positions", "seq_lens"]}[where]
        batch |= {name: batch[name].to(backend.device) for name in names}
        with Seen() as seen:
            view = runner.fill(batch)
        assert seen.uploads == [True]  # the values that the host computes are in it too
        assert seen.foreach
        assert not any(seen.foreach)
        assert view.input_ids.tolist() == [*batch["input_ids"].tolist(), *[7] * (3 - seed)]


def test_a_task_queue_that_captures_do_not_bear_is_told(backend: NpuBackend, ones: torch.Tensor, npu: Any) -> None:
    """A task queue that captures do not bear is told with what to set; streams and modes are then as they were."""
    mode, before, depth = npu.get_task_queue_enable(), npu.current_stream(), len(_get_current_dispatch_mode_stack())
    lens = torch.ones(2, dtype=torch.int32)
    npu.set_task_queue_enable(2)
    try:
        for parameters in ({}, {"actual_seq_lengths_kv": lens}):
            with pytest.raises(CaptureError, match=r"nothing can be captured as things are .*TASK_QUEUE_ENABLE=1 in"):
                backend.capture(lambda: ones + 1, parameters=parameters)
            assert npu.current_stream() == before
            assert len(_get_current_dispatch_mode_stack()) == depth
    finally:
        npu.set_task_queue_enable(mode)
    graph = backend.capture(lambda: ones + 1)
    graph.replay()
    assert graph.outputs.tolist() == [2.0] * 8


PRELUDE = """
import torch
from slotgraph.backends import choose
from slotgraph.dataflow.errors import CaptureError
backend, graphs = choose('npu'), []
ones = torch.ones(8, device=backend.device)
"""


@pytest.mark.parametrize("code", ["207005", "207008"])
def test_too_many_graphs_are_told(code: str) -> None:
    """Too many graphs are told as that, by either number; those before are good, and what is dropped gives back."""
    *_, said = program(
        f"{PRELUDE}try:\n"
        "    for number in range(9): graphs.append(backend.capture(lambda: ones + number))\n"
        "except CaptureError as error: said = str(error)\n"
        "for graph in graphs: graph.replay()\n"
        "values = [graph.outputs.tolist()[0] for graph in graphs]\n"
        "del graphs[1:]\n"
        "backend.capture(lambda: ones * 2)\n"
        "print(values, said)\n",
        STANDIN_STREAM_LIMIT="3",
        STANDIN_STREAM_ERROR=code,
    )
    assert said.startswith("[1.0, 2.0, 3.0] nothing can be captured as things are (")
    assert code in said
    assert "no streams left for another graph" in said
    assert "capture fewer buckets" in said


def test_captures_never_take_the_default_stream(backend: NpuBackend, ones: torch.Tensor, npu: Any) -> None:
    """Captures go to a stream of their own, so that the default one is never captured; a runner may be on it."""
    with npu.stream(npu.default_stream()):
        graph = backend.capture(lambda: ones + 2)
        graph.replay()
    with backend.stream() as stream:
        assert stream != npu.default_stream()
    assert graph.outputs.tolist() == [3.0] * 8


WAITS = "it waits for the device"
STEPS: list[tuple[Callable[[torch.Tensor], Any], str]] = [
    (lambda ones: ones[0].item(), WAITS),
    (lambda ones: ones.cpu(), WAITS),
    (lambda ones: ones.copy_(torch.rand(8)), WAITS),
    (lambda _: torch.accelerator.synchronize(), WAITS),
    (lambda ones: ones if ones.sum() > 0 else -ones, WAITS),
    (lambda ones: ones[ones > 0], r"no kernel that a graph can hold.*torch\.where"),
]


@pytest.mark.parametrize(("step", "says"), STEPS, ids=["item", "cpu", "pageable", "synchronize", "branch", "mask"])
def test_steps_that_no_graph_can_hold_are_refused(
    backend: NpuBackend, ones: torch.Tensor, step: Callable[[torch.Tensor], Any], says: str
) -> None:
    """What no graph can hold is refused, with the line and the way out, and the next capture is good."""
    with pytest.raises(CaptureError, match=rf"at test_backend\.py:\d+, .*{says}") as caught:
        backend.capture(lambda: step(ones))
    assert "\n" not in str(caught.value)
    graph = backend.capture(lambda: ones * 3)
    graph.replay()
    assert graph.outputs.tolist() == [3.0] * 8


def test_a_refusal_that_breaks_the_queue_is_told() -> None:
    """A refusal that breaks torch_npu's own queue, which runs nothing more, is told as that."""
    *_, said = program(
        f"{PRELUDE}try: backend.capture(lambda: ones.copy_(torch.rand(8), non_blocking=True))\n"
        "except CaptureError as error: print(str(error))\n"
    )  # in what words, depends on whether the queue or the host was first to meet it
    assert "After this the device runs nothing more in this process (" in said
    assert said.endswith("start it again")


def test_a_graph_records_operators_with_host_arguments() -> None:
    """A graph keeps a record of each operator that takes host arguments, with what it was given."""
    graphs = importlib.import_module("torch_npu.npu.graphs")
    record = graphs._GraphDispatchRecord
    names = {field.name for field in dataclasses.fields(record)}
    assert names >= {"event", "handle", "kwargs", "args", "op_cache_entry"}
    source = inspect.getsource(graphs)
    assert "self.graph_dispatch_records = []" in inspect.getsource(graphs._GraphDispatchMode.__init__)
    assert "self.graph_dispatch_mode = _GraphDispatchMode()" in inspect.getsource(graphs.NPUGraph.__init__)
    assert "update_stream = None" in source  # one for all graphs, unless one has its own
    assert "torch.npu.stream(self.update_stream)" in source


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_npu_paged_attention.default", ["context_lens"]),
        ("npu_multi_head_latent_attention.out", ["context_lens"]),
        ("npu_fused_infer_attention_score.out", ["actual_seq_lengths", "actual_seq_lengths_kv"]),
        ("npu_fused_infer_attention_score_v2.out", ["actual_seq_qlen", "actual_seq_kvlen"]),
        ("npu_fusion_attention_v3.out", ["actual_seq_qlen", "actual_seq_kvlen"]),
    ],
)
def test_operators_with_host_arguments_are_where_they_were(name: str, arguments: list[str]) -> None:
    """The operators that take host arguments, and what these are called, are found where they were."""
    handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")
    specs = handlers._NPU_GRAPH_OP_HANDLERS[name].get_update_specs(name)
    assert [one for _, _, one in specs] == arguments
    assert all(where == "arg" and isinstance(place, int) for where, place, _ in specs)


@pytest.mark.parametrize(
    "text", [text for text, _ in (*NpuBackend.advice, *NpuBackend.conditions) if not text.isdigit()]
)
def test_errors_of_the_wheel_say_what_they_said(text: str) -> None:
    """The wheel still says what the adapter tells its errors apart by."""
    package: Any = importlib.import_module("torch_npu")
    library = Path(package.__file__).parent / "lib" / "libtorch_npu.so"
    assert text.encode() in library.read_bytes().lower()


def test_the_wheel_is_for_this_torch() -> None:
    """The wheel is for this torch."""
    package: Any = importlib.import_module("torch_npu")
    assert package.__version__.split(".")[:2] == torch.__version__.split(".")[:2] == ["2", "13"]
