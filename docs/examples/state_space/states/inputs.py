"""What the two kinds of steps read: the field's own declarations, less what is not needed here."""

import torch

from slotgraph import TOKENS, copied, standard


class PromptInputs(standard.Requests, drop=("seq_lens", "seq_lens_cpu")):
    """What one prefill step reads: the prompt of one request, and in req_pool_indices the row that becomes its own."""

    input_ids: torch.Tensor = copied(TOKENS, dtype=torch.int64, pad=0)


class DecodeInputs(standard.DecodeInputs, drop=("seq_lens_cpu", "out_cache_loc", "capture_hidden_mode")):
    """What one decode step reads: a token a request, and its row; padded rows work on row 0, which is nobody's.

    A row has room for the whole of a request, so that its row and its positions say where keys and values go.
    """
