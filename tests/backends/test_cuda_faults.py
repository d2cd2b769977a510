"""CUDA where there is none: why the backend cannot run, and what its errors say; runs on any machine."""

import importlib
from typing import Any

import pytest
import torch

from slotgraph import backends
from slotgraph.backends import cuda, faults
from slotgraph.backends.cuda_faults import ADVICE
from slotgraph.backends.cuda_runtime import CudaRuntime
from slotgraph.backends.graph_pool import pool_of
from slotgraph.dataflow import errors
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError

SYNC = "CUDA error: operation not permitted when stream is capturing\nSearch for `cudaErrorStreamCaptureUnsupported'\n"
PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. Please use "
    "tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB is free"
)


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that is built for CUDA and sees no device."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def refuses_to_start(message: str) -> Any:
    """A torch.cuda.init that raises."""

    def init() -> None:
        raise RuntimeError(message)

    return init


def reason() -> str:
    """Why the backend cannot run."""
    available = cuda.CudaBackend.is_available()
    assert not available
    return available.reason


def test_module_loads_anywhere() -> None:
    """The module is imported without a device, and the backend is named."""
    assert importlib.import_module("slotgraph.backends.cuda").Adapter is backends.load("cuda")
    assert "cuda" in backends.names()
    assert backends.load("cuda").priority > backends.load("cpu").priority


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that is built without CUDA is told by its version, with the command that installs one that is."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch.__version__ in reason()
    assert "built without CUDA: on Linux, `pip install" in reason()
    with pytest.raises(BackendUnavailableError, match=r"'cuda' cannot run here: .*pip install"):
        backends.choose("cuda")


@pytest.mark.parametrize("value", ["", "-1"])
@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_hidden_devices(built_for_cuda: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A variable that hides every device is named."""
    built_for_cuda.setenv(name, value)
    assert f"{name} is {value!r}: unset it" in reason()


def test_no_driver(built_for_cuda: pytest.MonkeyPatch) -> None:
    """What the driver says is passed on, one line of it, with the devices that were asked for."""
    built_for_cuda.setattr(torch.cuda, "init", refuses_to_start("Found no NVIDIA driver on your system.\nLong story"))
    built_for_cuda.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert reason() == (
        "torch finds no device (CUDA_VISIBLE_DEVICES='7'): Found no NVIDIA driver on your system.; "
        "nvidia-smi or rocm-smi shows what the driver sees"
    )


def test_forked(built_for_cuda: pytest.MonkeyPatch) -> None:
    """A process that was forked after CUDA was used is told to be spawned."""
    built_for_cuda.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "'spawn'" in reason()


def test_liveness_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for torch's check of inputs is refused where this torch has none."""
    monkeypatch.setattr(torch.cuda, "graph", lambda cuda_graph, pool=None: (cuda_graph, pool))
    with pytest.raises(BackendUnavailableError, match=r"cannot check whether inputs are alive: torch 2\.13 can"):
        cuda._liveness()


@pytest.mark.parametrize("pool", [3, (1,), (1, "2"), "pool"])
def test_strange_pool(pool: object) -> None:
    """What is no pool is refused."""
    with pytest.raises(CaptureError, match=r"pool is what pool\(\)"):
        pool_of(pool, CudaRuntime())


def raised(error: Exception) -> Exception:
    """An error that was raised from a line of this file."""
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (RuntimeError(SYNC), ["operation not permitted when stream is capturing)", "item()", "in a slot"]),
        (RuntimeError(PAGEABLE), ["placement='host'", "pinned"]),
        (RuntimeError("CUDA error: operation failed due to a previous error during capture"), ["went on after it"]),
        (RuntimeError("CUDA error: dependency created on uncaptured work in another stream"), ["other stream wait"]),
        (RuntimeError("Offset increment outside graph capture encountered unexpectedly."), ["generator="]),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"), ["warm-up"]),
        (
            LookupError("out of workspace"),
            ["the step raised LookupError at", "while it was captured: out of workspace"],
        ),
        (KeyError(), ["the step raised KeyError", "captured: KeyError"]),
    ],
)
def test_explanations(error: Exception, parts: list[str]) -> None:
    """Each refusal says what was refused, on which line, and the way out, on one line."""
    message = str(faults.not_captured(raised(error), ADVICE))
    assert "\n" not in message
    for part in [*parts, "test_cuda_faults.py:", "`raise error`"]:
        assert part in message


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(MEMORY),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_ran_out(error: Exception) -> None:
    """Too little memory is told apart from other errors, with what to lower."""
    assert faults.ran_out_of_memory(error)
    message = str(faults.not_captured(raised(error), ADVICE))
    assert "memory ran out while this bucket was captured" in message
    for part in ("number of buckets", "largest bucket", "KV cache"):
        assert part in message
    assert not faults.ran_out_of_memory(ValueError("out of memory"))


def test_what_was_asked_for() -> None:
    """The size that could not be had is in the message, without the allocator's page of advice."""
    message = str(faults.out_of_memory(torch.OutOfMemoryError(MEMORY), "before"))
    assert "(tried to allocate 2.00 GiB)" in message
    assert "capacity" not in message


def test_place_without_a_traceback() -> None:
    """An error that was never raised has no place; one from inside torch has the line that called it."""
    assert errors.place_of(RuntimeError("x")) == ""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2).view(3)
    assert "test_cuda_faults.py:" in errors.place_of(caught.value)
