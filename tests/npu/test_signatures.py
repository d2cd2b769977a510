"""What the adapter takes from torch_npu unseen by its other tests: records, host arguments, and what errors say."""

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from slotgraph.backends.npu import NpuBackend

torch_npu: Any = pytest.importorskip("torch_npu", reason="torch_npu is not installed: `make test-npu` installs it")


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
