"""The draft-extend runners: after a verify, the draft model takes in what was accepted, and begins the next tree."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, Unpack, final

import attrs
import torch

from ..backends.base import Backend
from ..backends.registry import choose
from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from ..dataflow.binding import Bound
from ..dataflow.capabilities import Capabilities
from ..dataflow.computation import initial_value
from ..dataflow.declaration import Declaration
from ..dataflow.errors import ConfigError
from ..dataflow.slots import Slot
from ..dataflow.tails import Number, Once, Pad, resolve_value
from ..dataflow.views import make_view
from .arguments import checked_by_slot, checked_names, declaration_of
from .config import ExtendOptions, RunnerConfig, config_of
from .decode import RequestRunner
from .pool import Chain, Phase
from .ranks.group import Ranks
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, V, with_width

CHAINED: Final = ("input_ids", "hidden_states")
ChainedStep: TypeAlias = Callable[[V, V | None], Any]


@final
class MultiLayerDraftExtendRunner(RequestRunner[V]):
    """Runs several steps one behind another in one graph; each may write what the next one reads.

    steps: each called with its view and the next step's, None for the last; returns one row a request. width: required,
    as in `DraftExtendRunner`. chained: slots of which every step has its own: step i reads part i of the parent
    allocation `parents[name]`, [steps, capacity...]. Part 0 is filled from the batch; all rows of the others hold the
    slot's tail value when a replay begins, until the step before writes them. All other slots are the same for every
    step. A call returns a tuple, one entry a step. All else is as in `DecodeRunner`.
    """

    def __init__(
        self,
        inputs: type[V],
        steps: Sequence[ChainedStep[V]],
        *,
        chained: Sequence[str] = CHAINED,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Mapping[str, Bound] = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = BATCH,
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[ExtendOptions],
    ) -> None:
        config = check_width(type(self), backend, options)
        whole, chained = declaration_of(inputs), checked_names("chained", chained)
        _check(whole, steps, chained, checked_by_slot("bind", bind, "tensors"))
        declaration = whole.under(settings, ranks=ranks)
        adapter, largest, width = choose(backend), config.ladder().largest, config.width
        capacity = {BATCH: largest, TOKENS: largest * width, **with_width(inputs, sizes, width)}
        chain = {name: declaration.slots[name] for name in chained if name in declaration.slots}
        tails = _tails(chain, adapter.capabilities, capacity)
        super().__init__(
            inputs,
            _Chain(tuple(steps), tails, lambda: self.parents),
            config,
            sizes=sizes,
            settings=settings,
            bind={**bind, **dict.fromkeys(chain, Chain(len(steps)))},
            absent=absent,
            lend=lend,
            carry=carry,
            output_rows=output_rows,
            phase=phase,
            state=state,
            ranks=ranks,
            backend=adapter,
        )

    @property
    def parents(self) -> Mapping[str, torch.Tensor]:
        """By chained slot, memory for every step's, [steps, capacity...]."""
        _ = self.graphs  # with which they are made
        return self.seat.parents


@attrs.frozen(eq=False)
class _Chain(Generic[V]):
    """What is captured: every step on its own view.

    tails: what the rows of later parts hold until a step writes them, by slot. parents: tells their memory.
    """

    steps: Sequence[ChainedStep[V]]
    tails: Mapping[str, Number]
    parents: Callable[[], Mapping[str, torch.Tensor]]

    def __call__(self, view: V) -> tuple[Any, ...]:
        views = [view, *(_later(view, part) for part in self._parts(view))]
        following = [*views[1:], None]
        return tuple(step(own, after) for step, own, after in zip(self.steps, views, following, strict=True))

    def _parts(self, view: V) -> list[dict[str, torch.Tensor]]:
        """The chained slots of each later step, as large as the first one's, reset."""
        slots = view.__dict__
        found: list[dict[str, torch.Tensor]] = [{} for _ in self.steps[1:]]
        for name, parent in self.parents().items():
            if slots[name] is None or not found:
                continue
            later = _cut(parent[1:], slots[name].shape).fill_(self.tails[name])
            for part, own in zip(found, later, strict=True):
                part[name] = own
        return found


def _later(view: V, part: Mapping[str, torch.Tensor]) -> V:
    """A later step's view: the first one's, but for the chained slots."""
    values: dict[str, Any] = {**view.__dict__, **part}
    return make_view(type(view), values, values["_slotgraph_view"])


def _cut(parts: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The first rows of all parts, along each dim."""
    for dim, size in enumerate(shape, start=1):
        parts = parts.narrow(dim, 0, size)
    return parts


def _tails(chain: Mapping[str, Slot], capabilities: Capabilities, capacity: Sizes) -> dict[str, Number]:
    """What padded rows of chained slots hold. ConfigError where one has an axis of no size."""
    for name, slot in chain.items():
        missing = sorted(axis.name for axis in slot.axes if axis not in capacity)
        if missing:
            message = f"slot {name!r} needs sizes= for {', '.join(missing)}"
            raise ConfigError(message)
    return {name: _tail(name, slot, capabilities, capacity) for name, slot in chain.items()}


def _tail(name: str, slot: Slot, capabilities: Capabilities, capacity: Sizes) -> Number:
    """What padded rows of a slot hold, and what they hold at first where they are kept."""
    rule = slot.rule()
    value = rule.value if isinstance(rule, Pad | Once) else initial_value(name, slot, capacity, capabilities)
    return resolve_value(value, capabilities, capacity)


def _check(
    declaration: Declaration,
    steps: Sequence[Callable[..., Any]],
    chained: Sequence[str],
    bind: Mapping[str, Bound],
) -> None:
    """ConfigError where there is nothing to run, or a slot cannot be chained."""
    if not isinstance(steps, Sequence) or not steps or not all(map(callable, steps)):
        message = f"steps= is a list of functions of a view and the next one's, at least one; got {steps!r}"
        raise ConfigError(message)
    for name in chained:
        slot = declaration.slots.get(name)
        if slot is None or slot.reads(name) is None:
            message = f"chained names {name!r}, which is no slot that {declaration.name} copies from the batch"
            raise ConfigError(message)
        if name in bind:
            message = f"slot {name!r} is chained, so that it is part 0 of parents[{name!r}]: it cannot be bound too"
            raise ConfigError(message)
        if slot.is_parameter:
            message = f"slot {name!r} is a host parameter, one for the graph of all steps: it cannot be chained"
            raise ConfigError(message)
    for name, slot in declaration.slots.items():
        compute = slot.computes()
        stale = sorted(set(chained) & set(compute.needs)) if compute is not None else []
        if stale:
            message = (
                f"slot {name!r} is computed once, from {stale[0]!r}, of which each step has its own: compute it in the "
                "steps"
            )
            raise ConfigError(message)


@final
class DraftExtendRunner(RequestRunner[V]):
    """Runs a step over `width` tokens a request, of which it returns one row a request.

    width: required; every request brings that many tokens, those that were accepted first. What depends on it, such as
    `select_index`, is declared over WIDTH, so that a batch of another width is refused. Outputs follow BATCH, if
    `output_rows` does not say otherwise. All else is as in `DecodeRunner`.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Mapping[str, Bound] = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = BATCH,
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[ExtendOptions],
    ) -> None:
        super().__init__(
            inputs,
            step,
            check_width(type(self), backend, options),
            sizes=sizes,
            settings=settings,
            bind=bind,
            absent=absent,
            lend=lend,
            carry=carry,
            output_rows=output_rows,
            phase=phase,
            state=state,
            ranks=ranks,
            backend=backend,
        )


def check_width(kind: type, backend: str | Backend, options: ExtendOptions) -> RunnerConfig:
    """The configuration of a runner that needs a width. ConfigError where there is none."""
    if "width" not in options:
        message = f"{kind.__name__} needs width=: how many tokens each request has in a step"
        raise ConfigError(message)
    return config_of(kind, backend, options)
