"""The CPU with true capture semantics: what CUDA would refuse or get wrong fails in a test on a laptop.

How it behaves, where that is not obvious:

- The step runs once, on what its inputs hold then; whatever existed before, and the random state, is as it was
  afterwards. For that, the whole storage of each tensor that the step writes is cloned: a capture that writes a cache
  of 10 GB needs 10 GB more for a moment.
- Every storage that the step allocates stays: there is no reuse between operators as in a device's graph pool.
- A custom operator is one operator: it is run again whole, and what it does inside is not looked at.
- A compiled function runs as it was written, operator by operator; higher-order operators (torch.cond) are refused.
- What torch takes apart, it takes apart as in inference mode; that is where an LSTM differs in its last bits.
- Backward passes are refused; gradients are never recorded, and no tensor becomes an inference tensor.
- Only the capturing thread is recorded, whatever the error mode.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, final

import torch

from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.guard import FUNCTION_MODES, below_modes
from .base import NO_PARAMETERS, Capabilities, Graph, Interruption, mode_of
from .cpu import LOWERINGS, HostBackend, raised_by_step
from .operators import tensors_in
from .recorder import Call, Recorder, active_recorder, plainly

_C: Final[Any] = torch._C  # noqa: SLF001 - what follows has no public name

# A replay is below autograd and autocast: what they did is in the recorded operators already. So it writes inference
# tensors and ordinary ones alike, and spares the version counters.
_BELOW: Final = (
    _C.DispatchKeySet(_C.DispatchKey.AutogradFunctionality)
    | _C.DispatchKeySet(_C.DispatchKey.AutogradOther)
    | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
    | _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
)
_below_autograd: Final[Any] = _C._ExcludeDispatchKeyGuard  # noqa: SLF001

_ERROR_MODES: Final = ("global", "thread_local", "relaxed")
_CAPABILITIES: Final = Capabilities(
    foreach_mixed=True,
    capture_copies=frozenset({"device", "pinned"}),
    capture_error_modes=_ERROR_MODES,
    lowerings=LOWERINGS,
)


@final
class CapturedGraph(Graph):
    """The operators of one step, replayed into the storages of its capture."""

    def __init__(self, recorder: Recorder, outputs: Any) -> None:
        storages = recorder.storages
        self._found = storages.seal()
        storages.poison()
        self._parts = recorder.parts
        self._outputs = outputs
        self._nbytes = storages.nbytes(tensors_in(outputs))
        self._is_checked = False

    @property
    def outputs(self) -> Any:
        """What the step returned at capture; NaN, the extreme integer or true until the first replay."""
        return self._outputs

    @property
    def nbytes(self) -> int:
        """Bytes that the capture allocated and the graph holds, without its outputs' storages."""
        return self._nbytes

    @property
    def parts(self) -> int:
        """Pieces with operators to replay, without what runs between them."""
        return sum(bool(calls) for calls, _ in self._parts)

    def check_addresses(self) -> None:
        """Raise ReplayError if a tensor that the graph uses was moved or resized since; the first replay does it."""
        for found in self._found:
            found.check()

    def replay(self) -> None:
        """Run the recorded operators again, on whatever their inputs hold now.

        Raises ReplayError inside a capture, if a tensor moved before the first replay, or from what an operator raised;
        and whatever is raised by what runs between the operators as it is.
        """
        if not self._is_checked:
            self.check_addresses()
            self._is_checked = True
        if active_recorder() is not None:
            raise ReplayError("a graph cannot be replayed while this thread is capturing")
        for calls, run in self._parts:
            if FUNCTION_MODES():
                below_modes(_run_all, calls)
            else:
                _run_all(calls)
            if run is not None:
                run()


def _run_all(calls: list[Call]) -> None:
    try:
        with _below_autograd(_BELOW):
            for call in calls:
                call()
    except Exception as error:
        raise ReplayError(f"an operator of the captured step raised: {type(error).__name__}: {error}") from error


@final
class CpuCaptureBackend(HostBackend):
    """Records steps operator by operator and replays them into fixed storages, with a device graph's restrictions."""

    name: ClassVar[str] = "cpu-capture"

    @property
    def capabilities(self) -> Capabilities:
        """As CUDA's: copies in a capture from the device and from pinned memory, which are one here."""
        return _CAPABILITIES

    def capture(
        self,
        step: Callable[[], Any],
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Run the step once and record it; its storages, and all that it wrote, are left as if it had not run.

        parameters: to be read by operators alone, since there is no way to hand their values to a replay. Raises
        CaptureError for what CUDA refuses, naming the operation and the way out, and from what the step raised.
        """
        del pool
        mode_of(error_mode, _ERROR_MODES)
        recorder = Recorder(parameters)
        try:
            outputs = recorder.record(step)
        except CaptureError:
            raise
        except Exception as error:
            raise raised_by_step(error, "while it was captured") from error
        if recorder.refused is not None:
            raise CaptureError(f"the step went on after a refusal: {recorder.refused}") from recorder.refused
        return plainly(CapturedGraph, recorder, outputs)

    def interrupt(self, run: Interruption) -> Any:
        """Call it as it is, here and in each replay; outside a capture, once."""
        recorder = active_recorder()
        return run(None) if recorder is None else recorder.interrupt(run)
