"""The graph runner: captures a whole step for buckets that have padded sizes on several axes."""

import math
from typing import Any, Unpack, final

from ..dataflow.axes import Axis, Sizes
from ..dataflow.errors import ConfigError, did_you_mean
from ..dataflow.inputs import V
from .decode import GraphArguments, WholeStepRunner
from .engine.config import checked, config_of, refuse
from .engine.outputs import Out, check_output_rows
from .engine.selection import BucketKey, padded_order
from .engine.stage import Stage, StepFunction


@final
class GraphRunner(WholeStepRunner[V, Out]):
    """Captures a step for buckets of padded sizes on several axes, and replays the cheapest that holds a batch.

    A bucket is a tuple of its sizes in the order of the axes, or a number if there is one axis. Of the buckets that
    hold a batch, that with the least product of sizes is taken, then that with the least sum. Other axes that vary have
    one padded size, that of `sizes`. No axis follows from another but by `relations`.

    Args:
        inputs: The declaration class.
        step: Called with its view, or with the slots and fields that its parameters name; returns tensors.
        buckets: The padded sizes on each axis, whose combinations are all captured, such as `{BATCH: [1, 8], KV: [1024,
            8192]}`, or a list of mappings with one size for each axis.
        relations: Axes that follow from others, such as `{TOKENS: BATCH * 4}`.
        cost: Called once for each bucket with the padded sizes of its axes. A batch takes the bucket that costs least.
        output_rows: The axis that the rows of outputs follow, by default the first of `buckets`, or None to get outputs
            whole.
        options: `sizes`, `settings`, `bind`, `keep_bound`, `absent`, `variants`, `phase`, `state`, `ranks`, `config`,
            `backend`, `max_waste`, `warmups`, `progress`, `debug`, `sharing`, `graphs`, `lowering`, `compile_computed`,
            `lazy`, `error_mode` and `outputs`, as for `DecodeRunner`. Ranks must get the same batches.

    Raises:
        ConfigError: An argument does not fit.
        BindError: A tensor cannot be adopted.
    """

    def __init__(self, inputs: type[V], step: StepFunction[V, Out], **options: Unpack[GraphArguments]) -> None:
        config = config_of(type(self), options)
        stage = Stage.of(inputs, step, **options)
        grid: Any = config.buckets
        cost = options.get("cost")
        found = dict[BucketKey, Sizes]()
        if not grid or not isinstance(grid[0], dict):
            refuse("option 'buckets'", "padded sizes by axis, such as {BATCH: [1, 2, 4], KV: [1024, 8192]}", grid)
        if not (cost is None or callable(cost)):
            refuse("cost", "a function of a bucket's padded sizes by axis, or None", cost)
        axes = [_axis_of(stage, name) for name in grid[0]]
        output_rows = options.get("output_rows", axes[0])
        check_output_rows(output_rows, stage.declaration.varying)
        for one in grid:
            sizes: Any = [one[axis.name] for axis in axes]
            padded = stage.padded(dict(zip(axes, sizes, strict=True)), "buckets=")
            found[tuple(sizes) if len(axes) > 1 else sizes[0]] = padded

        def order(bucket: BucketKey) -> tuple[Any, ...]:
            try:
                price = 0 if cost is None else cost(dict(found[bucket]))
            except Exception as error:
                raise ConfigError(f"cost raised {type(error).__name__} for bucket {bucket}: {error}") from error
            checked("cost", "a number for each bucket, not NaN", price, (int, float), -math.inf)
            return price, *padded_order(bucket)

        least = f"has the least {' x '.join(grid[0])}" if cost is None else "costs least"
        super().__init__(
            config,
            stage,
            {bucket: found[bucket] for bucket in sorted(found, key=order)},
            {"output_rows": output_rows, **options},
            axes=axes,
            output_rows=output_rows,
            chosen=f": it {least} of those that hold the batch" if len(axes) > 1 or cost is not None else "",
        )


def _axis_of(stage: Stage[Any], name: str) -> Axis:
    """Return the axis of a name. Raise ConfigError if its size does not vary freely in this declaration."""
    declaration = stage.declaration
    known = {axis.name: axis for axis in (*declaration.axes, *declaration.varying)}
    if name not in known:
        near = did_you_mean(name, known)
        raise ConfigError(f"option 'buckets' names {name!r}, an axis that no slot of {declaration.name} has{near}")
    axis = known[name]
    if axis.fixed or axis in stage.relations:
        why = "a runner has one size of it, sizes=" if axis.fixed else f"it follows from {stage.relations[axis]}"
        raise ConfigError(f"option 'buckets' has sizes on {axis}, and {why}: leave it out of buckets")
    return axis
