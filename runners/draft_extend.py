"""The draft-extend runner: after a verify, the draft model takes in what was accepted, and begins the next tree."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack, final

import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, Axis, Sizes
from ..dataflow.binding import Bound
from ..dataflow.errors import ConfigError
from .config import RunnerConfig
from .decode import RequestRunner
from .options import ExtendOptions, config_of
from .pool import Phase
from .ranks.group import Ranks
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, V


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
