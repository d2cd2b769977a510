"""Code lines of what is replaced, and of what replaces it: no blanks, no comments, no docstrings."""

from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    HostDeviceIOPair,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer, build_attention_mask

from batching import inputs, swapped
from serving.lines import code_lines

THEIRS = (
    ContinuousBatchingIOs,
    HostDeviceIOPair,
    ContinuousBatchingAsyncIOs,
    CudaGraphBuffer,
    build_attention_mask,
    ModelRunner.maybe_pad_inputs,
    ModelRunner.compute_batch,
    ModelRunner._get_forward_fn,  # noqa: SLF001 - to count its lines
    ModelRunner._capture_graph,  # noqa: SLF001 - likewise
    ModelRunner.warmup,
    ModelRunner.run_one_warmup,
)


def table() -> list[str]:
    """Return the code lines of input handling, theirs and ours."""
    theirs, ours = sum(map(code_lines, THEIRS)), sum(map(code_lines, (inputs, swapped)))
    return [f"code lines of inputs and graphs: transformers {theirs}, slotgraph {ours}"]
