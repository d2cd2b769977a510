"""Backends by name, those of other packages too, and devices that are not here: reasons, and what errors say."""

import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from slotgraph.backends import GROUP, Availability, choose, cuda, device_graph, load, names, npu
from slotgraph.backends.cpu import CpuBackend
from slotgraph.backends.cuda import CudaBackend
from slotgraph.backends.npu import NpuBackend
from slotgraph.dataflow import errors
from slotgraph.dataflow.errors import BackendUnavailableError, CaptureError
from tests.programs import python


class PreferredBackend(CpuBackend):  # type: ignore[misc]  # final to users; here it is another device's stand-in
    name = "preferred"
    priority = 1000


class AbsentBackend(PreferredBackend):  # type: ignore[misc]  # as above
    name = "absent"

    @classmethod
    def is_available(cls) -> Availability:
        return Availability(available=False, reason="no such card here: pip install card")


class BrokenBackend(PreferredBackend):  # type: ignore[misc]  # as above
    name = "broken"

    @classmethod
    def is_available(cls) -> Availability:
        raise ValueError("the driver said something unheard of")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes entry points look installed: name and object."""
    everything = importlib.metadata.entry_points

    def install(**points: str) -> None:
        found = [EntryPoint(name, value, GROUP) for name, value in points.items()]

        def entry_points(**wanted: Any) -> Any:
            return EntryPoints([*everything(**wanted), *found]).select(**wanted)

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)

    return install


def test_no_package_takes_the_place_of_our_backends(installed: Any) -> None:
    """The backends of this package are there, whatever else is, and another package cannot take their place."""
    installed(cpu=f"{__name__}:PreferredBackend")
    assert {"cpu", "cpu-capture"} <= set(names())
    assert len(set(names())) == len(names())
    assert load("cpu") is CpuBackend


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    """A name that is none is refused with the nearest one, if there is one, and all that are known."""
    for name, hint in (("cpu_capture", r" \(did you mean 'cpu-capture'\?\)"), ("quantum", "")):
        for use in (choose, load):
            with pytest.raises(BackendUnavailableError, match=rf"no backend '{name}'{hint}; known here: cpu, cpu-cap"):
                use(name)


def test_auto_takes_the_highest_priority_that_can_run(installed: Any) -> None:
    """Of those that can run here, auto takes the one of highest priority; one that cannot run is passed over."""
    before = choose("auto")
    assert before.priority == max(load(name).priority for name in names() if load(name).is_available())
    installed(absent=f"{__name__}:AbsentBackend")
    assert "absent" in names()
    assert type(choose("auto")) is type(before)
    with pytest.raises(BackendUnavailableError, match="'absent' cannot run here: no such card here: pip install card"):
        choose("absent")
    installed(absent=f"{__name__}:AbsentBackend", preferred=f"{__name__}:PreferredBackend")
    assert choose("auto").name == "preferred"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("no_such_module:Adapter", "'broken' cannot be loaded: .*no_such_module"),
        ("slotgraph.backends.cpu:NoSuchClass", "'broken' cannot be loaded: .*NoSuchClass"),
        ("card_driver:Adapter", "'broken' cannot be loaded: RuntimeError: no card in slot 3"),
        (f"{__name__}:EntryPoint", "'broken': .* is not a subclass of .*Backend"),
        (f"{__name__}:test_no_package_takes_the_place_of_our_backends", "'broken': .* is not a subclass of .*Backend"),
        (f"{__name__}:BrokenBackend", "the driver said something unheard of"),
    ],
)
def test_a_broken_package_is_told_and_passed_over(
    installed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, says: str
) -> None:
    """Whatever is wrong with a package is an error with the reason by name, and a warning for auto, which goes on."""
    (tmp_path / "card_driver.py").write_text("raise RuntimeError('no card in slot 3')\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = type(choose("auto"))
    installed(broken=value)
    with pytest.raises((BackendUnavailableError, ValueError), match=says):
        choose("broken")
    with capture_logs() as events:
        assert type(choose("auto")) is before
    assert [(event["log_level"], event["backend"]) for event in events] == [("warning", "broken")]


LAZY = """
import sys
import slotgraph
import slotgraph.backends
loaded = lambda: {name.rpartition(".")[2] for name in sys.modules if name.startswith("slotgraph.backends.")}
before = loaded()
assert not before & {"cpu", "cpu_capture", "cuda", "npu", "accelerator"}, before
assert "npu" in slotgraph.backends.names()
assert loaded() == before, loaded()
slotgraph.backends.choose("cpu")
assert "cpu" in loaded() and "cpu_capture" not in loaded(), loaded()
slotgraph.backends.choose("cpu-capture")
assert "cpu_capture" in loaded()
slotgraph.backends.load("npu"), slotgraph.backends.load("accelerator")
assert not {"triton", "torch_npu", "transformers", "matplotlib", "typer", "torch._dynamo"} & set(sys.modules)
"""


def test_adapters_are_loaded_on_first_use() -> None:
    """Importing slotgraph, and listing backends, loads no adapter; choosing one loads that one and no other."""
    paths = [Path(__file__).parents[2] / "src", *sys.path]
    done = python("-c", LAZY, paths=paths, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 0, done.stderr


MEMORY = "out of memory. Tried to allocate 2.00 GiB"
BEGIN = (
    "capture_begin:../torch_npu/csrc/core/npu/NPUGraph.cpp:318 NPU function error: "
    "c10_npu::acl::AclmdlRICaptureBegin(capture_stream_, capture_mode), error code is {}\n[ERROR] 2026 (PID:1) ERR00100"
)


def refusing(error: Exception) -> Any:
    """A call of torch's that raises."""

    def refuse(*_: Any) -> Any:
        raise error

    return refuse


def reason(name: str) -> str:
    """Why a backend cannot run."""
    available = load(name).is_available()
    assert not available
    return available.reason


def test_each_reason_for_no_cuda_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """No torch for CUDA, hidden devices, a driver that does not start, and a fork are told apart, with the way out."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("is_available", "_is_in_bad_fork"):
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert f"{name} is {value!r}: unset it" in reason("cuda")
    said = RuntimeError("Found no NVIDIA driver on your system.\nLong story")
    monkeypatch.setattr(torch.cuda, "init", refusing(said))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert reason("cuda") == (
        "torch finds no device (CUDA_VISIBLE_DEVICES='7'): Found no NVIDIA driver on your system.; "
        "nvidia-smi or rocm-smi shows what the driver sees"
    )
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert "'spawn'" in reason("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert torch.__version__ in reason("cuda")
    with pytest.raises(BackendUnavailableError, match=r"'cuda' cannot run here: .*built without CUDA: .*pip install"):
        choose("cuda")


def test_a_check_of_inputs_needs_a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for torch's check of inputs is refused where this torch has none."""
    monkeypatch.setattr(torch.cuda, "graph", lambda cuda_graph, pool=None: (cuda_graph, pool))
    with pytest.raises(BackendUnavailableError, match=r"cannot check whether inputs are alive: torch 2\.13 can"):
        cuda._liveness()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A torch_npu that is installed, and that no test before has tried to import."""
    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    npu._import.cache_clear()
    yield monkeypatch
    npu._import.cache_clear()


def present(monkeypatch: pytest.MonkeyPatch, **calls: Any) -> None:
    """A torch.npu with some calls, as torch_npu brings it."""
    found = {"_is_in_bad_fork": lambda: False, "is_available": lambda: True, **calls}
    monkeypatch.setattr(torch, "npu", SimpleNamespace(**found), raising=False)


def test_a_missing_torch_npu_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the reason is the command that installs the one for this torch."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    version = torch.__version__.split("+")[0]
    assert f"`pip install torch_npu=={version}`" in reason("npu")
    with pytest.raises(BackendUnavailableError, match="torch_npu is not installed"):
        load("npu")()


def test_a_torch_npu_that_raises_at_import_is_told(package: pytest.MonkeyPatch) -> None:
    """A package that raises at its import is told from one that is missing, with what it said; it is tried once."""
    tries, really = list[str](), importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name != "torch_npu":
            return really(name, package)
        tries.append(name)
        raise OSError("libascendcl.so: cannot open shared object file")

    package.setattr(importlib, "import_module", refuse)
    for _ in range(2):
        assert "libascendcl.so: cannot open" in (said := reason("npu"))
        assert "set_env.sh" in said
    assert tries == ["torch_npu"]


def test_each_reason_for_no_npu_is_told_apart(package: pytest.MonkeyPatch) -> None:
    """No device, hidden devices, a driver that does not start, and forks, seen by torch_npu or not, are told apart."""
    package.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    present(package, is_available=lambda: False)
    assert "there is no NPU: `npu-smi info`" in reason("npu")
    package.setenv("ASCEND_RT_VISIBLE_DEVICES", "9")
    assert "ASCEND_RT_VISIBLE_DEVICES='9'" in reason("npu")
    code = "Initialize:NPUToolkit.cpp NPU function error: aclInit, error code is 500000\nand a page more"
    present(package, is_available=refusing(RuntimeError(code)))
    assert "error code is 500000" in reason("npu")
    assert "page" not in reason("npu")
    for fork in ({"_is_in_bad_fork": lambda: True}, {"_original_pid": os.getpid() + 1}):
        present(package, **fork)
        assert "'spawn'" in reason("npu")
    present(package, _original_pid=os.getpid())
    assert load("npu").is_available()


def test_something_else_called_torch_npu_is_no_npu(package: pytest.MonkeyPatch) -> None:
    """What a program put in the package's place, as tests of others do, is no NPU, and breaks nothing off."""
    package.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    assert reason("npu") == "what is imported as torch_npu brings no torch.npu"


Kind = type[CudaBackend | NpuBackend]


def told(error: Exception, device: Kind = CudaBackend) -> str:
    """What is made of an error that is raised from a line of this file."""
    with pytest.raises(type(error)) as caught:
        refusing(error)()
    return str(device_graph.not_captured(caught.value, device.advice, device.conditions))


NO_STREAMS = "no streams left for another graph"
SAID: tuple[tuple[Kind, str, str], ...] = (
    (CudaBackend, "CUDA error: operation not permitted when stream is capturing\nSearch for", "torch.where"),
    (CudaBackend, "Cannot copy during capture unless the CPU tensor is pinned. Please", "placement='host'"),
    (CudaBackend, "CUDA error: operation failed due to a previous error during capture", "went on after it"),
    (CudaBackend, "CUDA error: dependency created on uncaptured work in another stream", "other stream wait"),
    (CudaBackend, "Offset increment outside graph capture encountered unexpectedly.", "generator="),
    (CudaBackend, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", "warm-up"),
    (NpuBackend, "Cannot run aclop operators during NPU graph capture. It is NonZero.", "no kernel that a graph"),
    (NpuBackend, "f:../Local.cpp:24 NPU function error: AclrtSynchronizeStreamWithTimeout", "it waits for the dev"),
)
CONDITIONS = (
    (BEGIN.format(207005), NO_STREAMS),
    (BEGIN.format(207008), NO_STREAMS),
    ("NPU graphs must be captured on a non-default stream. (However,", "the current stream is the default one"),
    ("Do not support TASK_QUEUE_ENABLE = 2 during NPU graph capture", "set TASK_QUEUE_ENABLE=1 in the environment"),
    ("not supported when pin_memory_expandable_segments=True.", "take pin_memory_expandable_segments out of"),
)


def test_a_refusal_of_the_device_names_line_and_way_out() -> None:
    """Each says what was refused, at which line of the step if it is to blame, and the way out, without a C++ place."""
    for device, text, way_out in SAID:
        said = told(RuntimeError(text), device)
        assert said.startswith("a captured step cannot do what it does at test_registry.py:")
        assert "`raise error`" in said
        assert way_out in said
        assert not any(one in said for one in (".cpp", "\n"))
    for text, way_out in CONDITIONS:
        said = told(RuntimeError(text), NpuBackend)
        assert said.startswith("nothing can be captured as things are (")
        assert way_out in said
        assert not any(one in said for one in (".cpp", ".py", "\n"))


def test_an_error_of_a_step_is_told_with_its_line() -> None:
    """An error of the step's own is told with its line; one that was never raised has none, one of torch's has ours."""
    said = told(LookupError("out of workspace"))
    assert said.startswith("the step raised LookupError at test_registry.py:")
    assert said.endswith("while it was captured: out of workspace")
    assert told(KeyError()).endswith("captured: KeyError")
    assert errors.place_of(RuntimeError("x")) == ""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2).view(3)
    assert "test_registry.py:" in errors.place_of(caught.value)


RAN_OUT = {
    f"CUDA {MEMORY}. GPU 0 has a total capacity of 139.80 GiB of which 1 GiB is free": "tried to allocate 2.00 GiB",
    f"NPU {MEMORY} (NPU 0; 61 GiB total)": "tried to allocate 2.00",
    "CUDA error: out of memory": "CUDA error",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "CUDA error: CUBLAS",
}


def test_memory_that_ran_out_is_told_apart() -> None:
    """Too little memory is told apart from other errors, with what was asked for and what to lower."""
    ran_out = [torch.OutOfMemoryError(next(iter(RAN_OUT))), *map(RuntimeError, RAN_OUT)]
    kinds: tuple[Kind, ...] = (CudaBackend, NpuBackend)
    for error, device in itertools.product(ran_out, kinds):
        assert device_graph.ran_out_of_memory(error)
        said = told(error, device)
        assert said.startswith(f"the device's memory ran out while this bucket was captured ({RAN_OUT[str(error)]}")
        assert "capacity" not in said
        assert all(part in said for part in ("number of buckets", "largest bucket", "KV cache"))
    assert not device_graph.ran_out_of_memory(ValueError("out of memory"))


def test_what_is_no_pool_is_refused() -> None:
    """What is no pool is refused."""
    nowhere: Any = None
    for pool in (3, (1,), (1, "2"), "pool"):
        with pytest.raises(CaptureError, match=r"pool is what pool\(\)"):
            CudaBackend._pool_of(nowhere, pool)
