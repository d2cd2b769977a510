"""The prefill runner: a step traced and cut at operators, of which the pieces are captured by tokens."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack, final

import torch
from torch import nn

from ..backends.base import Backend
from ..dataflow.axes import TOKENS, Axis, Sizes
from .config import StackOptions, config_of
from .pool import Phase
from .ranks.group import Ranks
from .stacked.capture import Boundary
from .stacked.runner import StackRunner
from .stacked.splitting import Operator, Splitter
from .stacked.stack import find_stack
from .stage import NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, Stage, V


@final
class PrefillRunner(StackRunner[V]):
    """Captures the pieces of a step between named operators for buckets of tokens, and replays them around these.

    inputs: the declaration class. step: called with its view. splits: the operators at which the step is cut, such as
    "mylib::attention"; they run eagerly in each step and find its live metadata in the view, which they are handed or
    ask `current_view` for. stack: the module within the step that is captured, or a dotted path to it; the whole step
    where there is none. Token slots have a bucket's rows, all of which are executed; request slots have the batch's,
    up to `max_batch`, and may be read in splits, and outside of the stack.
    output_rows: TOKENS to cut outputs to the live tokens, BATCH for one row a request, None to get them whole.
    sizes, settings, absent, lend, carry, phase, state, ranks: as of `DecodeRunner`. Options are those of
    `StackOptions`; buckets are tokens.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        splits: Collection[Operator],
        stack: nn.Module | str | None = None,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = TOKENS,
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[StackOptions],
    ) -> None:
        config = config_of(type(self), backend, options)
        stage = Stage.of(inputs, step, backend, sizes, settings, lend=lend, ranks=ranks, state=state)
        boundary = Boundary(find_stack(step, stack), "piecewise", Splitter(splits))
        super().__init__(stage, boundary, config, absent=absent, carry=carry, output_rows=output_rows, phase=phase)
