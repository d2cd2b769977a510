"""The prefill runners: a part of the step is captured for buckets of tokens, and the rest runs eagerly around it."""

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, Unpack, final

from torch import nn

from ..dataflow.axes import BATCH, TOKENS
from ..dataflow.buffers import Buffers
from ..dataflow.errors import ConfigError
from ..dataflow.inputs import V
from .decode import CapturingRunner, StackArguments
from .engine.config import config_of
from .engine.graphs import Captured
from .engine.outputs import Out, check_output_rows
from .engine.routes import Route
from .engine.stage import Stage, StepFunction
from .stacked.recipe import Operator, Splitter, capture_stack, live_viewer
from .stacked.stack import Stack, StackRoute


class StackRunner(CapturingRunner[V, Out]):
    """A runner that captures the stack of a step. Subclasses are final, and define its breaks.

    A bucket is captured on the declaration's `placeholder`, one request that owns all its tokens, for any number of
    requests.
    """

    is_whole = False

    def __init__(
        self, inputs: type[V], step: StepFunction[V, Out], given: Mapping[str, Any], splitter: Splitter | None = None
    ) -> None:
        """Take the arguments of its subclasses. splitter: Finds the breaks, if the code does not mark them."""
        config = config_of(type(self), given)
        stage = Stage.of(inputs, step, **given)
        axes = stage.declaration.axes
        self._splitter = splitter
        self.stack = find_stack(step, given.get("stack"))
        self.output_rows = output_rows = given.get("output_rows", BATCH if BATCH in axes else TOKENS)
        self.buckets = config.ladder(of_tokens=True)
        most = config.max_batch
        sized_by = "max_batch= and buckets="
        super().__init__(
            config,
            stage,
            {tokens: stage.padded({TOKENS: tokens, BATCH: most}, sized_by) for tokens in self.buckets.sizes},
            given,
            axes=(TOKENS,),
            path="breakable" if splitter is None else "piecewise",
        )
        check_output_rows(output_rows)
        self.cuts = output_rows is not None
        if output_rows not in (*axes, None):
            raise ConfigError(
                f"output_rows is {output_rows}, which no slot of {stage.declaration.name} has: pass another, or None"
            )

    def _captures(self, buffers: Buffers) -> Mapping[str, Any]:
        stage = self.stage
        slots = self.stage.declaration.slots
        over = stage, buffers, self.stack
        recipe = functools.partial(capture_stack, *over, splitter=self._splitter, output_rows=self.output_rows)
        holder = None if self._splitter is not None else self.stack.code(stage)  # splits read its tensors, too
        handed = stage.declaration.parameters.items()  # only breaks use those over requests
        parameters = {argument: name for argument, name in handed if BATCH not in slots[name].axes}
        return {"recipe": recipe, "holder": holder, "parameters": parameters}

    def _route_of(self, captured: Captured) -> Route[V]:
        viewer = live_viewer(self.stage, captured.filling.bucket)
        counts = self.tally.buckets[captured.bucket]
        return StackRoute(self.graphs, self.stack, captured, viewer, counts, self.output_rows)


@final
class PrefillRunner(StackRunner[V, Out]):
    """Captures the pieces of a step between named operators, for buckets of tokens. The operators run eagerly.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name.
        splits: The operators at which the step is cut, such as "mylib::attention". They run eagerly in each step, and
            find its live metadata in the view, which they get as an argument or from `current_view`.
        stack: The module within the step that is captured, or a dotted path to it. By default it is the whole step.
            Token slots have a bucket's rows, all of which are executed. Request slots have the batch's, up to
            `max_batch`, and may be read in splits, and outside of the stack.
        output_rows: TOKENS, the default, to cut outputs to the live tokens. Other values are as for `BreakableRunner`.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`
            and `backend`, as for `DecodeRunner`; `buckets`, which are tokens, `max_tokens`, `max_batch`, `max_waste`,
            `warmups`, `progress`, `debug`, `sharing`, `graphs`, `lowering`, `lazy`, `error_mode` and `outputs`, as
            `RunnerConfig` describes them.
    """

    def __init__(
        self,
        inputs: type[V],
        step: StepFunction[V, Out],
        *,
        splits: Collection[Operator],
        **options: Unpack[StackArguments],
    ) -> None:
        super().__init__(inputs, step, {"output_rows": TOKENS, **options}, Splitter(splits))


@final
class BreakableRunner(StackRunner[V, Out]):
    """Captures the stack of a model, its inner layers, for buckets of tokens, and runs the rest eagerly around it.

    Functions marked with `graph_break` that the stack calls run between graphs, on this step's own metadata, so that
    the graphs do not depend on the number of requests. Embeddings before, head and logits after the stack see the live
    view: token slots have a bucket's rows, all of which are executed, and request slots the batch's, up to `max_batch`.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name. It calls the stack once.
        stack: The module within the step that is captured, or a dotted path to it. By default it is the whole step.
        output_rows: BATCH for one row a request, TOKENS to cut outputs to the live tokens, None to get them whole. By
            default BATCH if the declaration has slots over requests, else TOKENS.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`
            and `backend`, as for `DecodeRunner`; `buckets`, which are tokens, `max_tokens`, `max_batch`, `max_waste`,
            `warmups`, `progress`, `debug`, `sharing`, `graphs`, `lowering`, `lazy`, `error_mode` and `outputs`, as
            `RunnerConfig` describes them.
    """

    def __init__(self, inputs: type[V], step: StepFunction[V, Out], **options: Unpack[StackArguments]) -> None:
        super().__init__(inputs, step, options)


def find_stack(step: Callable[..., Any], stack: nn.Module | str | None) -> Stack:
    """Return the given module, the one at a dotted path under the step, or the whole step for None.

    Raise ConfigError if the path leads to no module.
    """
    if stack is None:
        return Stack()
    found = stack
    name = stack if isinstance(stack, str) else type(stack).__name__
    if isinstance(stack, str):
        try:
            found = operator.attrgetter(stack)(step)
        except AttributeError as error:
            there = [repr(child) for child, _ in getattr(error.obj, "named_children", tuple)()]
            known = ", ".join(there) or "none, so pass the module itself, such as stack=model.inner"
            raise ConfigError(f"stack={stack!r} leads nowhere: {error}; modules there: {known}") from error
    if not isinstance(found, nn.Module):
        raise ConfigError(
            f"stack is a module, or a dotted path to one under the step; {name} is {type(found).__name__}"
        )
    return Stack(found, name)
