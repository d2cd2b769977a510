"""The draft runners: one drafts a tree in one graph, others process the accepted tokens to begin the next tree."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, Unpack, final

import attrs
import torch

from ..dataflow.axes import BATCH, Dim
from ..dataflow.computation import initial_value
from ..dataflow.declaration import Declaration
from ..dataflow.errors import CaptureError, ConfigError
from ..dataflow.inputs import V
from .decode import DraftArguments, ExtendArguments, RequestRunner
from .engine.config import check_step, checked, checked_names, declaration_of
from .engine.outputs import Out
from .engine.stage import StepFunction
from .standard.counts import STEPS, TOPK
from .tree import Drafts, Frontier, top_tokens

CHAINED: Final = ("input_ids", "hidden_states")
ChainedStep: TypeAlias = Callable[[V, V | None], Out]
POSITIONS: Final = ("positions", "mrope_positions")
_BEGINNING: Final = ("topk_p", "topk_index")
_IDS: Final = "input_ids"


@attrs.frozen(eq=False)
class DraftStep:
    """One of a draft's steps, as the model sees it. The topk rows of a request are adjacent.

    Attributes:
        index: 0 for the first step.
        input_ids: [TOKENS] int64, in the slot of that name, if there is one.
        hidden_states: [TOKENS, ...], what the model returned for the node that each token follows, or None if the
            declaration has none.
        branches: [BATCH, topk, index] int64. For each row, which of its request's rows it descends from in every
            earlier step. Attention of the row must use the keys of these rows and no others.
    """

    index: int
    input_ids: torch.Tensor
    hidden_states: torch.Tensor | None
    branches: torch.Tensor


Forward: TypeAlias = Callable[[V, DraftStep], tuple[torch.Tensor, torch.Tensor | None]]


@final
class DraftRunner(RequestRunner[V, Drafts]):
    """Drafts a tree of tokens for each request: `steps` deep, with topk nodes a step, by one replay.

    TOKENS is BATCH * topk. TOPK and STEPS have their sizes. A call returns `Drafts` with one row a request. The runner
    adds one to slots `positions` and `mrope_positions` after each call of `forward`, and restores them after the last.
    Declare them with `restored=True`, like any slot that `forward` itself changes.

    Args:
        inputs: The declaration, with `topk_p` and `topk_index` [BATCH, TOPK], the children of the known tokens, and
            `hidden_states` [BATCH, ...] if the model has them.
        forward: Called steps - 1 times with the view and a `DraftStep`; returns logits [TOKENS, words] and the next
            hidden states [TOKENS, ...], or None.
        topk: Nodes that each step continues from.
        steps: The depth of the tree.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`,
            `backend`, `buckets`, `max_batch`, `max_waste`, `warmups`, `progress`, `debug`, `sharing`, `graphs`,
            `lowering`, `compile_computed`, `lazy`, `error_mode` and `outputs`, as for `DecodeRunner`.
    """

    def __init__(
        self, inputs: type[V], forward: Forward[V], *, topk: int, steps: int, **options: Unpack[DraftArguments]
    ) -> None:
        for name, count in (("topk", topk), ("steps", steps)):
            checked(name, "a whole number, at least 1", count, int, 1)
        check_step("forward", forward, "the view and a DraftStep")
        _check_slots(declaration_of(inputs))
        self.topk = topk
        self.steps = steps
        step = functools.partial(draft_tree, forward, topk, steps)
        super().__init__(inputs, step, options, output_rows=BATCH, known={TOPK: topk, STEPS: steps}, width=topk)


def draft_tree(forward: Forward[V], topk: int, steps: int, view: V, /) -> Drafts:
    """Draft a tree of tokens, `steps` deep, as a `DraftRunner` does. Call it in a captured step of your own.

    It reads nothing on the host. In each step it writes `input_ids` of the view, if there are any, and after it adds
    one to `positions` and `mrope_positions`, in place.

    Args:
        forward: As for `DraftRunner`.
        topk: Nodes that each step continues from.
        steps: The depth of the tree.
        view: A view or a batch of a declaration that fits a `DraftRunner`; of its slots the draft reads these three,
            `topk_p`, `topk_index` and `hidden_states`, and `forward` what it likes.

    Raises:
        ConfigError: `topk_p` or `topk_index` of the view is not a tensor of shape [requests, topk].
        CaptureError: `forward` returns something else.
    """
    slots = getattr(view, "__dict__", {})
    for name in _BEGINNING:
        first = slots.get(name)
        if not isinstance(first, torch.Tensor) or first.shape[1:] != (topk,):
            got = f"shape {list(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
            raise ConfigError(f"a draft begins with {name!r}, a tensor of shape [requests, {topk}], got {got}")
    frontier = Frontier.begin(slots["topk_p"], slots["topk_index"])
    shape = (-1, topk, topk)
    staged = slots.get(_IDS)
    hidden = slots.get("hidden_states")
    if hidden is not None:
        hidden = hidden[:, None].expand(-1, topk, *hidden.shape[1:]).flatten(0, 1)
    for index in range(steps - 1):
        ids = frontier.tokens.flatten()
        step = DraftStep(index, ids if staged is None else staged.copy_(ids), hidden, frontier.branches)
        logits, hidden = _checked(forward(view, step), step, topk)
        for name in POSITIONS:
            if slots.get(name) is not None:
                slots[name].add_(1)
        shares, tokens = top_tokens(logits, topk)
        frontier = frontier.grow(shares.view(shape), tokens.view(shape))
        if hidden is not None:  # keep the rows of the nodes that the next step continues from
            rows = frontier.branches[:, :, -1]
            first = torch.arange(len(rows), device=hidden.device)[:, None] * topk
            hidden = hidden.index_select(0, (rows + first).flatten())
    return frontier.drafts()


def _checked(returned: Any, step: DraftStep, topk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what forward returned, or raise CaptureError if it has the wrong shape."""
    tokens = len(step.input_ids)
    match returned:
        case (torch.Tensor(shape=(rows, words)) as logits, None | torch.Tensor(shape=(_, *_)) as hidden) if (
            rows == tokens and words >= topk and (hidden is None or len(hidden) == tokens)
        ):
            return logits, hidden
    parts = returned if isinstance(returned, tuple) else [returned]
    got = ", ".join(str(list(one.shape)) if isinstance(one, torch.Tensor) else type(one).__name__ for one in parts)
    raise CaptureError(
        f"forward, in draft step {step.index}, must return (logits, hidden states or None): expected logits of "
        f"[{tokens}, words] with at least {topk} words, and hidden states with {tokens} rows, one a token, got {got}"
    )


def _check_slots(declaration: Declaration) -> None:
    """Raise ConfigError if a slot that the draft reads or writes is of another kind."""
    slots = declaration.slots
    for name in _BEGINNING:
        slot = slots.get(name)
        if slot is None or slot.optional or slot.shape != (Dim.of(BATCH), Dim.of(TOPK)):
            raise ConfigError(
                f"{declaration.name} needs a slot {name!r} of shape [BATCH, TOPK], which every batch has: the draft's "
                "tree begins with it"
            )
    if _IDS in slots and not slots[_IDS].rewritten:
        raise ConfigError(f"slot {_IDS!r}: the draft writes it in each step: declare it with staged(), or leave it out")
    for name in POSITIONS:
        if name in slots and not slots[name].restored:
            raise ConfigError(
                f"slot {name!r} of {declaration.name}: each draft step advances it: give it restored=True"
            )


@final
class DraftExtendRunner(RequestRunner[V, Out]):
    """Runs a step over `width` tokens a request, and returns one row a request.

    Every request has `width` tokens, those that were accepted first. Declare what depends on it, such as
    `select_index`, over WIDTH, so that a batch of another width is refused. All else is as in `DecodeRunner`.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name; returns tensors with one row
            a request.
        width: Tokens that each request has.
        output_rows: The axis that the rows of outputs follow: BATCH, the default, or TOKENS, or None to get outputs
            whole.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`,
            `backend`, `buckets`, `max_batch`, `max_waste`, `warmups`, `progress`, `debug`, `sharing`, `graphs`,
            `lowering`, `compile_computed`, `lazy`, `error_mode` and `outputs`, as for `DecodeRunner`.
    """

    def __init__(
        self, inputs: type[V], step: StepFunction[V, Out], *, width: int, **options: Unpack[ExtendArguments]
    ) -> None:
        super().__init__(inputs, step, {**options, "width": width}, output_rows=BATCH)


@final
class MultiLayerDraftExtendRunner(RequestRunner[V, tuple[Out, ...]]):
    """Runs several steps one after another in one graph. Each may write what the next one reads.

    A call returns a tuple, one entry a step.

    Args:
        inputs: The declaration class.
        steps: Each is called with its view and the next step's, or None for the last, and returns one row a request.
        width: Tokens that each request has.
        chained: Slots of which every step has a separate copy. The batch fills the first step's. The rows of the others
            have the slot's initial or tail value until the step before writes them. All steps share all other slots.
        output_rows: As for `DraftExtendRunner`: BATCH by default.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`,
            `backend`, `buckets`, `max_batch`, `max_waste`, `warmups`, `progress`, `debug`, `sharing`, `graphs`,
            `lowering`, `compile_computed`, `lazy`, `error_mode` and `outputs`, as for `DecodeRunner`.
    """

    def __init__(
        self,
        inputs: type[V],
        steps: Sequence[ChainedStep[V, Out]],
        *,
        width: int,
        chained: Sequence[str] = CHAINED,
        **options: Unpack[ExtendArguments],
    ) -> None:
        declaration = declaration_of(inputs)
        chained = checked_names("chained", chained)
        if not isinstance(steps, Sequence) or not steps or not all(map(callable, steps)):
            raise ConfigError(
                f"steps= is a list of functions of a view and the next one's, at least one; got {steps!r}"
            )
        declaration.check_names("chained", chained, "copied")
        for name in chained:
            if declaration.slots[name].argument is not None:
                raise ConfigError(
                    f"chained names {name!r}, which {declaration.name} does not copy from the batch to the device"
                )
        for name, slot in declaration.slots.items():
            for stale in (need for need in chained if need in slot.needs):
                raise ConfigError(
                    f"slot {name!r} is computed once, from {stale!r}, of which each step has a copy: compute it in "
                    f"the steps"
                )
        step = functools.partial(self._in_chain, tuple(steps), chained)
        super().__init__(inputs, step, {**options, "width": width}, output_rows=BATCH)

    def _in_chain(self, steps: Sequence[ChainedStep[V, Out]], chained: Sequence[str], view: V, /) -> tuple[Out, ...]:
        """Run every step on its own view, with initial values in the later ones' slots. This is captured."""
        views = [view, *(copy.copy(view) for _ in steps[1:])]
        stage = self.stage
        for name in chained:
            if (held := vars(view)[name]) is not None:
                slot = stage.declaration.slots[name]
                first = initial_value(name, slot, self._capacity, stage.backend.capabilities)
                for own in views[1:]:
                    vars(own)[name] = torch.full_like(held, first)
        return tuple(step(own, after) for step, own, after in zip(steps, views, [*views[1:], None], strict=True))
