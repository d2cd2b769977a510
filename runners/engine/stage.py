"""The stage of a runner: a declaration under its settings, a backend, a step, and sizes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Final, Generic, TypeAlias

import attrs
import torch
from torch import nn

from ...backends import choose
from ...backends.base import Backend
from ...dataflow import environment
from ...dataflow.axes import Axis, Dim, Live, Sizes, Step
from ...dataflow.buffers import Bound, Buffers, allocate, overlaps, span
from ...dataflow.capabilities import AUTO, LoweringName
from ...dataflow.declaration import Declaration
from ...dataflow.errors import ConfigError, did_you_mean
from ...dataflow.fill.bucket import Bucket
from ...dataflow.inputs import Inputs, V
from ...dataflow.lowering import LOWERINGS
from ...dataflow.sources import Side, parameters_of
from ...dataflow.views import Aliases, Viewer, ViewInfo, Views
from .config import RunnerConfig, check_step, checked_relations, checked_sizes, checked_state, declaration_of
from .current import shown_class
from .outputs import Out, map_tensors

StepFunction: TypeAlias = Callable[[V], Out] | Callable[Concatenate[torch.Tensor, torch.Tensor, ...], Out]
"""A function of the view, or of slots. Type checkers take a function of one tensor for neither."""
NO_SIZES: Final[Sizes] = {}
NO_BINDINGS: Final[Mapping[str, Bound]] = {}


def joined(inputs: type[Inputs], sizes: Sizes, known: Sizes) -> Sizes:
    """Add to `sizes` those that the runner's options determine. Raise ConfigError if they differ."""
    axes = declaration_of(inputs).axes
    sizes = checked_sizes(sizes)
    for axis, size in known.items():
        if sizes.get(axis, size) != size:
            option = axis.name.lower()
            raise ConfigError(f"sizes of {axis} is {sizes[axis]}, and {option}= is {size}: give {option}= alone")
    return {**sizes, **{axis: size for axis, size in known.items() if axis in axes}}


def _as_function(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the parameters of a step. Those of a module are those of its `forward`."""
    if isinstance(step, functools.partial):
        return functools.partial(_as_function(step.func), *step.args, **step.keywords)
    if isinstance(step, nn.Module):
        return getattr(step, "_orig_mod", step).forward  # torch.compile wraps a module in another
    return step


def _call_of(step: Callable[..., Any], declaration: Declaration) -> Callable[[Any], Any]:
    """Return a step as a function of the view: the step itself, or one that passes what its parameters name.

    Raise ConfigError if one required parameter names neither a slot nor a field, and another does.
    """
    try:
        parameters = [one for one in parameters_of(_as_function(step)) if not str(one).startswith("*")]
    except TypeError:  # it does not reveal its parameters
        return step
    known = {*declaration.slots, *declaration.groups, *declaration.disabled, *declaration.fields}
    free = known.difference(getattr(step, "keywords", ()))  # functools.partial has bound the others
    names = [one.name for one in parameters if one.name in free and one.kind is not one.POSITIONAL_ONLY]
    required = [one.name for one in parameters if one.default is one.empty]
    strange = [name for name in required if name not in names]
    if not names or strange == required != []:
        return step
    if strange:
        raise ConfigError(
            f"the step asks for {strange[0]!r}, which is neither a slot nor a field of {declaration.name}: a step "
            f"takes the view alone, or names what it takes of it; bind other arguments by functools.partial"
            f"{did_you_mean(strange[0], known)}"
        )
    return lambda view: step(**{name: getattr(view, name) for name in names})


@attrs.frozen(eq=False, repr=False)
class Stage(Generic[V]):
    """A declaration class that is ready to run: its enabled slots, its backend, and the step that runs on its views.

    Attributes:
        inputs: The declared class.
        views: The class of its views.
        declaration: Its slots and fields, as the settings enable them.
        backend: The device.
        step: The function that runs on the views, as it was given.
        call: The step as a function of the view.
        sizes: Sizes of the fixed axes, and capacities of further varying ones.
        relations: Axes that follow from others.
        restored: Slots that are restored after a step.
        state: Tensors besides the slots that are restored after warm-ups and checks. None to find them.
    """

    inputs: type[V]
    views: type[V]
    declaration: Declaration
    backend: Backend
    step: Callable[..., Any]
    call: Callable[[V], Any]
    sizes: Sizes
    relations: Mapping[Axis, Dim]
    restored: tuple[str, ...]
    state: tuple[torch.Tensor, ...] | None

    @classmethod
    def of(
        cls,
        inputs: type[V],
        step: Callable[..., Any],
        backend: str | Backend | None = None,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        relations: Mapping[Axis, Dim] | None = None,
        *,
        config: RunnerConfig | None = None,
        ranks: Any = None,
        state: Any = None,
        **_: Any,
    ) -> "Stage[V]":
        """Check a runner's arguments.

        Raise DeclarationError, ConfigError or BackendUnavailableError if one is wrong.
        """
        environment.warn_of_unknown()
        whole = declaration_of(inputs)
        sizes = checked_sizes(sizes)
        follow = checked_relations(relations)
        check_step("step", step)
        declaration = whole.under(settings, ranks).related(follow)
        unknown = sorted(axis.name for axis in set(sizes).difference(declaration.axes))
        if unknown:
            near = did_you_mean(unknown[0], [axis.name for axis in declaration.axes])
            raise ConfigError(f"sizes names {unknown[0]!r}, an axis that no slot of {declaration.name} has{near}")
        unsized = [axis.name for axis in declaration.axes if axis.fixed and axis not in sizes]
        if unsized:
            raise ConfigError(f"{declaration.name} needs sizes= for its fixed axes {', '.join(unsized)}")
        if backend is None:
            backend = AUTO if config is None else config.backend
        restored = tuple(name for name, slot in declaration.slots.items() if slot.restored)
        state = checked_state(state)
        call = _call_of(step, declaration)
        views = shown_class(inputs)
        return cls(inputs, views, declaration, choose(backend), step, call, sizes, follow, restored, state)

    def allocate(self, capacity: Sizes, *given: Any, **options: Any) -> Buffers:
        """Allocate buffers of a capacity on the backend. Further arguments are those of `buffers.allocate`."""
        backend = self.backend
        return allocate(self.declaration, capacity, backend.capabilities, backend.empty, *given, **options)

    def lowering_without_kernel(self) -> LoweringName:
        """Return the first lowering of the backend that has no fused kernel, for fills of live rows alone."""
        able = self.backend.capabilities.lowerings
        return next(name for name, one in LOWERINGS.items() if name in able and not one.has_kernel)

    def padded(self, counts: Sizes, options: str) -> Sizes:
        """Return the padded sizes of a bucket, those of axes that follow from others included.

        Raise ConfigError if `sizes=` has an axis of `counts`, which `options` decide, or one that follows from these.
        """
        counts = {**counts, **{axis: size.at({**self.sizes, **counts}) for axis, size in self.relations.items()}}
        if not self.sizes.keys().isdisjoint(counts):
            axes = " and ".join(sorted(axis.name for axis in counts))
            raise ConfigError(f"sizes of {axes} follow from {options}: give those")
        padded = {**counts, **self.sizes}
        return padded | self.complete(padded)

    def complete(self, sizes: Sizes) -> dict[Axis, int]:
        """Return the size of every axis. Raise ConfigError if one is missing."""
        name = self.declaration.name
        axes = self.declaration.axes
        missing = ", ".join(axis.name for axis in axes if axis not in sizes)
        if missing:
            raise ConfigError(f"{name} needs sizes= for {missing}: the most rows that a batch has")
        return {axis: sizes[axis] for axis in axes}

    def absent(self, batch: Any, side: Side) -> frozenset[str]:
        """Return the optional slots that a batch lacks."""
        return frozenset([name for name, source in self.declaration.optional if source.read(batch, side) is None])

    def absent_in(self, view: V) -> frozenset[str]:
        """Return the optional slots that a view lacks."""
        return frozenset(name for name, _ in self.declaration.optional if view.__dict__[name] is None)

    def viewer(
        self,
        bucket: Bucket,
        shown: Callable[[Live], Views] | None = None,
        step_of: Callable[[Live], Step] | None = None,
        **info: Any,
    ) -> Viewer[V]:
        """Return the maker of views of a bucket's batches.

        Args:
            bucket: The bucket.
            shown: Returns the slots in a view of live sizes. By default those of the bucket.
            step_of: Returns the `Step` of a view. By default that of the bucket.
            info: Further values of `ViewInfo`.
        """
        sizes_of = step_of or bucket.step

        def info_of(live: Live) -> ViewInfo:
            given = self.relations, self.declaration, bucket.result_tails
            return ViewInfo(sizes_of(live), *given, exact=bucket.exact, **info)

        shown = shown or (lambda live: bucket.at(live).shown())
        return Viewer(self.views, shown, self.declaration.fields, info_of, bucket.frozen)

    def viewer_of_capture(self, bucket: Bucket) -> Viewer[V]:
        """Return the maker of views for a capture.

        Their tensors are new aliases, because a step may reshape them. Such a view is marked as captured: narrowing it
        drops host-computed slots and refuses to cut host parameters.
        """
        aliases = Aliases(bucket.views)
        return self.viewer(bucket, lambda _: aliases(), **self.capture_info)

    def run(self, view: V, step: Callable[[V], Any] | None = None) -> Any:
        """Run the step, or another one, on a view.

        Slots declared as `restored` are restored afterwards, and outputs that contain their tensors are copies. If the
        step raises, they are not restored: after a step on a padded view, the caller must mark all tails as dirty.
        """
        step = self.call if step is None else step
        slots = view.__dict__
        kept = [(slots[name], slots[name].clone()) for name in self.restored if slots[name] is not None]
        outputs = step(view)
        if not kept:
            return outputs
        spans = [span(slot) for slot, _ in kept if slot.numel()]

        def own(tensor: torch.Tensor) -> torch.Tensor:
            inside = tensor.layout == torch.strided and tensor.numel() and overlaps(tensor, spans)
            return tensor.clone() if inside else tensor

        outputs = map_tensors(outputs, own)
        for slot, before in kept:
            slot.copy_(before)
        return outputs

    @property
    def capture_info(self) -> dict[str, Any]:
        """The `ViewInfo` of a capture. Operators take host parameters whole, so no step may cut them."""
        handed = self.backend.capabilities.host_parameters
        return {"whole": frozenset(self.declaration.parameters.values() if handed else ()), "captured": True}
