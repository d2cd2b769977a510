"""Every name and argument of torch_npu that the adapter uses, so that a changed wheel says so here first."""

import dataclasses
import importlib
import inspect
import operator
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph.backends.npu import NpuBackend

torch_npu: Any = pytest.importorskip("torch_npu", reason="torch_npu is not installed: `make test-npu` installs it")


SIGNATURES = {
    "graph": "npu_graph pool stream auto_dispatch_capture capture_error_mode",
    "graph_pool_handle": "",
    "is_current_stream_capturing": "",
    "current_stream": "device",
    "default_stream": "device",
    "set_stream": "stream",
    "stream": "stream",
    "synchronize": "device",
    "empty_cache": "",
    "memory_snapshot": "mempool_id",
    "memory_stats_as_nested_dict": "device",
    "mem_get_info": "device",
    "current_device": "",
    "is_available": "",
    "_is_in_bad_fork": "",
    "Stream.__new__": "cls device priority kwargs",
    "Stream.wait_stream": "stream",
    "Event.__new__": "cls enable_timing blocking interprocess",
    "Event.record": "stream",
    "Event.wait": "stream",
    "Event.query": "",
    "Event.synchronize": "",
    "Event.elapsed_time": "end_event",
    "NPUGraph.__new__": "cls",
    "NPUGraph.replay": "",
    "NPUGraph.reset": "",
    "NPUGraph.pool": "",
    "NPUGraph.update": "cpu_update_input",
    "NPUGraph.capture_begin": "pool capture_error_mode",
    "NPUGraph.capture_end": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """What the adapter calls of torch.npu takes what it is given, in the order that is known."""
    call = operator.attrgetter(name)(torch_npu.npu)
    assert [one for one in inspect.signature(call).parameters if one != "self"] == SIGNATURES[name].split()


def test_streams_have_handles_and_numbers() -> None:
    """A stream tells its handle and its number, and is found by the latter."""
    assert {"npu_stream", "stream_id", "device_type"} <= set(dir(torch_npu._C._NPUStreamBase))


@pytest.mark.parametrize(
    "name", ["_npu_endAllocateToPool", "_npu_releasePool", "_weak_ref_tensor", "_npu_getCurrentStream"]
)
def test_inner_names(name: str) -> None:
    """What has no public name is where the adapter looks for it."""
    assert callable(getattr(torch_npu._C, name))


def test_records_of_operators() -> None:
    """A graph keeps a record of each operator that takes host arguments, with what it was given."""
    graphs = importlib.import_module("torch_npu.npu.graphs")
    record = graphs._GraphDispatchRecord
    assert {field.name for field in dataclasses.fields(record)} >= {
        "event",
        "handle",
        "kwargs",
        "args",
        "op_cache_entry",
    }
    source = inspect.getsource(graphs)
    assert "self.graph_dispatch_records = []" in inspect.getsource(graphs._GraphDispatchMode.__init__)
    assert "self.graph_dispatch_mode = _GraphDispatchMode()" in inspect.getsource(graphs.NPUGraph.__init__)
    assert "update_stream = None" in source  # one for all graphs, unless one has its own
    assert "torch.npu.stream(self.update_stream)" in source


def test_process_that_started_the_device() -> None:
    """The wheel notes the process that started the device; by it a fork is told that torch_npu did not see."""
    assert torch_npu.npu._original_pid == os.getpid()


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
def test_host_arguments(name: str, arguments: list[str]) -> None:
    """The operators that take host arguments, and what these are called, are found where they were."""
    handlers = importlib.import_module("torch_npu.npu._npugraph_handlers.npugraph_handler")
    specs = handlers._NPU_GRAPH_OP_HANDLERS[name].get_update_specs(name)
    assert [one for _, _, one in specs] == arguments
    assert all(where == "arg" and isinstance(place, int) for where, place, _ in specs)


@pytest.mark.parametrize(
    "text", [text for text, _ in (*NpuBackend.advice, *NpuBackend.conditions) if not text.isdigit()]
)
def test_what_errors_say(text: str) -> None:
    """The wheel still says what the adapter tells its errors apart by."""
    library = Path(torch_npu.__file__).parent / "lib" / "libtorch_npu.so"
    assert text.encode() in library.read_bytes().lower()


def test_versions() -> None:
    """The wheel is for this torch."""
    assert torch_npu.__version__.split(".")[:2] == torch.__version__.split(".")[:2] == ["2", "13"]
