"""The decode runner: request-axis buckets, one captured graph each, eager where none fits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Unpack, final

import torch

from ..backends.base import Backend
from ..dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Sizes
from ..dataflow.buffers import Buffers
from ..dataflow.declaration import Declaration
from ..dataflow.errors import BatchError, ConfigError, DeclarationError, MissingSourceError
from ..dataflow.ready import Ready
from ..dataflow.sizing import Sizer
from ..dataflow.sources import Side
from .captured import Captured
from .config import DecodeOptions, RunnerConfig, config_of
from .decision import Decision
from .filler import Filler
from .graph_runner import GraphRunner
from .graphs import GraphSet
from .outputs import rows_each
from .pool import Bindings, Phase
from .ranks.group import Ranks
from .runner import Filled
from .stage import NO_BINDINGS, NO_LOANS, NO_PATTERNS, NO_SIZES, Lend, Stage, V, with_width


class Widths:
    """Tells batches of another width by their sizes on TOKENS and BATCH, each read by itself.

    width: tokens a request, in every bucket. Only required sources are believed: where they do not tell both axes, each
    batch counts as one of the captured width, and is refused where it is none. only: whether the step stands for that
    width alone.
    """

    def __init__(self, declaration: Declaration, width: int, fixed: Sizes, *, only: bool = False) -> None:
        self._width = width
        self._only = only
        self._name = declaration.name
        self._bound = [name for name, slot in declaration.slots.items() if WIDTH in slot.axes]
        self._size = _apart(declaration, fixed)
        self._tokens = declaration.varying.index(TOKENS) if self._size is not None else 0

    def of(self, batch: Any, side: Side) -> tuple[int, tuple[int, ...]] | None:
        """The width and live sizes of a batch whose requests have as many tokens each, but not as captured; or None."""
        if self._size is None:
            return None
        try:
            live = self._size(batch, side)
        except BatchError:  # which the captured width's own sizes word better
            return None
        tokens, requests = live[self._tokens], live[-1]
        if not tokens or not requests or tokens % requests or tokens == requests * self._width:
            return None
        return tokens // requests, live

    def decision(self, width: int) -> Decision:
        """Eager, for a batch of this width. BatchError where the step, or slots, would be of another than the batch."""
        said = f"requests have {_tokens(width)} each, and graphs were captured for {_tokens(self._width)}"
        if self._only:
            message = f"{said}, the only width of this runner's step: bring {_tokens(self._width)} a request"
            raise BatchError(message)
        if self._bound:
            names = ", ".join(map(repr, self._bound))
            message = f"{said}; slots {names} of {self._name} follow from WIDTH: make a runner with width={width}"
            raise BatchError(message)
        return Decision("eager", None, "width_differs", said)


def _apart(declaration: Declaration, fixed: Sizes) -> Sizer | None:
    """What reads TOKENS and BATCH apart; None where they cannot be, or where one may be absent."""
    if TOKENS not in declaration.varying or BATCH not in declaration.varying:
        return None
    try:
        size = Sizer(declaration, {}, fixed, BATCH)
    except DeclarationError:  # one of them follows from the other, and is told by nothing else
        return None
    return size if size.required else None


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


class RequestRunner(GraphRunner[V]):
    """Captures a whole step for buckets of requests. Subclasses are final: they say what the step is."""

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        config: RunnerConfig,
        *,
        sizes: Sizes,
        settings: object,
        bind: Bindings,
        absent: Sequence[Collection[str]],
        lend: Mapping[str, Lend],
        carry: tuple[str, ...],
        output_rows: Axis | None,
        phase: Phase | None,
        state: Iterable[torch.Tensor] | None,
        ranks: Ranks | None,
        backend: str | Backend,
        one_width: bool = False,
    ) -> None:
        """Take the arguments of `DecodeRunner`, its options as `config`.

        With `one_width` the step stands for `width` alone: a batch of another width is refused, not run eagerly.
        """
        width = config.width
        relations, sizes = {TOKENS: BATCH * width}, with_width(inputs, sizes, width)
        stage = Stage.of(inputs, step, backend, sizes, settings, relations, lend=lend, ranks=ranks, state=state)
        self._rows_each = rows_each(output_rows, width)
        self._widths = Widths(stage.declaration, width, stage.sizes, only=one_width)
        super().__init__(
            config,
            stage,
            config.ladder(),
            lambda rows: {BATCH: rows, TOKENS: rows * width},
            said="buckets= and width=",
            leading=(BATCH, TOKENS),
            relations=relations,
            path="graph",
            absent=absent,
            carry=carry,
            bind=bind,
            phase=phase,
        )

    def _graph_set(self, buffers: Buffers, filler: Filler[V]) -> GraphSet[V]:
        return GraphSet(self.stage, buffers, filler, rows_each=self._rows_each, modes=self.config.modes)

    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        return self.stage.viewer(ready)

    @property
    def _is_whole(self) -> bool:
        return True

    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        return self.graphs.replay(captured, filled.rows)

    def _bound_run(
        self, captured: Captured, ready: Ready, filled: Filled[V], *, whole: bool
    ) -> tuple[Callable[[Any], Any], Callable[[], object] | None]:
        if not whole:
            return super()._bound_run(captured, ready, filled, whole=whole)
        graphs, filler, rows = self.graphs, self.graphs.filler, filled.rows
        clock, counted, each = graphs.clock, self._tally.repeats(captured.rows, rows), graphs.rows_each
        outputs = captured.cut(None if each is None else rows * each)
        replay, note = captured.graph.replay, filler.hosts.note if filler.hosts.possible else None
        alone = captured.filling.alone if filler.lowering == "fused" else None

        def finish(_: Any) -> Any:
            replay()
            clock.replays += 1
            counted.steps += 1
            if note is not None:
                note()
            return outputs()

        return finish, None if alone is None else alone.replay

    def inputs(self, bucket: int, absent: Collection[str] = ()) -> V:
        """A bucket's slots, all padded rows of them, for a producer that writes them itself.

        A batch then brings the live rows of such a slot, `view.input_ids[:rows]`, as its source: being where they
        belong, they are not copied, and the tail is reset as ever. Write on the stream that steps run on.
        Raises ConfigError where there is no graph for the bucket.
        """
        pattern = frozenset(absent)
        captured = self.graphs.captured.get((bucket, pattern))
        if captured is None:
            with self._gate.open():  # it may be captured now
                captured = self.graphs.get(bucket, pattern)
        if captured is None:
            without = f" without {', '.join(map(repr, sorted(pattern)))}" if pattern else ""
            message = (
                f"there is no graph of bucket {bucket}{without}: buckets are {self.buckets.sizes}, after capture()"
            )
            raise ConfigError(message)
        return self.graphs.view(captured, pattern)

    def _fill_otherwise(self, refused: BatchError, batch: Any, side: Side) -> Filled[V]:
        """Fill without a graph where requests have another width than was captured and all else fits."""
        other = self._widths.of(batch, side)
        if other is None:
            raise refused
        width, live = other
        eager, own, relations = self._eager, self._widths.decision(width), {TOKENS: BATCH * width}
        sizes = live[: self._axes]
        try:
            decision = self.coordinator.settle(own, live, lambda: eager.admit(batch, sizes, side))
            view = eager.fill_sized(batch, sizes, side, relations)
        except MissingSourceError:  # of any width, and the plainer thing to say
            raise
        except BatchError:
            raise refused from None
        return Filled(view, decision, live)

    def decide(self, batch: Any, **side: Any) -> Decision:
        """The path that a batch would take, its bucket, and why. Raises as a call does, where sizes tell."""
        other = self._widths.of(batch, side)
        if other is not None and self.report is not None:
            return self._widths.decision(other[0])
        return super().decide(batch, **side)


@final
class DecodeRunner(RequestRunner[V]):
    """Captures a step for buckets of requests, and replays the smallest that a batch fits.

    Args:
        inputs: The declaration class.
        step: Called with its view; returns tensors with one row a token.
        sizes: Sizes of the fixed axes, and capacities of varying ones beside BATCH and TOKENS.
        settings: What `when=` of slots refers to.
        bind: Tensors to adopt as buffers, by slot.
        absent: Further patterns of absent optional slots to capture, each a collection of names. With none, a
            batch that lacks one runs eagerly.
        lend: By slot, a call that gets its view before the step's code runs (warm-up, capture, eager runs), and
            None after it: so an object outside, such as a KV cache, is part of what is captured.
        carry: Slots that the batch has computed right where a step runs eagerly, such as counts of padded rows.
        output_rows: The axis that the rows of outputs follow, TOKENS or BATCH, or None to get outputs whole.
        phase: Of a pool, whose memory others use in theirs.
        state: The tensors beside slots, or parts of them, that captures and checks put back after each run of the
            step that nobody asked for. By default all that its operators write is found and put back; a large KV
            cache that a custom operator writes may be too large for that: give the parts that padded rows write,
            or `()`.
        ranks: Those that run each step together, in one bucket.
        backend: A backend or its name.
        options: Those of `DecodeOptions`.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        sizes: Sizes = NO_SIZES,
        settings: object = None,
        bind: Bindings = NO_BINDINGS,
        absent: Sequence[Collection[str]] = NO_PATTERNS,
        lend: Mapping[str, Lend] = NO_LOANS,
        carry: tuple[str, ...] = (),
        output_rows: Axis | None = TOKENS,
        phase: Phase | None = None,
        state: Iterable[torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        backend: str | Backend = "auto",
        **options: Unpack[DecodeOptions],
    ) -> None:
        config = config_of(type(self), backend, options)
        super().__init__(
            inputs,
            step,
            config,
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
