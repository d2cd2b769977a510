"""What every backend must do; a third party's runs it too, by being installed beside slotgraph."""

import itertools
import time
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from slotgraph import BATCH, CACHE_LOC, SEQ_LEN_FILL, TOKENS, DecodeRunner, Inputs, computed, copied
from slotgraph.backends import DEVICE, HOST, Availability, Backend, Graph, Memory, Placement, choose, load, names
from slotgraph.dataflow.capabilities import LADDER
from slotgraph.dataflow.errors import CaptureError
from tests.strategies import draw

pytestmark = pytest.mark.slotgraph_backends()

DTYPES = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8)
PLACEMENTS: tuple[Placement, ...] = (DEVICE, HOST)
ROWS = 64


def random_on(backend: Backend, rows: int, seed: int) -> torch.Tensor:
    """[rows, 3] random floats on the device, at an address of their own."""
    tensor = backend.empty((rows, 3), torch.float32, DEVICE)
    tensor.copy_(torch.rand(rows, 3, generator=torch.Generator().manual_seed(seed)) + 0.5)
    return tensor


def captured(backend: Backend, step: Any, **more: Any) -> Graph:
    """A step warmed up and captured as the runners do it."""
    with backend.stream():
        step()
        backend.synchronize()
        return backend.capture(step, **more)


def has_true_graphs(backend: Backend) -> bool:
    """Whether a replay writes to where the capture did, which only a backend with modes of capture does."""
    return bool(backend.capabilities.capture_error_modes)


def test_a_backend_is_loaded_by_its_name(backend: Backend, backend_name: str) -> None:
    """A backend is named as users write it, is loaded and chosen by that name, and says that it can run."""
    kind = type(backend)
    assert kind.name == backend_name
    assert backend_name in names()
    assert load(backend_name) is type(choose(backend_name)) is kind
    assert choose(backend) is backend
    assert isinstance(kind.priority, int)
    available = kind.is_available()
    assert isinstance(available, Availability)
    assert (bool(available), available.reason) == (True, "")


def test_a_record_names_what_there_is(backend: Backend) -> None:
    """The record stays as it is, and what it names exists; fused lowerings are there just where the kernel is."""
    record = backend.capabilities
    assert record == backend.capabilities
    frozen: Any = record
    with pytest.raises(AttributeError):
        frozen.foreach_chunk = 3
    with pytest.raises(TypeError):
        frozen.roles["cache_loc"] = torch.int8
    assert CACHE_LOC.on(record) in CACHE_LOC.accepts
    assert SEQ_LEN_FILL.on(record) in {0, 1}
    assert record.foreach_chunk >= 0
    assert record.graphs_hint is None or record.graphs_hint > 0
    assert len(set(record.lowerings)) == len(record.lowerings)
    assert {"slot_by_slot"} <= set(record.lowerings) <= set(LADDER)
    assert (backend.fusion() is not None) == ("in_graph" in record.lowerings) == ("fused" in record.lowerings)


def test_streams_have_numbers_and_an_order(backend: Backend) -> None:
    """The current stream has a number, and streams can be ordered."""
    here = backend.stream_key()
    assert here() == here() == backend.stream_key()()
    backend.order(here(), here())
    assert bool((random_on(backend, 2, 1) > 0).all())


def test_memory_is_as_it_was_asked_for(backend: Backend) -> None:
    """Memory is of the shape, dtype and device asked for, contiguous, ordinary in any mode, and its own."""
    for dtype, placement, inside in itertools.product(DTYPES, PLACEMENTS, (False, True)):
        with torch.inference_mode(mode=inside):
            tensor = backend.empty((5, 2), dtype, placement)
        assert (tensor.shape, tensor.dtype) == ((5, 2), dtype)
        assert tensor.device == (backend.device if placement == DEVICE else torch.device("cpu"))
        assert tensor.is_contiguous()
        assert (tensor.is_inference(), tensor.requires_grad) == (False, False)
        tensor.fill_(1)
        backend.synchronize()
        assert bool((tensor == 1).all())
        assert backend.empty((0,), dtype, placement).numel() == 0
        kept = [backend.empty((7,), dtype, placement) for _ in range(4)]
        assert len({tensor.data_ptr() for tensor in kept}) == len(kept)


def test_a_replay_computes_on_what_its_inputs_hold_now(backend: Backend) -> None:
    """A replay computes on what its inputs hold now, in the same structure; true graphs write to the same tensors."""
    source, weights = random_on(backend, 4, 1), random_on(backend, 3, 2)
    graph = captured(backend, lambda: {"one": source + 1, "two": ((source @ weights).relu(), [source - source.sum()])})
    addresses = [tensor.data_ptr() for tensor in pytree.tree_leaves(graph.outputs)]
    for seed in range(3, 8):
        source.copy_(random_on(backend, 4, seed))
        graph.replay()
        backend.synchronize()
        wanted = {"one": source + 1, "two": ((source @ weights).relu(), [source - source.sum()])}
        torch.testing.assert_close(graph.outputs, wanted)
        assert pytree.tree_structure(graph.outputs) == pytree.tree_structure(wanted)
        if has_true_graphs(backend):
            assert [tensor.data_ptr() for tensor in pytree.tree_leaves(graph.outputs)] == addresses


def test_each_replay_moves_state_on_once(backend: Backend) -> None:
    """Each replay moves the step's state on by one; where graphs are true, capture leaves it as it was."""
    state, source = backend.empty((3,), torch.int64, DEVICE), random_on(backend, 4, 1)
    state.zero_()

    def step() -> torch.Tensor:
        state.add_(1)
        return source.sum(0) + state

    with backend.stream():
        graph = backend.capture(step)
    backend.synchronize()
    before = int(state[0])
    assert before == 0 or not has_true_graphs(backend)
    for replay in range(1, 4):
        graph.replay()
        backend.synchronize()
        assert state.tolist() == [before + replay] * 3
        torch.testing.assert_close(graph.outputs, source.sum(0) + before + replay)


@pytest.mark.parametrize("inside", [False, True])
def test_a_capture_inside_inference_mode_is_replayed_outside(backend: Backend, *, inside: bool) -> None:
    """What was captured inside inference mode is replayed outside it, and the other way round."""
    source = random_on(backend, 4, 1)
    with torch.inference_mode(mode=inside):
        graph = captured(backend, lambda: source * 3)
    source.copy_(random_on(backend, 4, 2))
    with torch.inference_mode(mode=not inside):
        graph.replay()
    backend.synchronize()
    torch.testing.assert_close(graph.outputs.clone(), source * 3)


def test_a_step_that_raises_spoils_no_other_capture(backend: Backend) -> None:
    """A step that raises is a CaptureError chained to it; the next capture, the earlier graphs and the stream work."""
    source = random_on(backend, 4, 1)
    earlier = captured(backend, lambda: source + 1)

    def bad() -> torch.Tensor:
        source.mul(2)
        raise LookupError("out of workspace")

    for _ in range(2):
        with pytest.raises(CaptureError, match=r"LookupError.*out of workspace") as refused, backend.stream():
            backend.capture(bad)
        assert isinstance(refused.value.__cause__, LookupError)
    later = captured(backend, lambda: source * 5)
    source.copy_(random_on(backend, 4, 2))
    for graph, answer in ((earlier, source + 1), (later, source * 5)):
        graph.replay()
        backend.synchronize()
        torch.testing.assert_close(graph.outputs, answer)


def test_each_error_mode_of_the_record_is_taken(backend: Backend) -> None:
    """Each mode that the record names is taken, and where there are any, another one is refused."""
    source = random_on(backend, 4, 1)
    for mode in backend.capabilities.capture_error_modes:
        graph = captured(backend, lambda: source - 2, error_mode=mode)
        graph.replay()
        backend.synchronize()
        torch.testing.assert_close(graph.outputs, source - 2)
    if backend.capabilities.capture_error_modes:
        with pytest.raises((CaptureError, RuntimeError, ValueError), match="no such mode"):
            captured(backend, source.neg, error_mode="no such mode")


def test_bytes_of_graphs_and_device_fit_one_another(backend: Backend) -> None:
    """A graph's bytes and a device's memory are whole numbers that fit one another, and grow by holding more."""
    source = random_on(backend, 64, 1)
    graph, memory = captured(backend, lambda: (source * 2 + 1) * source), backend.memory()
    assert isinstance(graph.nbytes, int)
    assert graph.nbytes >= 0
    assert isinstance(memory, Memory)
    assert memory.total > 0
    assert 0 <= memory.free <= memory.total
    assert 0 <= memory.allocated <= memory.total
    kept = backend.empty((1 << 20,), torch.float32, DEVICE)
    kept.fill_(1)
    backend.synchronize()
    assert backend.memory().allocated >= memory.allocated


def test_events_pass_in_order_and_measure_work(backend: Backend) -> None:
    """Events pass in order, can be waited for, and measure more milliseconds for more work."""
    source = random_on(backend, 512, 1)
    wide = source.repeat(1, 100)
    begin = time.perf_counter_ns()
    start = backend.event()
    wide = (wide @ wide.T @ wide).tanh()
    middle = backend.event()
    for _ in range(20):
        wide = (wide @ wide.T @ wide).tanh()
    stop = backend.event()
    stop.synchronize()
    most = (time.perf_counter_ns() - begin) / 1e6  # what lies between the events lies between these two, too
    assert all(event.query() is True for event in (start, middle, stop))
    assert 0 < start.elapsed_time(middle) < start.elapsed_time(stop) < 1.01 * most + 0.001
    assert middle.elapsed_time(stop) < start.elapsed_time(stop)


def test_work_on_the_stream_is_done_after_a_synchronisation(backend: Backend) -> None:
    """Work on the stream is done after a synchronisation, also where the block raised, and the stream may be nested."""
    source = random_on(backend, 4, 1)
    with pytest.raises(KeyError), backend.stream():
        raise KeyError
    with backend.stream(), backend.stream():
        twice = source * 2
    backend.synchronize()
    assert torch.equal(twice, source * 2)


class ContractInputs(Inputs):  # five slots of one dtype, so that chunks matter, and what a record speaks of
    ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=ROWS - 1)
    first: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-1)
    second: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-2)
    third: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=-3)
    places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    other_places: torch.Tensor = copied(TOKENS, dtype=CACHE_LOC, pad=0)
    lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL)
    here: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=4, placement="host")
    live: torch.Tensor = computed(lambda step: step.live(TOKENS), shape=1, dtype=torch.int32)
    sums: torch.Tensor = computed(lambda first, second: first * second, shape=TOKENS, dtype=torch.int64)


def batch_on(backend: Backend, requests: int, seed: int, places: torch.dtype) -> dict[str, torch.Tensor]:
    """A random batch where the backend wants it."""
    kinds = {"ids": torch.int64, "places": places, "other_places": torch.int64, "lens": torch.int32}
    kinds |= dict.fromkeys(("first", "second", "third", "here"), torch.int64)
    batch = {name: draw(1, 9, (requests,), seed + at, dtype) for at, (name, dtype) in enumerate(kinds.items())}
    return {name: value if name == "here" else value.to(backend.device) for name, value in batch.items()}


def runner_on(backend: Backend, **options: Any) -> tuple[DecodeRunner[Any], torch.Tensor]:
    """A captured runner whose step reads every slot on the device, and its table: floats that add exactly."""
    table = draw(1, 1000, (ROWS, 2), 1).float().to(backend.device)

    def step(view: ContractInputs) -> torch.Tensor:
        rows = table[view.ids] + (view.sums + view.third)[:, None]
        return rows + (view.places * 2 + view.other_places * view.lens + view.live)[:, None]

    runner = DecodeRunner(ContractInputs, step, backend=backend, **options)
    runner.capture()
    return runner, table


def answer(table: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the step must give, from the batch alone, on the host."""
    on_host = {name: value.cpu().long() for name, value in batch.items()}
    rows = on_host["first"] * on_host["second"] + on_host["third"] + on_host["places"] * 2 + len(on_host["ids"])
    return table.cpu()[on_host["ids"]] + (rows + on_host["other_places"] * on_host["lens"])[:, None]


@pytest.mark.parametrize("places", [torch.int32, torch.int64])
def test_every_backend_and_lowering_gives_the_same_numbers(backend: Backend, places: torch.dtype) -> None:
    """Batches of any size, through buckets and eagerly, give the same numbers on every backend by every lowering."""
    for lowering in backend.capabilities.lowerings:
        runner, table = runner_on(backend, buckets=[1, 2, 4, 8], lowering=lowering)
        for seed, requests in enumerate((8, 3, 1, 5, 8, 2, 20, 4, 3, 7)):
            batch = batch_on(backend, requests, seed, places)
            outputs = runner(batch)
            backend.synchronize()
            assert torch.equal(outputs.cpu(), answer(table, batch))
        assert runner.stats()["steps"] == {"graph": 9, "eager": 1}
        assert runner.stats()["lowerings"] == {lowering: 9}


def test_the_record_decides_dtypes_tails_and_memory(backend: Backend) -> None:
    """Roles take the record's dtypes and values, and slots lie in one allocation or each in its own, as it says."""
    record, (runner, _) = backend.capabilities, runner_on(backend, buckets=[4])
    view = runner.fill(batch_on(backend, 2, 1, torch.int64))
    runner.replay(view)
    backend.synchronize()
    assert view.places.dtype == view.other_places.dtype == CACHE_LOC.on(record)
    assert view.lens[2:].tolist() == [SEQ_LEN_FILL.on(record)] * 2
    assert view.here.device.type == "cpu"
    assert view.here[2:].tolist() == [4, 4]
    on_device = [buffer.tensor for buffer in runner.graphs.buffers if buffer.slot.placement == "device"]
    assert all(tensor.device == backend.device for tensor in on_device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in on_device}
    assert len(storages) == (1 if record.arenas else len(on_device))
    assert record.arenas or all(tensor.storage_offset() == 0 for tensor in on_device)
