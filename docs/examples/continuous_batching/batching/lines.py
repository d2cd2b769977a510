"""Code lines of what is replaced, and of what replaces it: no blanks, no comments, no docstrings."""

import ast
import inspect
import textwrap
from typing import Any

from transformers.generation.continuous_batching.input_outputs import (
    ContinuousBatchingAsyncIOs,
    ContinuousBatchingIOs,
    HostDeviceIOPair,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.utils import CudaGraphBuffer, build_attention_mask

from batching import inputs, swapped

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
    theirs, ours = sum(map(lines_of, THEIRS)), sum(map(lines_of, (inputs, swapped)))
    return [f"code lines of inputs and graphs: transformers {theirs}, slotgraph {ours}"]


def lines_of(part: Any) -> int:
    """Return the code lines of a class, a function or a module."""
    source = textwrap.dedent(inspect.getsource(part))
    lines = source.splitlines()
    texts = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    code = [line.strip() for number, line in enumerate(lines, 1) if number not in texts]
    return sum(bool(line) and not line.startswith("#") for line in code)
