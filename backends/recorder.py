"""The recorder: runs a step once, writes down every operator that it calls, and keeps what the step overwrites."""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import attrs
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import TensorWeakRef

from ..dataflow.errors import CaptureError, ReplayError
from ..dataflow.guard import without_gradients
from .base import NO_PARAMETERS, Interruption
from .operators import (
    OperatorWatch,
    call_again,
    compiled_eagerly,
    is_composite,
    run_under,
    tensors_in,
    written,
)
from .refusals import NO_GRADIENTS, check_function, check_operator, copies_to_host, fixed_key, refuse

_C: Final[Any] = torch._C  # noqa: SLF001 - what follows has no public name
T = TypeVar("T")
Call = Callable[[], object]
_ACTIVE: Final = threading.local()
_MOVED: Final = "a graph's addresses are fixed: pass an output of the right shape, allocated before it is written"
_ALL_ONES: Final = 255  # a byte


def active_recorder() -> "Recorder | None":
    """What records this thread's operators, if it is capturing a step."""
    recorder: Recorder | None = getattr(_ACTIVE, "recorder", None)
    return recorder


def plainly(call: Callable[..., T], *args: Any) -> T:
    """Call something that makes ordinary tensors, without gradients, whatever modes the caller has on.

    It skips autograd and its version counters, without which an inference tensor can be written in any mode. torch's
    guard for inference mode switches gradients on, so they are switched off inside of it.
    """
    with _C._InferenceMode(False), _C._AutoDispatchBelowADInplaceOrView():  # noqa: FBT003, SLF001
        return without_gradients(call, *args)


@attrs.define
class Found:
    """A storage that was there before the capture, the operator that took it first, and the tensors that it was in.

    It keeps the storage alive. before: the bytes that it had, where the step writes it.
    """

    storage: torch.UntypedStorage
    address: int
    nbytes: int
    operator: str
    tensors: list[tuple[TensorWeakRef, int]] = attrs.field(factory=list)
    before: torch.UntypedStorage | None = None

    @property
    def has_moved(self) -> bool:
        """Whether the storage is not where it was at capture, or of another size."""
        return (self.storage.data_ptr(), self.storage.nbytes()) != (self.address, self.nbytes)

    def check(self) -> None:
        """Raise ReplayError if the storage, or a tensor over it that still lives, is not where it was at capture."""
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
    """The storages that a capture meets; `restore` and `poison` make it leave no trace."""

    def __init__(self) -> None:
        self._found: dict[int, Found] = {}
        self._owned: dict[int, torch.Tensor] = {}
        self._known: dict[int, torch.Tensor] = {}  # by id; alive, so that no id is used twice
        self.constants: set[int] = set()

    def read(self, tensor: torch.Tensor, operator: str) -> None:
        """Note a tensor that an operator takes."""
        key = fixed_key(tensor)
        if key not in self._owned and id(tensor) not in self._known:
            storage = tensor.untyped_storage()
            found = self._found.setdefault(key, Found(storage, storage.data_ptr(), storage.nbytes(), operator))
            self._known[id(tensor)] = tensor
            found.tensors.append((TensorWeakRef(tensor), tensor.data_ptr()))

    def write(self, tensor: torch.Tensor) -> None:
        """Keep a found storage's bytes before its first write: all of them, whatever the size of the view."""
        key = fixed_key(tensor)
        if key in self.constants:
            refuse("a write into a tensor made from a host value", "make it with torch.full or torch.zeros")
        found = self._found.get(key)
        if found is not None and found.before is None:
            found.before = found.storage.clone()  # type: ignore[no-untyped-call]

    def made(self, tensor: torch.Tensor) -> bool:
        """Note a tensor that an operator returned; whether it lies in a storage that was not known before."""
        key = fixed_key(tensor)
        self._known[id(tensor)] = tensor
        if key in self._owned or key in self._found:
            return False
        self._owned[key] = tensor.detach()
        return True

    def restore(self) -> None:
        """Give every storage that was there before the bytes that it had."""
        for found in self._found.values():
            if found.before is not None:
                if found.storage.nbytes() != found.nbytes:
                    found.storage.resize_(found.nbytes)
                found.storage.copy_(found.before)
                found.before = None

    def poison(self) -> None:
        """Fill what the capture allocated with NaN, the extreme integer or true, to be seen if read too early."""
        for tensor in self._owned.values():
            dtype, storage = tensor.dtype, tensor.untyped_storage()
            value: float = float("nan")
            if not (dtype.is_floating_point or dtype.is_complex):
                value = True if dtype == torch.bool else torch.iinfo(dtype).min or torch.iinfo(dtype).max
            try:
                torch.empty(0, dtype=dtype, device=tensor.device).set_(storage).fill_(value)
            except NotImplementedError:  # the packed floats of 4 bits, which no operator fills
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).fill_(_ALL_ONES)

    def nbytes(self, outputs: Iterable[torch.Tensor]) -> int:
        """Bytes that the capture allocated, without the storages of the outputs."""
        handed_out = {fixed_key(tensor) for tensor in outputs}
        return sum(own.untyped_storage().nbytes() for key, own in self._owned.items() if key not in handed_out)

    def seal(self) -> list[Found]:
        """All that was there before; raises CaptureError where the step itself moved one."""
        if any(found.has_moved for found in self._found.values()):
            refuse("a storage that it resizes", _MOVED)
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
                named["copy"] = True  # as on a device; on the CPU it would be the same tensor
        return func(*args, **named)


class Recorder(OperatorWatch):
    """Runs a step's operators and writes them down, with aliases of their tensors.

    parts: calls that are replayed below autograd, and what is called after them as it is. parameters: host parameters
    by argument. refused: the first refusal, which a step must not outlive even if it catches the error.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS) -> None:
        super().__init__()
        self.storages = Storages()
        self.parts: list[tuple[list[Call], Call | None]] = [([], None)]
        self.parameters = parameters
        self.refused: CaptureError | None = None

    def record(self, step: Callable[[], Any]) -> Any:
        """Run a step, record this thread's operators meanwhile, and return what the step returns.

        A KeyboardInterrupt leaves nothing behind. No call stands between the end of the step and the assignment that
        switches the modes off, so that no signal is handled there, and all that follows can be done twice. The
        guards are torch's own, in C, which no signal interrupts: guards of Python that are left early are undone late,
        when the error is forgotten, and then bring back what was on inside of others.
        Raises CaptureError inside another capture.
        """
        if active_recorder() is not None:
            raise CaptureError("this thread is capturing already: a capture cannot contain another one")
        _drop_left_over()
        before = torch.get_rng_state(), torch.is_grad_enabled()
        try:
            _ACTIVE.recorder = self
            with compiled_eagerly():
                return plainly(run_under, _Functions(self), lambda: run_under(self, step))
        finally:
            _ACTIVE.recorder = None
            try:
                self._leave(*before)
            except BaseException:  # an interrupt, which seldom comes twice
                self._leave(*before)
                raise

    def _leave(self, random: torch.Tensor, gradients: bool) -> None:  # noqa: FBT001 - as torch tells it
        """Have all be as it was before the step."""
        torch.set_grad_enabled(gradients)
        torch.set_rng_state(random)
        self.storages.restore()

    def interrupt(self, run: Interruption) -> Any:
        """Call something as if nothing was recorded, and note that a replay calls it too."""
        leaves, structure = pytree.tree_flatten(_unrecorded(self, lambda: run(None)))
        places = [torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        calls, _ = self.parts.pop()
        self.parts += [(calls, functools.partial(run, places)), ([], None)]

        def answer() -> None:
            for place, leaf in zip(tensors_in(places), tensors_in(leaves), strict=True):
                place.copy_(leaf)

        _unrecorded(self, answer)
        return pytree.tree_unflatten(places, structure)

    def refusing(self, call: Callable[..., T], *args: Any) -> T:
        """Call something, and remember it if it refuses."""
        try:
            return call(*args)
        except CaptureError as error:
            self.refused = self.refused or error
            raise

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and write it down; raises CaptureError for what a graph cannot hold."""
        if active_recorder() is not self:
            return operator(*args, **kwargs)
        with _C.DisableTorchFunction():
            return plainly(self.refusing, self._run, operator, args, kwargs)

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_operator(operator, args, kwargs, self.storages.constants)
        if _C._current_graph_task_id() != -1:  # noqa: SLF001
            refuse("a backward pass", NO_GRADIENTS)
        if is_composite(operator):
            return self.take_apart(operator, args, kwargs)
        if torch.Tag.inplace_view in operator.tags:
            return operator(*args, **kwargs)  # shape and strides alone, and those are fixed in the aliases
        for tensor in tensors_in((args, kwargs)):
            self.storages.read(tensor, operator.name())
        changed = list(written(operator, args, kwargs))
        for tensor in changed:
            self.storages.write(tensor)
        before = [_place(tensor) for tensor in changed]
        alias_args, alias_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        result = operator(*args, **kwargs)
        if before != [_place(tensor) for tensor in changed]:
            refuse(f"{operator} to resize what it writes", _MOVED)
        made = enumerate(tensors_in(result))
        fixed = {position: tensor.detach() for position, tensor in made if self.storages.made(tensor)}
        if operator.name() == "aten::lift_fresh":
            self.storages.constants.add(fixed_key(result))
        elif fixed or changed or _has_effect(operator):
            call = call_again(operator, alias_args, alias_kwargs, result, fixed, mutates=bool(changed))
            if call is not None:
                self.parts[-1][0].append(call)
        return result


def _unrecorded(recorder: Recorder, call: Callable[[], Any]) -> Any:
    """Call something with all operators let through; the user's own modes see them as they see a replay's."""
    try:
        _ACTIVE.recorder = None
        return call()
    finally:
        _ACTIVE.recorder = recorder


def _drop_left_over() -> None:
    """Take modes of earlier captures off this thread's stack, which let all calls through.

    torch takes a mode off for a moment with a generator. If a signal interrupts that, the generator puts the mode back
    when it is collected.
    """
    while _C._len_torch_function_stack():  # noqa: SLF001
        if not isinstance(_C._get_function_stack_at(_C._len_torch_function_stack() - 1), _Functions):  # noqa: SLF001
            return
        _C._pop_torch_function_stack()  # noqa: SLF001


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Where a tensor lies, to see whether an operator moves it."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape


def _has_effect(operator: Any) -> bool:
    """Whether an operator that returns nothing is called for what else it does, as torch._assert_async is."""
    return not operator._schema.returns and operator.namespace != "profiler"  # noqa: SLF001
