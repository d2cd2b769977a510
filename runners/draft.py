"""The draft runner: a tree of tokens drafted in several steps of a small model, all of them inside one graph."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, Unpack, final

import attrs
import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, Dim, Sizes
from ..dataflow.binding import Bound
from ..dataflow.declaration import Declaration
from ..dataflow.errors import CaptureError, ConfigError
from .arguments import check_step, checked_names, checked_sizes, declaration_of
from .config import CaptureOptions, config_of
from .decode import RequestRunner
from .pool import Phase
from .ranks.group import Ranks
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, V
from .standard.axes import STEPS, TOPK
from .tree import Drafts, Frontier, top_tokens

POSITIONS: Final = ("positions", "mrope_positions")
_FIRST: Final = ("topk_p", "topk_index")
_IDS: Final = "input_ids"


@attrs.frozen(eq=False)
class DraftStep:
    """One of a draft's steps, as the model sees it; a request's topk rows lie behind one another.

    index: 0 for the first. input_ids [TOKENS] int64: in the slot of that name, if there is one. hidden_states
    [TOKENS, ...]: what the model gave for the node that each token follows; None where the declaration has none.
    branches [BATCH, topk, index] int64: for each row, which of its request's rows in every earlier step it descends
    from, whose keys it must see and no others'.
    """

    index: int
    input_ids: torch.Tensor
    hidden_states: torch.Tensor | None
    branches: torch.Tensor


Forward: TypeAlias = Callable[[V, DraftStep], tuple[torch.Tensor, torch.Tensor | None]]


@final
class DraftRunner(RequestRunner[V]):
    """Drafts a tree of tokens for each request: `steps` deep, with topk nodes a step, by one replay.

    inputs: the declaration, with `topk_p` and `topk_index` [BATCH, TOPK], the children of the tokens that are known,
    and `hidden_states` [BATCH, ...] where the model has them. TOKENS is BATCH * topk; TOPK and STEPS have their sizes.
    forward: called steps - 1 times with the view and a `DraftStep`; returns logits [TOKENS, words] and the next
    hidden states [TOKENS, ...], or None. advances: slots that are one more after each call, and as before after the
    last; they must be `restored`. By default `positions` and `mrope_positions`, where they are declared.
    A call returns `Drafts` with one row a request. All else is as in `DecodeRunner`.
    """

    def __init__(
        self,
        inputs: type[V],
        forward: Forward[V],
        *,
        topk: int,
        steps: int,
        advances: Sequence[str] | None = None,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Mapping[str, Bound] = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[CaptureOptions],
    ) -> None:
        config = config_of(type(self), backend, options)
        _check_counts(topk, steps)
        check_step("forward", forward, "the view and a DraftStep")
        declaration = declaration_of(inputs)
        advances = _checked_advances(declaration, advances)
        known = {axis: size for axis, size in ((TOPK, topk), (STEPS, steps)) if axis in declaration.axes}
        self.topk, self.steps = topk, steps
        super().__init__(
            inputs,
            _Drafting(forward, topk, steps, advances),
            attrs.evolve(config, width=topk),
            sizes=_joined(sizes, known),
            settings=settings,
            bind=bind,
            absent=absent,
            lend=lend,
            carry=carry,
            output_rows=BATCH,
            phase=phase,
            state=state,
            ranks=ranks,
            backend=backend,
            one_width=True,
        )


@attrs.frozen(eq=False)
class _Drafting(Generic[V]):
    """What is captured: every step, and the choice of the nodes that the next one goes on from."""

    forward: Forward[V]
    topk: int
    steps: int
    advances: Sequence[str]

    def __call__(self, view: V) -> Drafts:
        slots = view.__dict__
        frontier = Frontier.begin(slots["topk_p"], slots["topk_index"])
        hidden = slots.get("hidden_states")
        if hidden is not None:
            hidden = hidden[:, None].expand(-1, self.topk, *hidden.shape[1:]).flatten(0, 1)
        for index in range(self.steps - 1):
            step = DraftStep(index, _ids(slots, frontier), hidden, frontier.branches)
            logits, hidden = _checked(self.forward(view, step), step, self.topk)
            for name in self.advances:
                if slots[name] is not None:
                    slots[name].add_(1)
            shares, tokens = top_tokens(logits, self.topk)
            frontier = frontier.grow(_by_request(shares, frontier), _by_request(tokens, frontier))
            hidden = _of_rows(hidden, frontier.rows) if hidden is not None else None
        return frontier.drafts()


def _ids(slots: Mapping[str, Any], frontier: Frontier) -> torch.Tensor:
    """The tokens that a step reads, written to their slot where there is one."""
    ids = frontier.tokens.flatten()
    staged: torch.Tensor | None = slots.get(_IDS)
    return ids if staged is None else staged.copy_(ids)


def _by_request(rows: torch.Tensor, frontier: Frontier) -> torch.Tensor:
    """[TOKENS, topk] as [BATCH, topk, topk]."""
    return rows.view(*frontier.tokens.shape, rows.shape[1])


def _of_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The hidden states of the nodes that are gone on from, given which of their request's rows they come from."""
    requests, topk = rows.shape
    first = torch.arange(requests, device=rows.device)[:, None] * topk
    return hidden.index_select(0, (rows + first).flatten())


def _checked(returned: Any, step: DraftStep, topk: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What forward returned, if it is of the right shape: CaptureError."""
    tokens = step.input_ids.shape[0]
    where = f"forward, in draft step {step.index}, must return (logits, hidden states or None)"
    if not isinstance(returned, tuple) or len(returned) != 2:  # noqa: PLR2004 - a pair
        message = f"{where}, got {type(returned).__name__}"
        raise CaptureError(message)
    logits, hidden = returned
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or logits.shape[0] != tokens or logits.shape[1] < topk:  # noqa: PLR2004 - rows and words
        message = f"{where}: expected logits of [{tokens}, words] with at least {topk} words, got {_said(logits)}"
        raise CaptureError(message)
    if hidden is not None and (not isinstance(hidden, torch.Tensor) or hidden.shape[:1] != (tokens,)):
        message = f"{where}: expected hidden states with {tokens} rows, one a token, got {_said(hidden)}"
        raise CaptureError(message)
    return logits, hidden


def _said(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_counts(topk: int, steps: int) -> None:
    for name, count in (("topk", topk), ("steps", steps)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            message = f"a draft needs {name}= of at least 1, got {count!r}"
            raise ConfigError(message)


def _checked_advances(declaration: Declaration, wanted: Sequence[str] | None) -> Sequence[str]:
    """The slots that advance. ConfigError where one that the runner reads or writes is missing or of another kind."""
    slots = declaration.slots
    advances = [name for name in POSITIONS if name in slots] if wanted is None else checked_names("advances", wanted)
    for name in _FIRST:
        if name not in slots or slots[name].shape != (Dim.of(BATCH), Dim.of(TOPK)):
            message = (
                f"{declaration.name} needs a slot {name!r} of shape [BATCH, TOPK]: the draft's tree begins with it"
            )
            raise ConfigError(message)
    if _IDS in slots and not slots[_IDS].rewritten:
        message = f"slot {_IDS!r}: the draft writes it in each step: declare it with staged(), or leave it out"
        raise ConfigError(message)
    for name in advances:
        if name not in slots or not slots[name].restored:
            message = (
                f"{declaration.name} needs a slot {name!r} with restored=True: each draft step advances it (advances=)"
            )
            raise ConfigError(message)
    return advances


def _joined(sizes: Sizes, known: Sizes) -> Sizes:
    """Sizes with those that the runner knows. ConfigError where another was given."""
    sizes = checked_sizes(sizes)
    for axis, size in known.items():
        if sizes.get(axis, size) != size:
            message = (
                f"sizes of {axis} is {sizes[axis]}, and {axis.name.lower()}= is {size}: give {axis.name.lower()}= alone"
            )
            raise ConfigError(message)
    return {**sizes, **known}
