"""Outputs: a graph's results as views of the live rows, stamped so that a stale one can be found."""

import copy
import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
import torch
from typing_extensions import TypeVar

from ...backends.operators import storage_key
from ...dataflow.axes import BATCH, TOKENS, Axis
from ...dataflow.errors import CaptureError, ConfigError, StaleOutputError, place_of
from ...dataflow.inputs import Inputs
from ...dataflow.views import alias
from .config import axis_text

Generation = Callable[[], int]

Out = TypeVar("Out", default=Any)
"""What a step returns, and so the calls of its runner."""


def map_tensors(
    outputs: Any, function: Callable[[torch.Tensor], Any], others: Callable[[Any], Any] = lambda leaf: leaf
) -> Any:
    """Return the same structure with each tensor replaced: tuples, lists, mappings, attrs and data classes, nested.

    Containers are new, so that the caller may change them. `others` replaces every other value.
    """
    if isinstance(outputs, torch.Tensor):
        return function(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        names = [field.name for field in dataclasses.fields(outputs) if field.init]
        return dataclasses.replace(outputs, **{n: map_tensors(getattr(outputs, n), function, others) for n in names})
    if attrs.has(type(outputs)) and not isinstance(outputs, Inputs):  # a view cannot be rebuilt
        fields = [field for field in attrs.fields(type(outputs)) if field.init]
        return attrs.evolve(
            outputs, **{f.alias: map_tensors(getattr(outputs, f.name), function, others) for f in fields}
        )
    if isinstance(outputs, Mapping):
        made: Any = {} if type(outputs) is dict or not isinstance(outputs, MutableMapping) else copy.copy(outputs)
        made.update((key, map_tensors(value, function, others)) for key, value in outputs.items())
        return made
    if isinstance(outputs, list | tuple) and not isinstance(outputs, torch.Size):
        values = [map_tensors(value, function, others) for value in outputs]
        return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)
    return others(outputs)


def check_output_rows(output_rows: Any, axes: Collection[Axis] = (TOKENS, BATCH)) -> None:
    """Raise ConfigError if the rows of outputs are to follow an axis that is none of these."""
    if output_rows not in (*axes, None):
        known = ", ".join(axis.name for axis in axes)
        raise ConfigError(f"output_rows is {known} or None, got {axis_text(output_rows, axes)}")


def cut_rows(outputs: Any, rows: int, what: str, live: int | None = None, error: type[Exception] = CaptureError) -> Any:
    """Return the live rows of outputs. Raise `error` if a tensor does not have `rows` rows, one for each `what`."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise error(
                f"the step returned a tensor of shape {list(tensor.shape)}, expected {rows} rows, one for each {what}: "
                f"pass output_rows= with the axis that its rows follow, or None to get it whole"
            )
        return tensor[:live]

    whole = "; or pass output_rows=None to get it whole"
    return map_tensors(outputs, cut, lambda leaf: constant_leaf(leaf, "of which rows cannot be cut", whole, error))


def cut_live(outputs: Any, rows: int | None) -> Any:
    """Return the first rows of outputs, or all of them.

    The tensors are new, because a caller might change the shape of the graph's own.
    """
    return map_tensors(outputs, alias if rows is None else lambda tensor: tensor[:rows])


def constant_leaf(leaf: Any, why: str, otherwise: str = "", error: type[Exception] = ConfigError) -> Any:
    """Return a leaf of outputs that contains no tensor. Raise `error` for an object that might contain one."""
    if leaf is None or isinstance(leaf, bool | int | float | complex | str | torch.Size | enum.Enum):
        return leaf
    raise error(
        f"the step returned {type(leaf).__name__}, {why}: return tensors, or tuples, lists, mappings, attrs or data "
        f"classes of them{otherwise}"
    )


def own_copy(outputs: Out) -> Out:
    """Copy outputs, so that no later step overwrites them. Raise ConfigError for objects that cannot be copied."""
    return map_tensors(  # type: ignore[no-any-return] # the same structure
        outputs, torch.clone, lambda leaf: constant_leaf(leaf, "which outputs='copy' cannot copy")
    )


def chosen_parts(outputs: Any, read: Callable[[Any], Any]) -> Any:
    """Return the parts of outputs that `read` chooses. Raise ConfigError for anything else, and if `read` raises.

    `read` gets meta tensors, without values. Its choice is used for each later step with as many rows.
    """
    known = dict[int, tuple[torch.Tensor, torch.Tensor]]()
    constants: list[Any] = []

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        known[storage_key(made)] = made, tensor
        return made

    def part(tensor: torch.Tensor) -> torch.Tensor:
        _, whole = known.get(storage_key(tensor), (None, None))
        if whole is None or whole.dtype != tensor.dtype or tensor.is_conj():
            raise ConfigError("read= makes a tensor of its own: choose parts of what the step returns")
        return whole.as_strided(tensor.shape, tensor.stride(), whole.storage_offset() + tensor.storage_offset())

    def constant(leaf: Any) -> Any:
        if leaf is None or any(leaf is one for one in constants):
            return leaf
        raise ConfigError(
            f"read= returns {type(leaf).__name__}, which is no part of what the step returns: choose tensors, or "
            "tuples, lists, mappings, attrs or data classes of them; compute in the step, or of step.outputs"
        )

    try:
        chosen = read(map_tensors(outputs, stand_in, lambda leaf: constants.append(leaf) or leaf))  # type: ignore[func-returns-value]
    except Exception as error:
        raise ConfigError(
            f"read= raised {type(error).__name__}{place_of(error)}: {error}. It only chooses parts of what the step "
            "returns: it is called before their values are there"
        ) from error
    return map_tensors(chosen, part, constant)


def nbytes_of(outputs: Sequence[Any], but: Collection[int]) -> int:
    """Return the bytes of all tensors in several structures, shared memory counted once. but: Storages to leave out."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    map_tensors(outputs, note)
    return sum(size for storage, size in sizes.items() if storage not in but)


class Stamped(torch.Tensor):
    """An output of debug mode. It has the number of its replay, and raises an error if it is read after a later one."""

    _made: int
    _now: Generation

    @classmethod
    def stamp(cls, tensor: torch.Tensor, now: Generation) -> "Stamped":
        """Return the same memory, stamped with the present generation."""
        stamped = tensor.as_subclass(cls)
        stamped._made, stamped._now = now(), now  # noqa: SLF001 - its own fields
        return stamped

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check every stamped argument, and run the function on plain tensors.

        Results that share memory with a stamped argument are stamped, too.
        """
        stamps: list[Stamped] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, Stamped):
                stamps.append(tensor)
            return tensor

        def inherit(tensor: torch.Tensor) -> torch.Tensor:
            address = tensor.untyped_storage().data_ptr()
            for stamped in stamps:
                if stamped.untyped_storage().data_ptr() == address:
                    return cls.stamp(tensor, stamped._now)  # noqa: SLF001 - a stamp passes on its clock
            return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)

        map_tensors([args, kwargs or {}], note)
        for stamped in stamps:
            stamped._check()  # noqa: SLF001 - its own method
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as torch documents for __torch_function__
            return map_tensors(func(*args, **(kwargs or {})), inherit)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor, since no replay overwrites the copy."""
        self._check()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - as above
            return copy.deepcopy(self.as_subclass(torch.Tensor), memo)

    def _check(self) -> None:
        made = self._made
        now = self._now()
        if made != now:
            raise StaleOutputError(
                f"this output is of generation {made} and overwritten since (the runner is at {now}): "
                "use it before the next step, or keep a clone"
            )
