"""In place of transformers' input classes and graphs: a batch of a declaration, and a runner."""

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingAsyncIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import TMP_TOKEN_ID

from batching.inputs import BATCH, KEYS, OUTPUTS, PAGES, REQUESTS, TOKENS, Layers, inputs_for
from batching.options import Options
from slotgraph.graphs import GraphRunner


class SlotIOs:
    """Makes a batch of the requests that transformers' scheduler chose, and reads tokens back.

    Attributes:
        declare: Makes the declaration for a model.
        declaration: What a step reads.
        sizes: Its fixed sizes.
        most_requests: The most requests of a step.
        batch: The next step's batch.
        outputs: What the last step returned.
    """

    declare: Callable[..., Any]
    compute_stream = None
    use_block_table = False

    def __init__(
        self,
        cache: Any,
        config: Any,
        continuous_batching_config: Any,
        device: torch.device,
        model_dtype: torch.dtype,
        logit_processor: Any,
    ) -> None:
        if logit_processor.do_processing:
            raise NotImplementedError("logits processors take arguments of their own: declare a slot for each")
        self.allocators = {one.layer_type: one for one in cache.cache_allocators.values()}
        self.layers = {
            kind: Layers(
                page=one.tokens_per_page,
                stride=one.block_physical_stride,
                trash=one.write_trash_index,
                fresh=one.sentinel_index,
                window=getattr(one, "sliding_window", 0),
            )
            for kind, one in self.allocators.items()
        }
        self.device, self.cache = device, cache
        self.most_requests = continuous_batching_config.max_requests_per_batch
        self.declaration = self.declare(self.layers, model_dtype)
        outputs = 1 + continuous_batching_config.return_logprobs
        longest = min(cache.max_tokens_read, config.max_position_embeddings)
        pages = max(-(-longest // one.page) for one in self.layers.values())
        self.sizes = {PAGES: pages, REQUESTS: self.most_requests + 1, OUTPUTS: outputs}
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._launched = collections.deque[tuple[Sequence[Any], torch.Tensor, Any]]()
        self._rows = dict[int, int]()  # by the id of a state, which the last requests keep alive
        self._requests: Sequence[Any] = ()

    def prepare_batch_tensors(self, requests_in_batch: Sequence[Any], *_: Any, **__: Any) -> None:
        """Make the batch: tokens and lengths as lists, and the pages of each request as its allocator has them."""
        ids, carried_from, past, new = list[int](), list[int](), list[int](), list[int]()
        tables = [(one.block_table, list[Any]()) for one in self.allocators.values()]
        last_rows, rows = self._rows, dict[int, int]()
        for row, one in enumerate(requests_in_batch):
            state, count = one.state, one.query_length
            if count == 1:
                carried_from.append(last_rows.get(id(state), -1))
            else:
                carried_from += [-1] * count
            ids += state.tokens_to_process
            past.append(state.position_offset)
            new.append(count)
            state.position_offset += count
            if one.has_new_token:
                state.tokens_to_process = [TMP_TOKEN_ID]
                rows[id(state)] = row
            for block_table, pages in tables:
                pages.append(block_table[state.request_id])
        self._requests, self._rows = requests_in_batch, rows
        past_lens, query_lens = np.array(past, np.int32), np.array(new, np.int32)
        order = np.arange(len(new), dtype=np.int32)
        self.batch = {
            "host_ids": ids,
            "carried_from": carried_from,
            "token_request": order.repeat(query_lens),
            "past_lens": past_lens,
            "query_lens": query_lens,
            "key_request": self._key_requests(order, past_lens, query_lens),
            "pages": {kind: pages for kind, (_, pages) in zip(self.allocators, tables, strict=True)},
        }

    def _key_requests(self, order: Any, past_lens: Any, query_lens: Any) -> dict[str, Any]:
        """Return the request of each key, by kind of layers. Those of fewer keys have -1 behind theirs."""
        found = {kind: order.repeat(layers.cached(past_lens) + query_lens) for kind, layers in self.layers.items()}
        most = max(map(len, found.values()))
        for kind, keys in found.items():
            if len(keys) < most:
                found[kind] = np.full(most, -1, np.int32)
                found[kind][: len(keys)] = keys
        return found

    def get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002
        """Return the batch, which the model runner takes as it is."""
        return self.batch

    def carry_over_tokens(self, *_: Any) -> None:
        """Do nothing: `input_ids` takes carried tokens."""

    def retrieve_device_outputs(self) -> None:
        """Copy the step's outputs to the host, without waiting for them."""
        outputs, is_there = self.outputs, None
        if self.device.type == "cuda":
            outputs = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=True)
            outputs.copy_(self.outputs, non_blocking=True)
            is_there = torch.cuda.Event()
            is_there.record()
        self._launched.append((self._requests, outputs, is_there))

    def prepare_batch_update(self) -> tuple[Sequence[Any], list[int], list[float] | None]:
        """Return the requests of the oldest step, and the tokens of those that have one."""
        requests, outputs, is_there = self._launched.popleft()
        if is_there is not None:
            is_there.synchronize()
        chosen = outputs[[row for row, one in enumerate(requests) if one.has_new_token]]
        logprobs = chosen[:, 1].contiguous().view(torch.float32).tolist() if outputs.shape[1] > 1 else None
        return requests, chosen[:, 0].tolist(), logprobs


class SlotAsyncIOs(SlotIOs, ContinuousBatchingAsyncIOs):  # type: ignore[misc] # transformers has no types
    """The same for transformers' loop that prepares a step while the one before runs."""

    current_pair = 0  # the loop switches it; there is one set of buffers and graphs here


class SlotModelRunner(ModelRunner):  # type: ignore[misc] # transformers has no types
    """Runs transformers' own forward pass and sampling in captured graphs.

    Attributes:
        options: The sizes to capture.
    """

    options: Options
    runner: GraphRunner[Any, torch.Tensor]

    def maybe_pad_inputs(self, num_q_tokens: int, max_kv_read: int, *_: Any, **__: Any) -> tuple[int, int]:
        """Leave the sizes as they are, since fills pad."""
        return num_q_tokens, max_kv_read

    def warmup(self, model: Any) -> None:
        """Capture all graphs."""
        ios, options = self.inputs_and_outputs, self.options
        kinds, keeps_logits = ios.layers, self.supports_logits_to_keep(model)

        def step(view: Any) -> torch.Tensor:
            masks = {kind: mask[None, None] for kind, mask in view.attention_mask.items()}
            arguments = {
                "input_ids": view.input_ids[None],
                "position_ids": view.position_ids[None],
                "attention_mask": masks if len(kinds) > 1 else next(iter(masks.values())),
                "logits_indices": view.logits_indices,
                "read_index": [*view.read_index.values()],
                "write_index": [*view.write_index.values()],
                "cu_seq_lens_k": dict.fromkeys(kinds, view.query_lens),  # for flash attention alone
                "max_length_k": dict.fromkeys(kinds, 0),
                "cache": self.cache,
                "use_cache": False,
                "is_causal": False,
            }
            if keeps_logits:
                arguments["logits_to_keep"] = view.logits_indices
            self._forward_process_and_sample(model, arguments, None, None, view.output_ids)
            return view.output_ids[:, : len(view.query_lens)].T.clone()

        grid = [
            {TOKENS: tokens, BATCH: min(tokens, ios.most_requests), KEYS: keys}
            for tokens in options.tokens
            for keys in options.keys
        ]
        self.runner = GraphRunner(
            ios.declaration, step, buckets=grid, output_rows=BATCH, sizes=ios.sizes, backend=options.backend
        )
        self.runner.capture()

    def compute_batch(self, model: Any, batch_data: Any) -> None:  # noqa: ARG002 - graphs have captured the model
        """Fill and replay."""
        self.inputs_and_outputs.outputs = self.runner(batch_data)


@contextlib.contextmanager
def swapped(options: Options, declare: Callable[..., Any] = inputs_for) -> Iterator[None]:
    """Let transformers make these classes in place of its own."""
    ours = {
        "ContinuousBatchingIOs": type("Ios", (SlotIOs,), {"declare": staticmethod(declare)}),
        "ContinuousBatchingAsyncIOs": type("AsyncIos", (SlotAsyncIOs,), {"declare": staticmethod(declare)}),
        "ModelRunner": type("Runner", (SlotModelRunner,), {"options": options}),
    }
    with mock.patch.multiple(continuous_api, **ours):
        yield
