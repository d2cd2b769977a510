"""The CPU with true capture semantics: what CUDA would refuse or get wrong fails in a test on a laptop.

Behaviour that is not obvious:

- The step runs once, on the current contents of its inputs. Existing tensors and the random state are restored
  afterwards. For that, the whole storage of each tensor that the step writes is cloned: a capture that writes a cache
  of 10 GB needs 10 GB more for a moment.
- Every storage that the step allocates is kept: operators do not reuse memory as they do in a device's graph pool.
- A custom operator is one operator: it is run again as a whole, and its inner operators are not inspected.
- A compiled function runs as it was written, operator by operator. Higher-order operators (torch.cond) are refused.
- Torch decomposes operators as in inference mode, so an LSTM may differ in its last bits.
- Backward passes are refused. Gradients are never recorded, and no tensor becomes an inference tensor.
- Only the capturing thread is recorded, whatever the error mode.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from ..dataflow.capabilities import Capabilities
from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.guard import FUNCTION_MODES, below_modes, run_and_undo, without_gradients
from .base import NO_PARAMETERS, Capturable, Graph, Interruption, mode_of
from .cpu import HOST_CAPABILITIES, HostBackend
from .device_graph import not_captured
from .operators import (
    NO_GRADIENTS,
    OperatorWatch,
    call_again,
    check_function,
    check_operator,
    copies_to_host,
    fixed_key,
    is_composite,
    refuse_operator,
    run_uncompiled,
    run_under,
    tensors_in,
    written,
)

_C: Final[Any] = torch._C  # noqa: SLF001 - what follows has no public name
T = TypeVar("T")
Action = Callable[[], object]
_ACTIVE: Final = threading.local()
_MOVED: Final = "a graph's addresses are fixed: pass an output of the right shape, allocated before it is written"

# A replay runs below autograd and autocast, whose effects are in the recorded operators already. So it can write
# inference tensors and ordinary ones alike, and skips the version counters.
_BELOW: Final = (
    _C.DispatchKeySet(_C.DispatchKey.AutogradFunctionality)
    | _C.DispatchKeySet(_C.DispatchKey.AutogradOther)
    | _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
    | _C.DispatchKeySet(_C.DispatchKey.AutocastCPU)
)
_CAPABILITIES: Final = attrs.evolve(HOST_CAPABILITIES, capture_error_modes=("global", "thread_local", "relaxed"))


def active_recorder() -> "Recorder | None":
    """Return the recorder of this thread's operators, or None if the thread is not capturing a step."""
    recorder: Recorder | None = getattr(_ACTIVE, "recorder", None)
    return recorder


def plainly(call: Callable[..., T], *args: Any) -> T:
    """Call a function that makes ordinary tensors, without gradients or version counters, whatever modes are on."""
    with _C._InferenceMode(False), _C._AutoDispatchBelowADInplaceOrView():  # noqa: FBT003, SLF001
        return without_gradients(call, *args)


@attrs.define
class OlderStorage:
    """A storage that existed before the capture.

    Attributes:
        storage: The storage.
        address: Its address.
        nbytes: Its size.
        operator: The first operator that took it.
        tensors: The tensors over it, with their addresses.
        before: Its bytes before the first write, or None.
    """

    storage: torch.UntypedStorage
    address: int
    nbytes: int
    operator: str
    tensors: list[tuple[TensorWeakRef, int]] = attrs.field(factory=list)
    before: torch.UntypedStorage | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the storage has moved or changed size since capture."""
        return (self.storage.data_ptr(), self.storage.nbytes()) != (self.address, self.nbytes)

    def check(self) -> None:
        """Raise ReplayError if the storage, or a tensor over it that still lives, has moved since capture."""
        if self.has_moved:
            raise ReplayError(
                f"a storage of {self.nbytes} bytes that {self.operator} takes in the graph was resized or moved: "
                "capture again"
            )
        for reference, address in self.tensors:
            tensor = reference()
            if tensor is not None and tensor.data_ptr() != address:
                what = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, that {self.operator} takes"
                raise ReplayError(f"{what} has moved from {address:#x} to {tensor.data_ptr():#x}: capture again")


class Storages:
    """The storages that a capture uses. With `restore` and `poison`, the capture leaves no trace."""

    def __init__(self) -> None:
        self._found: dict[int, OlderStorage] = {}
        self._owned: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}  # by id; the tensors stay alive, so that no id is reused
        self.constants: set[int] = set()

    def read(self, tensor: torch.Tensor, operator: str) -> None:
        """Record a tensor that an operator takes."""
        key = fixed_key(tensor)
        if key not in self._owned and id(tensor) not in self._known:
            storage = tensor.untyped_storage()
            found = self._found.setdefault(key, OlderStorage(storage, storage.data_ptr(), storage.nbytes(), operator))
            self._known[id(tensor)] = tensor
            found.tensors.append((TensorWeakRef(tensor), tensor.data_ptr()))

    def write(self, tensor: torch.Tensor) -> None:
        """Save the bytes of an older storage before its first write. Even for a small view, save the whole storage."""
        key = fixed_key(tensor)
        if key in self.constants:
            refuse_operator("a write into a tensor made from a host value", "make it with torch.full or torch.zeros")
        found = self._found.get(key)
        if found is not None and found.before is None:
            found.before = found.storage.clone()

    def made(self, tensor: torch.Tensor) -> bool:
        """Record a tensor that an operator returned, and return whether its storage is new."""
        key = fixed_key(tensor)
        self._known[id(tensor)] = tensor
        if key in self._owned or key in self._found:
            return False
        self._owned[key] = tensor.detach()
        return True

    def restore(self) -> None:
        """Restore the bytes of every storage that existed before."""
        for found in self._found.values():
            if found.before is not None:
                if found.storage.nbytes() != found.nbytes:
                    found.storage.resize_(found.nbytes)
                found.storage.copy_(found.before)
                found.before = None

    def poison(self) -> None:
        """Set every bit of what the capture allocated, so that premature reads show: as NaN, -1 or true."""
        for tensor in self._owned.values():
            storage: Any = tensor.untyped_storage()
            storage.fill_(0xFF)

    def nbytes(self, outputs: Any) -> int:
        """Return the bytes that the capture allocated, without the storages of the outputs."""
        handed_out = {fixed_key(tensor) for tensor in tensors_in(outputs)}
        return sum(own.untyped_storage().nbytes() for key, own in self._owned.items() if key not in handed_out)

    def seal(self) -> list[OlderStorage]:
        """Return all storages that existed before. Raise CaptureError if the step itself moved one."""
        if any(found.has_moved for found in self._found.values()):
            refuse_operator("a storage that it resizes", _MOVED)
        return list(self._found.values())


class _Functions(TorchFunctionMode):
    """Refuses what torch does without any operator, while its recorder records."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Pass the call on, or raise CaptureError."""
        del types
        named = dict(kwargs or {})
        if active_recorder() is self._recorder:
            self._recorder.refusing(check_function, func, args, named, self._recorder.parameters)
            if copies_to_host(func, args, named):
                named["copy"] = True  # a device would copy; on the CPU torch returns the same tensor
        return func(*args, **named)


class Recorder(OperatorWatch):
    """Runs a step's operators and records them, with aliases of their tensors.

    Attributes:
        parts: Lists of calls to replay below autograd, each with a call that follows it in the caller's own mode.
        refused: The first refusal, which fails the capture even if the step catches the error.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS) -> None:
        super().__init__()
        self.storages = Storages()
        self.parts: list[tuple[list[Action], Action | None]] = [([], None)]
        self.parameters = parameters
        self.refused: CaptureError | None = None

    def record(self, step: Capturable) -> Any:
        """Run a step, record this thread's operators, and restore everything. Raise CaptureError inside a capture."""
        if active_recorder() is not None:
            raise CaptureError("this thread is capturing already: a capture cannot contain another one")
        random = torch.get_rng_state()
        functions = _C._get_torch_function_state()  # noqa: SLF001 - whether a block has turned modes off

        def watched() -> Any:
            _ACTIVE.recorder = self
            return plainly(run_under, _Functions(self), lambda: run_under(self, step))

        def undo() -> None:
            _ACTIVE.recorder = None
            _C._set_torch_function_state(functions)  # noqa: SLF001 - as above
            torch.set_rng_state(random)
            self.storages.restore()

        return run_and_undo(lambda: run_uncompiled(watched, _unrecorded), undo)

    def interrupt(self, run: Interruption) -> Any:
        """Call a function without recording its operators, and record the call itself, which each replay repeats."""
        answer = _unrecorded(run, None)
        places = pytree.tree_map_only(torch.Tensor, torch.empty_like, answer)
        calls, _ = self.parts.pop()
        self.parts += [(calls, functools.partial(run, pytree.tree_leaves(places))), ([], None)]
        for place, leaf in zip(tensors_in(places), tensors_in(answer), strict=True):
            _unrecorded(place.copy_, leaf)
        return places

    def refusing(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function, and remember the CaptureError that it raises."""
        try:
            return call(*args)
        except CaptureError as error:
            self.refused = self.refused or error
            raise

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and record it. Raise CaptureError for what a graph cannot hold."""
        if active_recorder() is not self:
            return operator(*args, **kwargs)
        with _C.DisableTorchFunction():
            return plainly(self.refusing, self._run, operator, args, kwargs)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_operator(operator, args, kwargs, self.storages.constants)
        if _C._current_graph_task_id() != -1:  # noqa: SLF001
            refuse_operator("a backward pass", NO_GRADIENTS)
        if is_composite(operator):
            return self.take_apart(operator, args, kwargs)
        if torch.Tag.inplace_view in operator.tags:
            return operator(*args, **kwargs)  # changes only shape and strides, which the aliases already have
        for tensor in tensors_in((args, kwargs)):
            self.storages.read(tensor, operator.name())
        changed = list(written(operator, args, kwargs))
        for tensor in changed:
            self.storages.write(tensor)
        alias_args, alias_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        result = operator(*args, **kwargs)
        made = enumerate(tensors_in(result))
        fixed = {position: tensor.detach() for position, tensor in made if self.storages.made(tensor)}
        # An operator that returns nothing is called for its effect, such as torch._assert_async.
        has_effect = not operator._schema.returns and operator.namespace != "profiler"  # noqa: SLF001
        if operator.name() == "aten::lift_fresh":
            self.storages.constants.add(fixed_key(result))
        elif fixed or changed or has_effect:
            call = call_again(operator, alias_args, alias_kwargs, result, fixed, mutates=bool(changed))
            if call is not None:
                self.parts[-1][0].append(call)
        return result


def _unrecorded(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function with recording off. The user's own modes still see its operators, as they do in a replay."""
    recorder = active_recorder()
    try:
        _ACTIVE.recorder = None
        return call(*args)
    finally:
        _ACTIVE.recorder = recorder


@final
class CapturedGraph(Graph):
    """The operators of one step, replayed into the storages of its capture. Until then these hold NaN, -1 or true."""

    def __init__(self, recorder: Recorder, outputs: Any) -> None:
        storages = recorder.storages
        self._found = storages.seal()
        storages.poison()
        self._parts = recorder.parts
        self.outputs = outputs
        self.nbytes = storages.nbytes(outputs)
        self.parts = sum(bool(calls) for calls, _ in self._parts)
        self._is_checked = False

    def check_addresses(self) -> None:
        """Raise ReplayError if a tensor that the graph uses was moved or resized since. The first replay calls this."""
        for found in self._found:
            found.check()

    def replay(self) -> None:
        """Run the recorded operators again.

        Raises ReplayError inside a capture, if a tensor has moved, and if an operator raises.
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


def _run_all(calls: list[Action]) -> None:
    try:
        with _C._ExcludeDispatchKeyGuard(_BELOW):  # noqa: SLF001
            for call in calls:
                call()
    except Exception as error:
        raise ReplayError(f"an operator of the captured step raised: {type(error).__name__}: {error}") from error


@final
class CpuCaptureBackend(HostBackend):
    """Records steps operator by operator and replays them into fixed storages, with a device graph's restrictions."""

    name = "cpu-capture"

    @property
    def capabilities(self) -> Capabilities:
        """The CPU's capabilities, with CUDA's capture modes."""
        return _CAPABILITIES

    def capture(
        self,
        step: Capturable,
        *,
        pool: object | None = None,
        error_mode: str | None = None,
        parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS,
    ) -> Graph:
        """Run the step once and record it. Its storages, and all that it wrote, are left as if it had not run.

        Only operators may read `parameters`. Raises CaptureError for what CUDA refuses, with the way out, and for what
        the step raised.
        """
        del pool
        mode_of(error_mode, _CAPABILITIES.capture_error_modes)
        recorder = Recorder(parameters)
        try:
            outputs = recorder.record(step)
        except CaptureError:
            raise
        except Exception as error:
            raise not_captured(error) from error
        if recorder.refused is not None:
            raise CaptureError(f"the step went on after a refusal: {recorder.refused}") from recorder.refused
        return plainly(CapturedGraph, recorder, outputs)

    def interrupt(self, run: Interruption) -> Any:
        """Call `run` outside the recording, now and in each replay; outside a capture, call it once."""
        recorder = active_recorder()
        return run(None) if recorder is None else recorder.interrupt(run)
