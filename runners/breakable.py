"""The breakable runner: a model's inner layers captured by tokens, in as many graphs as its code marks breaks."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack, final

import torch
from torch import nn

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, Axis, Sizes
from .config import StackOptions, config_of
from .pool import Phase
from .ranks.group import Ranks
from .stacked.capture import Boundary
from .stacked.runner import StackRunner
from .stacked.stack import required_stack
from .stage import NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, Stage, V


@final
class BreakableRunner(StackRunner[V]):
    """Captures the stack of a model, its inner layers, for buckets of tokens, and runs the rest eagerly around it.

    inputs: the declaration class. step: called with its view; it calls the stack once. stack: the module, or a dotted
    path to one under `step`; where it is not given, the one that the step's method `layer_stack()` offers.
    What the stack calls that is marked with `graph_break` runs between graphs, on this step's own metadata; so the
    graphs do not depend on the number of requests. Embeddings before, head and logits after the stack see the live
    view: token slots have a bucket's rows, all of which are executed, request slots the batch's, up to `max_batch`.
    output_rows: BATCH for one row a request, TOKENS to cut outputs to the live tokens, None to get them whole; "auto",
    the default, is BATCH where the declaration has slots over requests, else TOKENS.
    sizes, settings, absent, lend, carry, phase, state, ranks: as of `DecodeRunner`. Options are those of
    `StackOptions`; buckets are tokens.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        stack: nn.Module | str | None = None,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | Literal["auto"] | None = "auto",
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[StackOptions],
    ) -> None:
        config = config_of(type(self), backend, options)
        stage = Stage.of(inputs, step, backend, sizes, settings, lend=lend, ranks=ranks, state=state)
        rows = (BATCH if BATCH in stage.declaration.axes else TOKENS) if output_rows == "auto" else output_rows
        boundary = Boundary(required_stack(step, stack), "breakable")
        super().__init__(stage, boundary, config, absent=absent, carry=carry, output_rows=rows, phase=phase)
