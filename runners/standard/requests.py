"""What every phase asks of its requests: where their cache is, and how long they are."""

import torch

from ...dataflow.axes import BATCH
from ...dataflow.capabilities import HOST, SEQ_LEN_FILL
from ...dataflow.inputs import Inputs
from ...dataflow.specifiers import copied, host_parameter
from .axes import CONTEXT


class Requests(Inputs):
    """Where each request's cache is, and how long each is.

    req_pool_indices: padded rows look up row 0 of the request table, which no request is given.
    seq_lens: padded rows run attention over the fewest tokens that the backend's kernels bear.
    seq_lens_cpu: plans of attention are made on the host; reading seq_lens back would wait for the device.
    """

    req_pool_indices: torch.Tensor = copied(BATCH, dtype=torch.int64, pad=0, poison=())
    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, converts=(torch.int64,))
    seq_lens_cpu: torch.Tensor | None = copied(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, placement=HOST, converts=(torch.int64,), default=None
    )


class BoundedContext(Requests):
    """A mixin: a request longer than the context is refused before anything is written.

    seq_lens: lists and arrays are looked into; a tensor on the device is not, since that would wait for it.
    seq_lens_cpu: one position too many reads past the rope table and writes past the request's pages.
    """

    seq_lens: torch.Tensor = copied(BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, converts=(torch.int64,), limit=CONTEXT)
    seq_lens_cpu: torch.Tensor | None = copied(
        BATCH,
        dtype=torch.int32,
        pad=SEQ_LEN_FILL,
        placement=HOST,
        converts=(torch.int64,),
        limit=CONTEXT,
        default=None,
    )


class HostLengths(Inputs):
    """A mixin: fused attention that takes lengths as a host argument, which an NPU's graphs are handed at each replay.

    actual_seq_lengths_kv: the host's own lengths, since reading seq_lens back would wait; padded rows as those of it.
    """

    actual_seq_lengths_kv: torch.Tensor = host_parameter(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, source="seq_lens_cpu", converts=(torch.int64,)
    )


class ContextLengths(Inputs):
    """A mixin: paged attention that takes lengths as a host tensor, likewise.

    context_lens: int32, which the operator wants; padded rows as those of seq_lens.
    """

    context_lens: torch.Tensor = host_parameter(
        BATCH, dtype=torch.int32, pad=SEQ_LEN_FILL, source="seq_lens_cpu", converts=(torch.int64,)
    )
