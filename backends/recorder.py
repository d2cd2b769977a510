"""The mode under which a step runs once, and in which every operator that it calls is written down."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..dataflow.errors import CaptureError
from ..dataflow.gradients import without_gradients
from .base import NO_PARAMETERS, Interruption
from .program import Call, is_collective, replay_of
from .refusals import NO_GRADIENTS, RefusingMode, check, refuse
from .storages import MOVED, Storages, tensors_in
from .torch_modes import run_under

_C: Final[Any] = torch._C  # noqa: SLF001 - what follows has no public name
T = TypeVar("T")
_PLAIN: Final[Any] = _C._disabled_torch_dispatch_impl  # noqa: SLF001 - a tensor's that no subclass takes apart

# Composites that torch takes apart, which read the host on the CPU alone, to check values.
_WHOLE: Final = frozenset({"aten::one_hot"})

# Arguments that an operator writes although its schema does not say so.
_NORMS: Final = ("native_batch_norm", "batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "instance_norm")
_UNDECLARED_WRITES: Final[Mapping[str, tuple[str, ...]]] = {
    f"aten::{name}": ("running_mean", "running_var") for name in _NORMS
}

_PLAIN_ALONE: Final = "this backend records plain operators alone, and no functions"
_HIGHER_ORDER: Final[Mapping[str, str]] = {
    "cond": "the host decides which branch runs, once, at capture: run both, and choose by torch.where",
    "while_loop": (
        "the host decides how often it runs, once, at capture: loop a fixed number of times, and keep rows that are "
        "done by torch.where"
    ),
    "flex_attention": (
        f"{_PLAIN_ALONE}: use torch.nn.functional.scaled_dot_product_attention with a mask here, or capture the step "
        "on the device itself"
    ),
}

_ACTIVE: Final = threading.local()


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


def _drop_left_over() -> None:
    """Take modes of earlier captures off this thread's stack, which let all calls through.

    torch takes a mode off for a moment with a generator. If a signal interrupts that, the generator puts the mode back
    when it is collected.
    """
    while _C._len_torch_function_stack():  # noqa: SLF001
        if not isinstance(_C._get_function_stack_at(_C._len_torch_function_stack() - 1), RefusingMode):  # noqa: SLF001
            return
        _C._pop_torch_function_stack()  # noqa: SLF001


def _compiled_eagerly() -> AbstractContextManager[object]:
    """Run compiled functions as they were written, where the compiler is loaded at all: it cannot trace a recorder."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    eagerly: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eagerly


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook
    """Runs a step's operators and writes them down, with aliases of their tensors.

    parts: calls that are replayed below autograd, and what is called after them as it is.
    """

    supports_higher_order_operators = True  # torch would refuse them without a way out

    def __init__(self, parameters: Mapping[str, torch.Tensor] = NO_PARAMETERS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = Storages()
        self.parts: list[tuple[list[Call], Call | None]] = [([], None)]
        self._refusing = RefusingMode(parameters)
        self._refused: CaptureError | None = None

    @property
    def refused(self) -> CaptureError | None:
        """The first refusal, which a step must not outlive even if it catches the error."""
        return self._refused or self._refusing.refused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, or the first operator would import the compiler, which takes a second."""
        return False

    def record(self, step: Callable[[], Any]) -> Any:
        """Run a step, record this thread's operators meanwhile, and return what the step returns.

        A KeyboardInterrupt leaves nothing behind. No call stands between the end of the step and the two assignments
        that switch the modes off, so that no signal is handled there, and all that follows can be done twice. The
        guards are torch's own, in C, which no signal interrupts: guards of Python that are left early are undone late,
        when the error is forgotten, and then bring back what was on inside of others.
        Raises CaptureError inside another capture.
        """
        if active_recorder() is not None:
            message = "this thread is capturing already: a capture cannot contain another one"
            raise CaptureError(message)
        _drop_left_over()
        before = torch.get_rng_state(), torch.is_grad_enabled()
        try:
            _ACTIVE.recorder = self
            self._refusing.paused = False
            with _compiled_eagerly():
                return plainly(run_under, self._refusing, lambda: run_under(self, step))
        finally:
            _ACTIVE.recorder = None
            self._refusing.paused = True
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
        leaves, structure = pytree.tree_flatten(self._unrecorded(lambda: run(None)))
        places = [torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        calls, _ = self.parts.pop()
        self.parts += [(calls, functools.partial(run, places)), ([], None)]

        def answer() -> None:
            for place, leaf in zip(places, leaves, strict=True):
                if isinstance(leaf, torch.Tensor):
                    place.copy_(leaf)

        self._unrecorded(answer)
        return pytree.tree_unflatten(places, structure)

    def _unrecorded(self, call: Callable[[], Any]) -> Any:
        """Call something with all operators let through; the user's own modes see them as they see a replay's."""
        try:
            _ACTIVE.recorder = None
            self._refusing.paused = True
            return call()
        finally:
            _ACTIVE.recorder = self
            self._refusing.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator and write it down; raises CaptureError for what a graph cannot hold."""
        if active_recorder() is not self:
            return func(*args, **(kwargs or {}))
        if any(getattr(kind, "__torch_dispatch__", _PLAIN) is not _PLAIN for kind in types):
            return NotImplemented  # the subclass takes itself apart, and its parts come here
        try:
            with _C.DisableTorchFunction():
                return plainly(self._run, func, args, dict(kwargs or {}))
        except CaptureError as error:
            self._refused = self._refused or error
            raise

    def _run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_order(operator)
        check(operator, args, kwargs, self.storages.constants)
        if _C._current_graph_task_id() != -1:  # noqa: SLF001
            refuse("a backward pass", NO_GRADIENTS)
        if is_composite(operator):
            return run_under(self, lambda: decompose(operator, args, kwargs))
        if torch.Tag.inplace_view in operator.tags:
            return operator(*args, **kwargs)  # shape and strides alone, and those are fixed in the aliases
        return self._record(operator, args, kwargs)

    def _record(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_in((args, kwargs)):
            self.storages.read(tensor, operator.name())
        changed = list(written(operator, args, kwargs))
        for tensor in changed:
            self.storages.write(tensor)
        before = [_place(tensor) for tensor in changed]
        alias_args, alias_kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        result = operator(*args, **kwargs)
        if before != [_place(tensor) for tensor in changed]:
            refuse(f"{operator} to resize what it writes", MOVED)
        results = list(tensors_in(result))
        fixed = [(place, tensor.detach()) for place, tensor in enumerate(results) if self.storages.made(tensor)]
        if operator.name() == "aten::lift_fresh":
            self.storages.constant(result)
        elif fixed or changed or _has_effect(operator):
            call = replay_of(operator, alias_args, alias_kwargs, results, fixed, mutates=bool(changed))
            if call is not None:
                self.parts[-1][0].append(call)
        return result


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Where a tensor lies, to see whether an operator moves it."""
    return tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape


def _check_order(operator: Any) -> None:
    """Raise CaptureError for a higher-order operator, which takes functions: the recorder knows no way into these."""
    if not isinstance(operator, torch._ops.OpOverload):  # noqa: SLF001 - no public name
        name = str(getattr(operator, "__name__", operator))
        otherwise = f"{_PLAIN_ALONE}: write the loop in Python, or capture the step on the device itself"
        refuse(f"the higher-order operator {name}", _HIGHER_ORDER.get(name, otherwise))


def is_composite(operator: Any) -> bool:
    """Whether torch takes an operator apart into others. A mode sees such an operator whole in inference mode alone."""
    name = operator.name()
    if name in _WHOLE or operator.namespace != "aten":
        return False
    has_kernel = _C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    return has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, "CPU")


def decompose(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a composite operator as the operators that it is made of.

    Not by its own decompose(): once torch's python decompositions are loaded it takes those, with other rounding.
    """
    return operator._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)  # noqa: SLF001


def _has_effect(operator: Any) -> bool:
    """Whether an operator that returns nothing is called for what else it does, as torch._assert_async is."""
    return not operator._schema.returns and operator.namespace != "profiler"  # noqa: SLF001


def written(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes, as its schema says, and where it should say."""
    if is_collective(operator):
        yield from tensors_in((args, kwargs))
        return
    schema = operator._schema  # noqa: SLF001 - OpOverload has no other way to its schema
    undeclared = _UNDECLARED_WRITES.get(schema.name, ())
    for position, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in undeclared:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)
