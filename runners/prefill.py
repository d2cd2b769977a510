"""The prefill runners: a part of the step is captured by tokens, and the rest runs eagerly around it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, Unpack, final

from torch import nn

from ..dataflow.axes import BATCH, TOKENS, Axis
from ..dataflow.buffers import Buffers
from ..dataflow.capabilities import chosen_lowering
from ..dataflow.errors import ConfigError
from ..dataflow.ready import Ready
from .capture import Captured
from .config import check_step, config_of
from .decode import Finish, GraphRunner, StackArguments
from .runner import Filled
from .stacked.capture import StackCapture, live_viewer
from .stacked.replay import Stack, stack_step
from .stacked.splitting import Operator, Splitter
from .stage import Stage, V

OFFER: Final = "layer_stack"


class StackRunner(GraphRunner[V]):
    """A runner whose graphs are those of a stack. Subclasses are final, and say what of a step is captured.

    A bucket is captured on the declaration's `placeholder`, one request that owns all its tokens, and its graphs hold
    for any number of requests. No fill is inside a graph, because what runs before it reads the slots, too.

    Attributes:
        output_rows: The axis that the rows of outputs follow; None where outputs are handed out whole.
    """

    is_whole = False

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        given: Mapping[str, Any],
        stack: Stack | None,
        splitter: Splitter | None,
        output_rows: Axis | Literal["auto"] | None,
    ) -> None:
        """Check what is given; `capture` makes the graphs.

        Args:
            inputs: The declaration class.
            step: Called with its view.
            given: The other arguments.
            stack: What of the step is captured; None for all of it.
            splitter: What marks its breaks, if not its code.
            output_rows: The axis that the rows of outputs follow.

        """
        config, stage = config_of(type(self), given), Stage.of(inputs, step, **given)
        axes, varying = stage.declaration.axes, stage.declaration.varying
        if output_rows == "auto":
            output_rows = BATCH if BATCH in axes else TOKENS
        if output_rows not in (TOKENS, BATCH, None):
            raise ConfigError(f"output_rows is TOKENS, BATCH or None, got {output_rows!r}")
        self._stack, self._splitter, self.output_rows = stack, splitter, output_rows
        self._requests = varying.index(BATCH) if BATCH in varying else None
        super().__init__(
            config,
            stage,
            config.ladder(of_tokens=True),
            lambda tokens: {TOKENS: tokens, BATCH: config.max_batch},
            given,
            said="max_batch= and buckets=",
            leading=(TOKENS,),
            path="breakable" if splitter is None else "piecewise",
        )
        self.cuts = output_rows is not None
        if output_rows not in (*axes, None):
            raise ConfigError(
                f"output_rows is {output_rows}, which no slot of {stage.declaration.name} has: pass another, or None"
            )

    @property
    def _lowering(self) -> str:
        lowering = chosen_lowering(self.stage.backend.capabilities, self.config.lowering)
        return "fused" if lowering == "in_graph" else lowering  # what runs before the graphs reads the slots, too

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        stage, slots = self.stage, self.stage.declaration.slots
        capturing = StackCapture(stage, buffers, self._stack, self._splitter, self.output_rows)
        handed = stage.declaration.parameters.items()  # those over requests are for breaks: no graph knows of requests
        parameters = {argument: name for argument, name in handed if BATCH not in slots[name].axes}
        return {"recipe": capturing, "holder": capturing.holder, "parameters": parameters}

    def _viewer(self, ready: Ready) -> Callable[[Any], V]:
        """Token slots padded to the bucket, request slots live."""
        return live_viewer(self.stage, self.graphs.buffers, ready)

    def _run_graph(self, filled: Filled[V], captured: Captured) -> Any:
        graphs = self.graphs
        try:
            return stack_step(graphs, self._stack, captured, *self._rows(captured, filled))(filled.view)
        except BaseException:  # slots may be as the step has written them
            graphs.buffers.distrust()
            raise

    def _finish(self, captured: Captured, ready: Ready, filled: Filled[V]) -> Finish:
        rows, counted = self._rows(captured, filled), self.tally.repeated[captured.rows, filled.rows]
        return stack_step(self.graphs, self._stack, captured, *rows, self._viewer(ready), counted)

    def _rows(self, captured: Captured, filled: Filled[V]) -> tuple[int | None, int | None]:
        """How many rows outputs must have, and how many of them are live; None for any, and for all."""
        if self.output_rows == BATCH:
            return 0 if self._requests is None else filled.live[self._requests], None
        return (None, None) if self.output_rows is None else (captured.rows, filled.rows)


@final
class PrefillRunner(StackRunner[V]):
    """Captures the pieces of a step between named operators for buckets of tokens, and replays them around these.

    Args:
        inputs: The declaration class.
        step: Called with its view.
        splits: The operators at which the step is cut, such as "mylib::attention". They run eagerly in each step, and
            find its live metadata in the view, which they are handed or ask `current_view` for.
        stack: The module within the step that is captured, or a dotted path to it; the whole step where there is none.
            Token slots have a bucket's rows, all of which are executed. Request slots have the batch's, up to
            `max_batch`, and may be read in splits, and outside of the stack.
        output_rows: TOKENS to cut outputs to the live tokens, BATCH for one row a request, None to get them whole.
        options: Those of `StackArguments`, as of `DecodeRunner`; buckets are tokens.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        splits: Collection[Operator],
        stack: nn.Module | str | None = None,
        output_rows: Axis | None = TOKENS,
        **options: Unpack[StackArguments],
    ) -> None:
        super().__init__(inputs, step, options, find_stack(step, stack), Splitter(splits), output_rows)


@final
class BreakableRunner(StackRunner[V]):
    """Captures the stack of a model, its inner layers, for buckets of tokens, and runs the rest eagerly around it.

    What the stack calls that is marked with `graph_break` runs between graphs, on this step's own metadata, so that the
    graphs do not depend on the number of requests. Embeddings before, head and logits after the stack see the live
    view: token slots have a bucket's rows, all of which are executed, request slots the batch's, up to `max_batch`.

    Args:
        inputs: The declaration class.
        step: Called with its view; it calls the stack once.
        stack: The module, or a dotted path to one under `step`. Where it is not given, the one that the step's method
            `layer_stack()` offers.
        output_rows: BATCH for one row a request, TOKENS to cut outputs to the live tokens, None to get them whole;
            "auto" is BATCH where the declaration has slots over requests, else TOKENS.
        options: Those of `StackArguments`, as of `DecodeRunner`; buckets are tokens.
    """

    def __init__(
        self,
        inputs: type[V],
        step: Callable[[V], Any],
        *,
        stack: nn.Module | str | None = None,
        output_rows: Axis | Literal["auto"] | None = "auto",
        **options: Unpack[StackArguments],
    ) -> None:
        found = find_stack(step, stack)
        if found is None:
            kind = getattr(step, "__qualname__", type(step).__name__)
            raise ConfigError(
                f"there is no stack to capture: stack= is not given, neither a module nor a dotted path to one, and "
                f"{kind} offers no method {OFFER}(); name the model's inner layers, as in stack='model' or "
                "stack=model.layers"
            )
        super().__init__(inputs, step, options, found, None, output_rows)


def find_stack(step: Callable[..., Any], stack: nn.Module | str | None) -> Stack | None:
    """The module that was given, the one at a dotted path under the step, or the one that the step offers; else None.

    Raises ConfigError where a path leads nowhere or to no module; it says how far it leads and what is there.
    """
    check_step("step", step)
    if isinstance(stack, nn.Module):
        return Stack(stack, type(stack).__name__)
    if isinstance(stack, str):
        found: Any = step
        name = getattr(step, "__qualname__", type(step).__name__)
        for part in stack.split("."):
            inner = getattr(found, part, None)
            if inner is None:
                held = {**getattr(found, "__dict__", {}), **getattr(found, "_modules", {})}
                there = [repr(one) for one, value in held.items() if isinstance(value, nn.Module)]
                raise ConfigError(
                    f"stack={stack!r} leads nowhere: {name} has no {part!r}; modules there: "
                    f"{', '.join(there) or 'none'}"
                )
            found, name = inner, part if found is step else f"{name}.{part}"
        said, name = f"stack={stack!r} leads to", stack
    elif stack is not None:
        raise ConfigError(f"stack is a module, or a dotted path to one under the step, not {type(stack).__name__}")
    else:
        offer = getattr(step, OFFER, None)
        if offer is None:
            return None
        found, name = offer(), f"{type(step).__name__}.{OFFER}()"
        said = f"{name} returned"
    if not isinstance(found, nn.Module):
        raise ConfigError(f"{said} {type(found).__name__}, which is no module")
    return Stack(found, name)
