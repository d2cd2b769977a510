"""The decode runner: request-axis buckets, one captured graph each, eager where none fits."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Unpack, final

import attrs
import torch

from ..dataflow.axes import BATCH, TOKENS, WIDTH, Axis, Sizes
from ..dataflow.errors import ConfigError
from ..dataflow.guard import own_guard
from ..dataflow.ready import Ready
from .capture import Captured
from .config import config_of
from .graph_runner import DecodeArguments, Finish, GraphRunner
from .outputs import rows_each
from .runner import Filled
from .stage import NO_SIZES, Stage, V, joined


class RequestRunner(GraphRunner[V]):
    """Captures a whole step for buckets of requests. Subclasses are final: they say what the step is."""

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        given: Mapping[str, Any],
        *,
        output_rows: Axis | None,
        known: Sizes = NO_SIZES,
        width: int | None = None,
    ) -> None:
        """Take the arguments of `DecodeRunner`.

        output_rows: the axis that the rows of outputs follow, where `given` does not say so. known: sizes that the
        runner knows. width: the one that the step stands for, in place of an option.
        """
        config = config_of(type(self), given)
        if width is not None:
            config = attrs.evolve(config, width=width)
        width = config.width
        relations, sizes = {TOKENS: BATCH * width}, joined(inputs, given.get("sizes", {}), {WIDTH: width, **known})
        stage = Stage.of(inputs, step, relations=relations, **{**given, "sizes": sizes})
        super().__init__(
            config,
            stage,
            config.ladder(),
            lambda rows: {BATCH: rows, TOKENS: rows * width},
            given,
            said="buckets= and width=",
            leading=(BATCH, TOKENS),
            path="graph",
            rows_each=rows_each(given.get("output_rows", output_rows), width),
        )

    def _finish(self, captured: Captured, ready: Ready, filled: Filled[V]) -> Finish:
        del ready
        graphs, hosts, rows = self.graphs, self.graphs.filler.hosts, filled.rows
        clock, live, counted = graphs.clock, captured.live, self.tally.repeated[captured.rows, rows]
        shown = None if self._rows_each is None else rows * self._rows_each
        graph, note = captured.graph, hosts.note if hosts.possible else None
        replay, unchanged, last, kept, pointer = graph.replay, own_guard(()), None, None, 0

        def finish(_: Any) -> Any:
            nonlocal unchanged, last, kept, pointer
            replay()
            clock.replays += 1
            counted.steps += 1
            if note is not None:
                note()
            whole = graph.outputs
            if type(whole) is not torch.Tensor:  # a container may be changed by whoever gets it
                return live(shown)
            if whole is last and kept is not None and unchanged(kept) and kept.data_ptr() == pointer:
                return kept
            outputs = whole.detach() if shown is None else whole[:shown]
            if whole is last:  # a backend may make new ones at each replay, of which nothing is worth keeping
                kept, unchanged, pointer = outputs, own_guard([outputs]), outputs.data_ptr()
            else:
                last, kept = whole, None
            return outputs

        return finish

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
            raise ConfigError(
                f"there is no graph of bucket {bucket}{without}: buckets are {self.buckets.sizes}, after capture()"
            )
        return self.graphs.view(captured, pattern)


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
        output_rows: The axis that the rows of outputs follow, TOKENS or BATCH, or None to get outputs whole.
        phase: Of a pool, whose memory others use in theirs.
        state: The tensors beside slots, or parts of them, that captures and checks put back after each run of the
            step that nobody asked for. By default all that its operators write is found and put back; a large KV
            cache that a custom operator writes may be too large for that: give the parts that padded rows write,
            or `()`.
        ranks: Those that run each step together, in one bucket.
        backend: A backend or its name.
        options: Those of `RunnerConfig` that this runner uses.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(self, inputs: type[V], step: Callable[[V], Any], **options: Unpack[DecodeArguments]) -> None:
        super().__init__(inputs, step, options, output_rows=TOKENS)
